// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/base/text.h"

#include <array>
#include <iomanip>

namespace patrickstar {

std::string FormatBytes(int64_t num_bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  const bool is_negative = num_bytes < 0;
  double value = is_negative ? -static_cast<double>(num_bytes) : static_cast<double>(num_bytes);
  size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < kUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  std::ostringstream out;
  if (is_negative) out << '-';
  out << std::fixed << std::setprecision(unit == 0 ? 0 : 1) << value << ' ' << kUnits[unit];
  return out.str();
}

}  // namespace patrickstar
