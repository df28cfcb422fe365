// SPDX-License-Identifier: Apache-2.0
//
// Isa: which instruction set the optimizer kernels run on. The best one that the
// processor has is chosen once; PATRICKSTAR_ISA=scalar|avx2|avx512|neon forces
// another. Every choice gives the same bits, so it changes speed only.
// Thread-safe: all functions.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace patrickstar {

enum class Isa : uint8_t {
  kScalar,  // portable C++; fused multiply-adds by the C library where the processor has none
  kAvx2,    // AVX2, FMA and F16C
  kAvx512,  // AVX-512 F
  kNeon,    // 64-bit ARM
};

// The word for `isa` in PATRICKSTAR_ISA and in reports.
std::string_view IsaName(Isa isa);

// What this build has kernels for and this processor can run, slowest first; never empty.
const std::vector<Isa>& AvailableIsas();

// The one that `setting` names; the fastest one where it is null or empty.
// Throws: InvalidArgument if it names none of AvailableIsas().
Isa ChooseIsa(const char* setting);

// ChooseIsa of the environment variable PATRICKSTAR_ISA, which is read at the first call.
// Throws: InvalidArgument.
Isa SelectedIsa();

}  // namespace patrickstar
