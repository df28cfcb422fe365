// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/chunk/chunk_stream.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "patrickstar/chunk/testing/store_test.h"

namespace patrickstar {
namespace {

constexpr int64_t kBlockPages = SpillFile::kBlockBytes / kPage;

class ChunkStreamTest : public StoreTest {
 protected:
  // A layout of two and a half blocks of bytes, and a budget that holds one window of each of
  // two chunks.
  static constexpr int64_t kNumPages = 2 * kBlockPages + kBlockPages / 2;

  void OpenForTwoWindows(const StoreTestSetup& setup = {}) { Open(kNumPages, setup); }

  static std::vector<StreamedChunk> ReadAndWrite(ChunkId read, ChunkId written) {
    return {{.chunk = read, .element_size = 1, .access = Access::kRead},
            {.chunk = written, .element_size = 1, .access = Access::kWrite}};
  }

  // Adds the first chunk to the second.
  static void Add(int64_t, int64_t num_elements, std::span<std::byte* const> windows) {
    for (int64_t index = 0; index < num_elements; ++index) {
      const int sum = static_cast<int>(windows[0][index]) + static_cast<int>(windows[1][index]);
      windows[1][index] = static_cast<std::byte>(sum);
    }
  }
};

TEST_F(ChunkStreamTest, PassesOverMoreThanMemoryHolds) {
  OpenForTwoWindows();
  const ChunkId read = NewWith(2, kNumPages);
  const ChunkId written = NewWith(3, kNumPages);
  std::vector<int64_t> firsts;
  EXPECT_TRUE(store_->Stream(ReadAndWrite(read, written), [&](int64_t first, int64_t count,
                                                              std::span<std::byte* const> windows) {
    firsts.push_back(first);
    Add(first, count, windows);
  }));
  EXPECT_EQ(firsts, (std::vector<int64_t>{0, kBlockPages * kPage, 2 * kBlockPages * kPage}));
  EXPECT_EQ(ValueOf(written), 5);
  EXPECT_EQ(ValueOf(read), 2);
}

TEST_F(ChunkStreamTest, KnownZerosAreReadWithoutADisk) {
  OpenForTwoWindows();
  const ChunkId read = NewWith(2, kNumPages);
  const ChunkId written = New(kNumPages, Content::kZero);
  store_->EvictAll();
  EXPECT_TRUE(store_->Stream(ReadAndWrite(read, written), &Add));
  EXPECT_EQ(store_->stats().disk_read_bytes, kNumPages * kPage);
  EXPECT_EQ(ValueOf(written), 2);
}

TEST_F(ChunkStreamTest, ElementsOfSeveralSizesGoByTogether) {
  Open(4 * kNumPages);
  const ChunkId narrow = NewWith(1, kNumPages);
  const ChunkId wide = NewWith(7, 4 * kNumPages);
  int64_t num_seen = 0;
  EXPECT_TRUE(
      store_->Stream({{.chunk = narrow, .element_size = 1}, {.chunk = wide, .element_size = 4}},
                     [&](int64_t first, int64_t count, std::span<std::byte* const> windows) {
                       EXPECT_EQ(first, num_seen);
                       EXPECT_EQ(static_cast<int>(windows[0][count - 1]), 1);
                       EXPECT_EQ(static_cast<int>(windows[1][4 * count - 1]), 7);
                       num_seen += count;
                     }));
  EXPECT_EQ(num_seen, kNumPages * kPage);
}

TEST_F(ChunkStreamTest, SeveralWindowSetsGiveTheSame) {
  Open(16 * kBlockPages);
  const ChunkId read = NewWith(2, 8 * kBlockPages + 3);
  const ChunkId written = NewWith(3, 8 * kBlockPages + 3);
  EXPECT_TRUE(store_->Stream(ReadAndWrite(read, written), &Add));
  EXPECT_EQ(ValueOf(written), 5);
}

TEST_F(ChunkStreamTest, AFailureInTheMiddleChangesNothing) {
  OpenForTwoWindows();
  const ChunkId read = NewWith(2, kNumPages);
  const ChunkId written = NewWith(3, kNumPages);
  const auto fail_at_the_second = [&](int64_t first, int64_t count,
                                      std::span<std::byte* const> windows) {
    if (first != 0) throw Error("the work failed");
    Add(first, count, windows);
  };
  EXPECT_THROW(store_->Stream(ReadAndWrite(read, written), fail_at_the_second), Error);
  EXPECT_EQ(ValueOf(written), 3);
  const int64_t used_bytes = store_->stats().disk_used_bytes;
  EXPECT_THROW(
      store_->Stream(ReadAndWrite(read, written),
                     [&](int64_t first, int64_t count, std::span<std::byte* const> windows) {
                       Add(first, count, windows);
                       disk_->SetWritesFull(true);
                     }),
      IoError);
  disk_->Heal();
  EXPECT_EQ(ValueOf(written), 3);
  EXPECT_EQ(store_->stats().disk_used_bytes, used_bytes);
  EXPECT_TRUE(store_->Stream(ReadAndWrite(read, written), &Add));
  EXPECT_EQ(ValueOf(written), 5);
}

TEST_F(ChunkStreamTest, WithoutRoomOrWithALeaseNothingIsCalled) {
  const auto never = [](int64_t, int64_t, std::span<std::byte* const>) { ADD_FAILURE(); };
  OpenForTwoWindows({.max_disk_bytes = (2 * kNumPages + kBlockPages) * kPage});
  const ChunkId read = NewWith(2, kNumPages);
  const ChunkId written = NewWith(3, kNumPages);
  EXPECT_FALSE(store_->Stream(ReadAndWrite(read, written), never));  // no disk for a second copy
  {
    const auto lease = Read({read});
    EXPECT_FALSE(store_->Stream(ReadAndWrite(read, written), never));
  }
  SetBudget(kBlockPages);
  store_->EvictAll();
  EXPECT_EQ(store_->stats().disk_used_bytes, 2 * kNumPages * kPage);
}

TEST_F(ChunkStreamTest, WhoWantsAChunkWaitsForTheEnd) {
  OpenForTwoWindows();
  const ChunkId read = NewWith(2, kNumPages);
  const ChunkId written = NewWith(3, kNumPages);
  std::future<int> value;
  EXPECT_TRUE(store_->Stream(ReadAndWrite(read, written), [&](int64_t first, int64_t count,
                                                              std::span<std::byte* const> windows) {
    if (first == 0) value = std::async(std::launch::async, [&] { return ValueOf(written); });
    Add(first, count, windows);
  }));
  EXPECT_EQ(value.get(), 5);
}

TEST_F(ChunkStreamTest, AChunkDiscardedMeanwhileGoesAtTheEnd) {
  OpenForTwoWindows();
  const ChunkId read = NewWith(2, kNumPages);
  const ChunkId written = NewWith(3, kNumPages);
  EXPECT_TRUE(store_->Stream(ReadAndWrite(read, written), [&](int64_t first, int64_t count,
                                                              std::span<std::byte* const> windows) {
    if (first == 0) {
      EXPECT_FALSE(store_->Discard(read, Content::kUndefined));
    }
    Add(first, count, windows);
  }));
  EXPECT_EQ(ValueOf(written), 5);
  store_->Destroy(read);
  EXPECT_EQ(store_->stats().disk_used_bytes, kNumPages * kPage);
}

}  // namespace
}  // namespace patrickstar
