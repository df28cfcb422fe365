// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/base/text.h"

#include <array>
#include <cmath>
#include <iomanip>

namespace patrickstar {

std::string FormatBytes(int64_t num_bytes) {
  if (-1024 < num_bytes && num_bytes < 1024) return StrCat(num_bytes, " bytes");
  constexpr std::array<const char*, 5> kUnits = {"KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(num_bytes) / 1024.0;
  size_t unit = 0;
  // 1023.95 would print as 1024.0 of the smaller unit.
  while (std::abs(value) >= 1023.95 && unit + 1 < kUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  return StrCat(std::fixed, std::setprecision(1), value, ' ', kUnits[unit]);
}

}  // namespace patrickstar
