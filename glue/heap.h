// SPDX-License-Identifier: Apache-2.0
//
// Heap: how malloc treats freed memory, which no budget knows. One setting for the
// process; glibc's own adjustment ends with the first.
#pragma once

#include <cstdint>

namespace patrickstar {

enum class HeapUse : uint8_t {
  kBuilding,  // a model is built or loaded: freed buffers go back to the system at once
  kResident,  // everything fits: freed buffers are kept, for mapping them anew costs page faults
  kSpilling,  // chunks leave memory: large buffers and large free regions go back
};

void TuneHeap(HeapUse use);

}  // namespace patrickstar
