// SPDX-License-Identifier: Apache-2.0
//
// Clock: where stall times come from. A seam, so that tests decide what time it is.
// Thread-safe.
#pragma once

#include <chrono>

namespace patrickstar {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual double NowSeconds() const = 0;
};

// Monotonic wall time.
class SteadyClock final : public Clock {
 public:
  double NowSeconds() const override {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
};

}  // namespace patrickstar
