// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/device/host_slab.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "patrickstar/base/error.h"

namespace patrickstar {
namespace {

constexpr int64_t kPage = 4096;

TEST(SlabPool, RoundsUpToWholePagesAndNoFurther) {
  SlabPool pool(16 * kPage);
  HostSlab slab = pool.Allocate(2 * kPage + 1, false);
  EXPECT_EQ(slab.num_bytes(), 3 * kPage);
  EXPECT_EQ(pool.mapped_bytes(), 3 * kPage);
}

TEST(SlabPool, ReusesAFreedSlabOfTheSameSize) {
  SlabPool pool(16 * kPage);
  HostSlab slab = pool.Allocate(kPage, false);
  std::byte* const data = slab.data();
  pool.Free(std::move(slab));
  EXPECT_EQ(pool.Allocate(kPage, false).data(), data);
}

TEST(SlabPool, ZeroesAReusedSlabWhenAsked) {
  SlabPool pool(16 * kPage);
  HostSlab slab = pool.Allocate(kPage, false);
  std::memset(slab.data(), 0x7f, kPage);
  pool.Free(std::move(slab));
  HostSlab zeroed = pool.Allocate(kPage, true);
  for (int64_t index = 0; index < kPage; ++index) {
    ASSERT_EQ(zeroed.data()[index], std::byte{0}) << "at byte " << index;
  }
}

TEST(SlabPool, CrowdsOutFreedSlabsBeforePassingTheLimit) {
  SlabPool pool(4 * kPage);
  std::vector<HostSlab> slabs;
  for (int count = 0; count < 4; ++count) slabs.push_back(pool.Allocate(kPage, false));
  for (HostSlab& slab : slabs) pool.Free(std::move(slab));
  HostSlab big = pool.Allocate(3 * kPage, false);
  EXPECT_EQ(pool.mapped_bytes(), 4 * kPage);
  EXPECT_EQ(pool.peak_mapped_bytes(), 4 * kPage);
}

// The memory of the process that has pages, in bytes.
int64_t ResidentBytes(const HostSlab& slab) {
  std::vector<unsigned char> pages(static_cast<size_t>(slab.num_bytes() / kPage));
  EXPECT_EQ(mincore(slab.data(), static_cast<size_t>(slab.num_bytes()), pages.data()), 0);
  return kPage * std::count_if(pages.begin(), pages.end(),
                               [](unsigned char page) { return (page & 1) != 0; });
}

TEST(SlabPool, MovesThePagesOfFreedSlabsIntoOneOfAnotherSize) {
  constexpr int64_t kUnit = int64_t{2} << 20;
  SlabPool pool(5 * kUnit);
  std::vector<HostSlab> slabs;
  slabs.push_back(pool.Allocate(2 * kUnit + kPage, false));
  slabs.push_back(pool.Allocate(2 * kUnit - kPage, false));
  for (HostSlab& slab : slabs) {
    std::memset(slab.data(), 0x7f, static_cast<size_t>(slab.num_bytes()));
    pool.Free(std::move(slab));
  }
  HostSlab big = pool.Allocate(4 * kUnit + kPage, false);
  EXPECT_GE(ResidentBytes(big), 3 * kUnit);  // whole units: two of the first, one of the second
  EXPECT_EQ(pool.peak_mapped_bytes(), 5 * kUnit);
  std::memset(big.data(), 1, static_cast<size_t>(big.num_bytes()));
  pool.Free(std::move(big));
  HostSlab zeroed = pool.Allocate(3 * kUnit + 3 * kPage, true);
  EXPECT_GE(ResidentBytes(zeroed), 3 * kUnit);
  EXPECT_TRUE(std::all_of(zeroed.data(), zeroed.data() + zeroed.num_bytes(),
                          [](std::byte byte) { return byte == std::byte{0}; }));
  pool.Free(std::move(zeroed));
  pool.Trim();
  EXPECT_EQ(pool.mapped_bytes(), 0);
}

TEST(SlabPool, TrimUnmapsWhatNobodyUses) {
  SlabPool pool(4 * kPage);
  pool.Free(pool.Allocate(2 * kPage, false));
  pool.Trim();
  EXPECT_EQ(pool.mapped_bytes(), 0);
}

TEST(SlabPool, ALowerLimitUnmapsFreedSlabsAtOnce) {
  SlabPool pool(4 * kPage);
  pool.Free(pool.Allocate(3 * kPage, false));
  pool.set_limit_bytes(kPage);
  EXPECT_EQ(pool.mapped_bytes(), 0);
}

TEST(SlabPool, MakesRoomForBytesMappedElsewhere) {
  SlabPool pool(4 * kPage);
  pool.Free(pool.Allocate(3 * kPage, false));
  pool.AddOutside(2 * kPage);
  EXPECT_EQ(pool.mapped_bytes(), 0);
  pool.AddOutside(-2 * kPage);
  pool.Free(pool.Allocate(3 * kPage, false));
  EXPECT_EQ(pool.mapped_bytes(), 3 * kPage);
}

TEST(SlabPool, SaysHowManyBytesTheSystemRefused) {
  SlabPool pool(INT64_MAX);
  try {
    pool.Allocate(int64_t{1} << 60, false);
    FAIL() << "mapped 1 EiB";
  } catch (const OutOfMemory& error) {
    EXPECT_NE(std::string(error.what()).find("1024.0 PiB"), std::string::npos) << error.what();
  }
}

TEST(SlabPool, KeepsItsLimitUnderThreads) {
  constexpr int64_t kLimit = 8 * kPage;
  SlabPool pool(kLimit);
  const auto work = [&pool](int64_t seed) {
    for (int64_t round = 0; round < 500; ++round) {
      pool.Free(pool.Allocate((1 + (seed + round) % 2) * kPage, (round & 1) != 0));
    }
  };
  std::vector<std::thread> threads;
  for (int64_t seed = 0; seed < 4; ++seed) threads.emplace_back(work, seed);
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(pool.peak_mapped_bytes(), kLimit);
}

}  // namespace
}  // namespace patrickstar
