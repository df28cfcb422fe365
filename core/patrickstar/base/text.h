// SPDX-License-Identifier: Apache-2.0
//
// Text: the two helpers that error messages and reports are built from.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>

namespace patrickstar {

// Streams every argument into one string.
template <typename... Parts>
std::string StrCat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// "0 bytes", "512 bytes", "1.5 KiB", "4.0 GiB": binary units, one decimal. Python writes the same.
std::string FormatBytes(int64_t num_bytes);

}  // namespace patrickstar
