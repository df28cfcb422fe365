// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/plan/eviction_policy.h"

#include <gtest/gtest.h>

namespace patrickstar {
namespace {

TEST(EvictionPolicy, EvictsLeastRecentlyUsedFirst) {
  const std::vector<EvictionCandidate> candidates = {
      {.chunk = 0, .num_bytes = 10, .last_use = 3},
      {.chunk = 1, .num_bytes = 10, .last_use = 1},
      {.chunk = 2, .num_bytes = 10, .last_use = 2},
  };
  EXPECT_EQ(ChooseLeastRecentlyUsed(candidates, 15), (std::vector<ChunkId>{1, 2}));
}

TEST(EvictionPolicy, PrefersCleanOnATie) {
  const std::vector<EvictionCandidate> candidates = {
      {.chunk = 0, .num_bytes = 10, .is_dirty = true, .last_use = 1},
      {.chunk = 1, .num_bytes = 10, .is_dirty = false, .last_use = 1},
  };
  EXPECT_EQ(ChooseLeastRecentlyUsed(candidates, 10), (std::vector<ChunkId>{1}));
}

TEST(EvictionPolicy, GivesAllWhenAllDoNotSuffice) {
  const std::vector<EvictionCandidate> candidates = {{.chunk = 0, .num_bytes = 10, .last_use = 1}};
  EXPECT_EQ(ChooseLeastRecentlyUsed(candidates, 11), (std::vector<ChunkId>{0}));
}

TEST(EvictionPolicy, CleansTheDirtyOnesAmongThoseThatLeaveNext) {
  const std::vector<EvictionCandidate> candidates = {
      {.chunk = 0, .num_bytes = 10, .is_dirty = true, .last_use = 4},
      {.chunk = 1, .num_bytes = 10, .is_dirty = true, .last_use = 1},
      {.chunk = 2, .num_bytes = 10, .is_dirty = false, .last_use = 2},
      {.chunk = 3, .num_bytes = 10, .is_dirty = true, .last_use = 3},
  };
  EXPECT_EQ(ChooseToClean(candidates, 30), (std::vector<ChunkId>{1, 3}));
  EXPECT_EQ(ChooseToClean(candidates, 29), (std::vector<ChunkId>{1}));
  EXPECT_TRUE(ChooseToClean(candidates, 9).empty());
}

TEST(EvictionPolicy, ChoosesNobodyForNothing) {
  const std::vector<EvictionCandidate> candidates = {{.chunk = 0, .num_bytes = 10, .last_use = 1}};
  EXPECT_TRUE(ChooseLeastRecentlyUsed(candidates, 0).empty());
}

}  // namespace
}  // namespace patrickstar
