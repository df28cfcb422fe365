// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/chunk/budget.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace patrickstar {
namespace {

TEST(Budget, GivesAllOrNothing) {
  Budget budget(10);
  auto first = budget.TryReserve(7);
  ASSERT_TRUE(first);
  EXPECT_FALSE(budget.TryReserve(4));
  EXPECT_EQ(budget.used_bytes(), 7);
  EXPECT_TRUE(budget.TryReserve(3));
}

TEST(Budget, GetsBytesBackWhenAReservationDies) {
  Budget budget(10);
  {
    auto reservation = budget.TryReserve(10);
  }
  EXPECT_EQ(budget.used_bytes(), 0);
  EXPECT_EQ(budget.peak_bytes(), 10);
}

TEST(Budget, CountsMovedAndSplitReservationsOnce) {
  Budget budget(10);
  auto whole = budget.TryReserve(10);
  Reservation part = whole->Split(4);
  Reservation moved = std::move(*whole);
  EXPECT_EQ(part.num_bytes(), 4);
  EXPECT_EQ(moved.num_bytes(), 6);
  part.Release();
  part.Release();
  EXPECT_EQ(budget.used_bytes(), 6);
}

TEST(Budget, ALowerLimitTakesNothingAwayButRefusesMore) {
  Budget budget(10);
  auto kept = budget.TryReserve(8);
  budget.set_limit_bytes(5);
  EXPECT_EQ(budget.used_bytes(), 8);
  EXPECT_FALSE(budget.TryReserve(1));
}

TEST(Budget, NeverPassesItsLimitUnderThreads) {
  Budget budget(5);
  const auto work = [&budget] {
    for (int round = 0; round < 2000; ++round) auto reservation = budget.TryReserve(2);
  };
  std::vector<std::thread> threads;
  for (int count = 0; count < 4; ++count) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(budget.peak_bytes(), 5);
  EXPECT_EQ(budget.used_bytes(), 0);
}

}  // namespace
}  // namespace patrickstar
