// SPDX-License-Identifier: Apache-2.0
//
// Budget: the bytes that a tier may hold. Reservation: bytes accounted before they
// are allocated, given back when the reservation dies.
//
// A budget never blocks and never lies: TryReserve takes all that is asked for or
// nothing. Waiting for room is the acquirer's business. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <utility>

namespace patrickstar {

class Budget;

class Reservation {
 public:
  Reservation() = default;
  Reservation(Reservation&& other) noexcept
      : budget_(std::exchange(other.budget_, nullptr)),
        num_bytes_(std::exchange(other.num_bytes_, 0)) {}
  Reservation& operator=(Reservation&& other) noexcept {
    std::swap(budget_, other.budget_);
    std::swap(num_bytes_, other.num_bytes_);
    return *this;
  }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;
  ~Reservation() { Release(); }

  int64_t num_bytes() const { return num_bytes_; }

  // Gives the bytes back now.
  void Release();

  // Cuts num_bytes off into a reservation of their own. REQUIRES: num_bytes <= num_bytes().
  Reservation Split(int64_t num_bytes);

 private:
  friend class Budget;
  Reservation(Budget* budget, int64_t num_bytes) : budget_(budget), num_bytes_(num_bytes) {}

  Budget* budget_ = nullptr;
  int64_t num_bytes_ = 0;
};

class Budget {
 public:
  explicit Budget(int64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // All of num_bytes, or nothing.
  std::optional<Reservation> TryReserve(int64_t num_bytes);

  // Lowering the limit below what is used takes nothing away: it only refuses more.
  void set_limit_bytes(int64_t limit_bytes) { limit_bytes_.store(limit_bytes); }

  int64_t limit_bytes() const { return limit_bytes_.load(); }
  int64_t used_bytes() const { return used_bytes_.load(); }
  int64_t free_bytes() const { return limit_bytes() - used_bytes(); }
  int64_t peak_bytes() const { return peak_bytes_.load(); }

 private:
  friend class Reservation;
  void GiveBack(int64_t num_bytes) { used_bytes_.fetch_sub(num_bytes); }

  std::atomic<int64_t> limit_bytes_;
  std::atomic<int64_t> used_bytes_{0};
  std::atomic<int64_t> peak_bytes_{0};
};

}  // namespace patrickstar
