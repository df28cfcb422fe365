// SPDX-License-Identifier: Apache-2.0
//
// PS_CHECK: assertions for programmer errors. They stay on in release builds,
// print both the condition and its place, and throw std::logic_error, so that a
// bug of ours ends one call and not the user's process.
#pragma once

#include <stdexcept>

#include "patrickstar/base/text.h"

#define PS_CHECK(condition, ...)                                                                   \
  do {                                                                                             \
    if (!(condition)) [[unlikely]] {                                                               \
      throw std::logic_error(::patrickstar::StrCat("internal error at ", __FILE__, ":", __LINE__,  \
                                                   ": expected " #condition "; ", ##__VA_ARGS__)); \
    }                                                                                              \
  } while (false)
