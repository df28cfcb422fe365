// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/optim/isa.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "patrickstar/base/error.h"
#include "patrickstar/base/text.h"

namespace patrickstar {
namespace {

std::vector<Isa> FindIsas() {
  std::vector<Isa> isas = {Isa::kScalar};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 &&
      __builtin_cpu_supports("f16c") != 0) {
    isas.push_back(Isa::kAvx2);
  }
  if (__builtin_cpu_supports("avx512f") != 0) isas.push_back(Isa::kAvx512);
#elif defined(__aarch64__)
  isas.push_back(Isa::kNeon);
#endif
  return isas;
}

std::string AvailableNames() {
  std::string names;
  for (const Isa isa : AvailableIsas()) {
    if (!names.empty()) names += ", ";
    names += IsaName(isa);
  }
  return names;
}

}  // namespace

std::string_view IsaName(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return "scalar";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kNeon:
      return "neon";
  }
  return "unknown";
}

const std::vector<Isa>& AvailableIsas() {
  static const std::vector<Isa> isas = FindIsas();
  return isas;
}

Isa ChooseIsa(const char* setting) {
  const std::vector<Isa>& isas = AvailableIsas();
  const std::string_view name = setting == nullptr ? "" : setting;
  if (name.empty()) return isas.back();
  const auto found = std::ranges::find(isas, name, IsaName);
  if (found == isas.end()) {
    throw InvalidArgument(StrCat("cannot run optimizer kernels with PATRICKSTAR_ISA=", name,
                                 ": this machine and build have ", AvailableNames(),
                                 "; set one of these, or unset it for the fastest"));
  }
  return *found;
}

Isa SelectedIsa() {
  static const Isa isa = ChooseIsa(std::getenv("PATRICKSTAR_ISA"));
  return isa;
}

}  // namespace patrickstar
