// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/layout/chunk_group.h"

#include <gtest/gtest.h>

namespace patrickstar {
namespace {

constexpr int kFloat = 6;
constexpr int kBFloat16 = 15;

TEST(PackTensors, PacksInOrderUpToTheCapacity) {
  const std::vector<int64_t> counts = {32, 32, 32, 32};
  const auto groups = PackTensors(counts, 96);
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups[0].tensors, (std::vector<size_t>{0, 1, 2}));
  EXPECT_EQ(groups[1].tensors, (std::vector<size_t>{3}));
  EXPECT_EQ(groups[1].num_elements, 32);
}

TEST(PackTensors, GivesALargeTensorAChunkOfItsOwnAndKeepsTheOpenOne) {
  const std::vector<int64_t> counts = {32, 1000, 32};
  const auto groups = PackTensors(counts, 64);
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups[0].tensors, (std::vector<size_t>{1}));
  EXPECT_EQ(groups[1].tensors, (std::vector<size_t>{0, 2}));
}

TEST(PackTensors, AlignsEveryOffsetAndOverlapsNothing) {
  const std::vector<int64_t> counts = {1, 31, 33, 64, 7, 100};
  for (const GroupLayout& group : PackTensors(counts, 256)) {
    int64_t end = 0;
    for (const Extent& extent : group.extents) {
      EXPECT_EQ(extent.offset * 2 % kTensorAlignment, 0);
      EXPECT_GE(extent.offset, end);
      end = extent.offset + extent.num_elements;
    }
    EXPECT_GE(group.num_elements, end);
  }
}

TEST(PackTensors, CountsBeyondTwoToThe31) {
  const std::vector<int64_t> counts = {(int64_t{1} << 31) + 64, 32, int64_t{1} << 33};
  const auto groups = PackTensors(counts, int64_t{1} << 34);
  ASSERT_EQ(groups.size(), 1u);
  EXPECT_EQ(groups[0].extents[2].offset, (int64_t{1} << 31) + 64 + 32);
  EXPECT_EQ(ChunkGroup(groups[0]).num_bytes(4), ((int64_t{1} << 31) + 96 + (int64_t{1} << 33)) * 4);
}

class ChunkGroupTest : public testing::Test {
 protected:
  ChunkGroupTest() : group_(PackTensors(std::vector<int64_t>{10, 20}, 1000).front()) {}

  ChunkGroup group_;
};

TEST_F(ChunkGroupTest, HandsOutAPlaceOnceUntilItIsVacated) {
  group_.Add(7, Kind::kGrad, kFloat, false);
  ASSERT_TRUE(group_.Take(Kind::kGrad, kFloat, 0));
  EXPECT_FALSE(group_.Take(Kind::kGrad, kFloat, 0));
  EXPECT_TRUE(group_.Vacate(7, 0));
  EXPECT_EQ(group_.Take(Kind::kGrad, kFloat, 0)->chunk, 7u);
}

TEST_F(ChunkGroupTest, NeverMixesKindsOrDtypes) {
  group_.Add(7, Kind::kState, kFloat, true);
  EXPECT_FALSE(group_.Take(Kind::kGrad, kFloat, 0));
  EXPECT_FALSE(group_.Take(Kind::kState, kBFloat16, 0));
}

TEST_F(ChunkGroupTest, FillsTheNextStateChunkWhenTheFirstPlaceIsTaken) {
  group_.Add(7, Kind::kState, kFloat, true);
  group_.Add(8, Kind::kState, kFloat, true);
  EXPECT_EQ(group_.Take(Kind::kState, kFloat, 1)->chunk, 7u);
  EXPECT_EQ(group_.Take(Kind::kState, kFloat, 1)->chunk, 8u);
}

TEST_F(ChunkGroupTest, APlaceIsKnownZeroOnlyUntilItWasTaken) {
  group_.Add(7, Kind::kState, kFloat, true);
  EXPECT_TRUE(group_.Take(Kind::kState, kFloat, 0)->is_zero);
  group_.Take(Kind::kState, kFloat, 1);
  group_.Vacate(7, 0);
  EXPECT_FALSE(group_.Take(Kind::kState, kFloat, 0)->is_zero);
}

TEST_F(ChunkGroupTest, AResetChunkIsZeroAgain) {
  group_.Add(7, Kind::kState, kFloat, true);
  group_.Take(Kind::kState, kFloat, 0);
  group_.Vacate(7, 0);
  group_.Reset(7, true);
  EXPECT_TRUE(group_.Take(Kind::kState, kFloat, 0)->is_zero);
}

TEST_F(ChunkGroupTest, IsVacantWhenNoChunkHasATensor) {
  EXPECT_TRUE(group_.is_vacant());
  group_.Add(7, Kind::kParam, kFloat, false);
  group_.Take(Kind::kParam, kFloat, 0);
  EXPECT_FALSE(group_.is_vacant());
}

}  // namespace
}  // namespace patrickstar
