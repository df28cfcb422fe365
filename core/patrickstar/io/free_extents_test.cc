// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/io/free_extents.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace patrickstar {
namespace {

TEST(FreeExtents, TakesTheSmallestHoleThatIsLargeEnough) {
  FreeExtents holes;
  holes.Add(0, 100);
  holes.Add(200, 30);
  holes.Add(300, 50);
  EXPECT_EQ(holes.Take(31), 300);
  EXPECT_EQ(holes.Take(30), 200);
  EXPECT_EQ(holes.Take(100), 0);
  EXPECT_EQ(holes.Take(20), -1);
  EXPECT_EQ(holes.Take(19), 331);
  EXPECT_EQ(holes.TotalBytes(), 0);
  EXPECT_EQ(holes.LargestBytes(), 0);
}

TEST(FreeExtents, TakesTheLowestOfEqualHoles) {
  FreeExtents holes;
  holes.Add(500, 10);
  holes.Add(100, 10);
  EXPECT_EQ(holes.Take(10), 100);
}

TEST(FreeExtents, JoinsNeighboursOnBothSides) {
  FreeExtents holes;
  holes.Add(0, 10);
  holes.Add(20, 10);
  EXPECT_EQ(holes.LargestBytes(), 10);
  holes.Add(10, 10);
  EXPECT_EQ(holes.LargestBytes(), 30);
  EXPECT_EQ(holes.TotalBytes(), 30);
  EXPECT_EQ(holes.Take(30), 0);
}

TEST(FreeExtents, KnowsTheHoleBeforeAPlace) {
  FreeExtents holes;
  EXPECT_EQ(holes.BytesBefore(0), 0);
  holes.Add(10, 10);
  EXPECT_EQ(holes.BytesBefore(20), 10);
  EXPECT_EQ(holes.BytesBefore(21), 0);
  EXPECT_EQ(holes.BytesBefore(10), 0);
}

TEST(FreeExtents, RefusesToFreeTwice) {
  FreeExtents holes;
  holes.Add(10, 10);
  EXPECT_THROW(holes.Add(10, 10), std::logic_error);
  EXPECT_THROW(holes.Add(0, 11), std::logic_error);
  EXPECT_THROW(holes.Add(19, 5), std::logic_error);
  EXPECT_EQ(holes.TotalBytes(), 10);
}

}  // namespace
}  // namespace patrickstar
