// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/chunk/budget.h"

#include "patrickstar/base/check.h"

namespace patrickstar {

void Reservation::Release() {
  if (budget_ != nullptr) budget_->GiveBack(num_bytes_);
  budget_ = nullptr;
  num_bytes_ = 0;
}

Reservation Reservation::Split(int64_t num_bytes) {
  PS_CHECK(num_bytes >= 0 && num_bytes <= num_bytes_, "split ", num_bytes, " of ", num_bytes_);
  num_bytes_ -= num_bytes;
  return Reservation(budget_, num_bytes);
}

std::optional<Reservation> Budget::TryReserve(int64_t num_bytes) {
  int64_t used = used_bytes_.load();
  do {
    if (used + num_bytes > limit_bytes_.load()) return std::nullopt;
  } while (!used_bytes_.compare_exchange_weak(used, used + num_bytes));
  int64_t peak = peak_bytes_.load();
  while (peak < used + num_bytes && !peak_bytes_.compare_exchange_weak(peak, used + num_bytes)) {
  }
  return Reservation(this, num_bytes);
}

}  // namespace patrickstar
