// SPDX-License-Identifier: Apache-2.0
//
// The chunk store over a disk that fails: no byte is lost, every failure is thrown
// once to somebody who needs to know, and work goes on where it can.
#include <gtest/gtest.h>

#include <cerrno>

#include "patrickstar/chunk/testing/store_test.h"

namespace patrickstar {
namespace {

class ChunkStoreFaultTest : public StoreTest {
 protected:
  // The disk slots of the first chunks: given in order of the ids.
  void FailWritesOf(ChunkId chunk) { disk_->FailRange(chunk * kPage, (chunk + 1) * kPage, EIO); }
};

TEST_F(ChunkStoreFaultTest, AFailedWriteBackKeepsThePayloadAndTriesOtherVictims) {
  Open(2);
  const ChunkId first = NewWith(1);
  const ChunkId second = NewWith(2);
  const ChunkId zero = New(1, Content::kZero);
  FailWritesOf(first);
  EXPECT_EQ(ValueOf(zero), 0);  // the least recently used does not go, so another does
  EXPECT_EQ(num_resident_pages(), 2);
  EXPECT_EQ(ValueOf(first), 1);
  EXPECT_EQ(disk_->num_reads(), 0);
  EXPECT_EQ(ValueOf(second), 2);
  disk_->Heal();
  store_->EvictAll();
  EXPECT_EQ(ValueOf(first), 1);
  EXPECT_EQ(disk_->num_reads(), 2);
}

TEST_F(ChunkStoreFaultTest, AFullDiskIsThrownByTheDemandThatFindsNoRoomUntilThereIsSpace) {
  Open(2);
  const ChunkId first = NewWith(1);
  const ChunkId second = NewWith(2);
  const ChunkId zero = New(1, Content::kZero);
  disk_->SetWritesFull(true);
  for (int attempt = 0; attempt < 3; ++attempt) {
    const std::string message = MessageOf<IoError>([&] { Use({zero}); });
    EXPECT_NE(message.find("No space left on device"), std::string::npos) << message;
    EXPECT_EQ(ValueOf(first), 1);
    EXPECT_EQ(ValueOf(second), 2);
  }
  store_->ThrowPendingFailure();  // nothing is lost, so nothing is pending
  disk_->SetWritesFull(false);
  EXPECT_EQ(ValueOf(zero), 0);
  EXPECT_EQ(ValueOf(first), 1);
  EXPECT_EQ(ValueOf(second), 2);
}

TEST_F(ChunkStoreFaultTest, ATooLargeSetIsOutOfMemoryWhateverTheDiskDid) {
  Open(2);
  NewWith(1);
  NewWith(2);
  const ChunkId large = New(3);
  disk_->SetWritesFull(true);
  store_->EvictAll();
  EXPECT_EQ(num_resident_pages(), 2);
  EXPECT_THROW(Use({large}), OutOfMemory);
}

TEST_F(ChunkStoreFaultTest, AFailedLoadIsThrownOnceAndThenTriedAgain) {
  Open(1);
  const ChunkId chunk = NewWith(1);
  store_->EvictAll();
  disk_->FailNthCall(1, EIO);
  EXPECT_THROW(Use({chunk}), IoError);
  EXPECT_EQ(num_resident_pages(), 0);
  EXPECT_EQ(ValueOf(chunk), 1);
  store_->ThrowPendingFailure();
}

TEST_F(ChunkStoreFaultTest, AFailedLoadIsThrownToOneOfThoseWhoWait) {
  Open(1);
  const ChunkId chunk = NewWith(1);
  store_->EvictAll();
  disk_->FailNthCall(1, EIO);
  disk_->Pause();
  int num_failures = 0;  // read after both have ended
  std::mutex mutex;
  const auto read = [&] {
    try {
      EXPECT_EQ(ValueOf(chunk), 1);
    } catch (const IoError&) {
      std::lock_guard lock(mutex);
      ++num_failures;
    }
  };
  auto first = StartAndWaitUntilItWaits(read);
  auto second = StartAndWaitUntilItWaits(read);
  disk_->Resume();
  first.get();
  second.get();
  EXPECT_EQ(num_failures, 1);
}

TEST_F(ChunkStoreFaultTest, ABitFlipIsCorruptDataAndTheDiskIsAskedAgain) {
  Open(1);
  const ChunkId chunk = NewWith(1);
  store_->EvictAll();
  disk_->FlipBitOnRead(100, 3);
  EXPECT_THROW(Use({chunk}), CorruptData);
  EXPECT_THROW(Use({chunk}), CorruptData);
  disk_->Heal();
  EXPECT_EQ(ValueOf(chunk), 1);
}

TEST_F(ChunkStoreFaultTest, AFailureThatNobodyMetIsPendingOnce) {
  Open(2);
  const ChunkId first = NewWith(1);
  const ChunkId second = NewWith(2);
  store_->EvictAll();
  disk_->FailRange(0, 2 * kPage, EIO);
  EXPECT_THROW(Use({first, second}), IoError);
  EXPECT_THROW(store_->ThrowPendingFailure(), IoError);
  store_->ThrowPendingFailure();
  disk_->Heal();
  EXPECT_EQ(ValueOf(first), 1);
  EXPECT_EQ(ValueOf(second), 2);
}

TEST_F(ChunkStoreFaultTest, TheRestOfASetWhoseLoadFailedCanLeave) {
  Open(2);
  const ChunkId bad = NewWith(1);
  const ChunkId good = NewWith(2);
  store_->EvictAll();
  FailWritesOf(bad);
  EXPECT_THROW(Use({bad, good}), IoError);
  store_->EvictAll();
  EXPECT_EQ(num_resident_pages(), 0);
  store_->Destroy(bad);
  store_->Destroy(good);
  EXPECT_EQ(store_->stats().disk_used_bytes, 0);
}

TEST_F(ChunkStoreFaultTest, AFailedChunkCanBeDestroyedOrDiscarded) {
  Open(3);
  const ChunkId thrown = NewWith(1);
  const ChunkId destroyed = NewWith(2);
  const ChunkId discarded = NewWith(3);
  store_->EvictAll();
  disk_->FailRange(0, 3 * kPage, EIO);
  EXPECT_THROW(Use({thrown, destroyed, discarded}), IoError);
  store_->Destroy(destroyed);
  EXPECT_TRUE(store_->Discard(discarded, Content::kZero));
  store_->ThrowPendingFailure();
  EXPECT_EQ(ValueOf(discarded), 0);
}

TEST_F(ChunkStoreFaultTest, DiscardDuringAWriteBackThatFailsStillFreesTheMemory) {
  Open(1);
  const ChunkId chunk = NewWith(1);
  auto evicting = StartEvictAllOnPausedDisk(1);
  store_->Discard(chunk, Content::kUndefined);
  disk_->SetWritesFull(true);
  disk_->Resume();
  evicting.get();
  EXPECT_EQ(num_resident_pages(), 0);
}

TEST_F(ChunkStoreFaultTest, CreateTellsWhenTheDiskCannotGrow) {
  Open(1);
  NewWith(1);
  disk_->SetFreeBytes(0);
  EXPECT_THROW(New(), IoError);
  EXPECT_EQ(store_->stats().num_chunks, 1);
  disk_->SetFreeBytes(4 * kPage);
  const ChunkId second = NewWith(2);
  EXPECT_EQ(ValueOf(second), 2);
}

TEST_F(ChunkStoreFaultTest, ALowerBudgetThatNeedsADiskThatCannotGrowIsThrownByTheDemand) {
  Open(2);
  const ChunkId first = NewWith(1);
  const ChunkId second = NewWith(2);
  disk_->SetFreeBytes(0);
  SetBudget(1);
  EXPECT_EQ(ValueOf(first), 1);
  EXPECT_EQ(ValueOf(second), 2);
  EXPECT_THROW(store_->Reserve(kPage, "building"), IoError);
  disk_->SetFreeBytes(4 * kPage);
  EXPECT_EQ(store_->Reserve(kPage, "building").num_bytes(), kPage);
  EXPECT_EQ(ValueOf(first), 1);
}

}  // namespace
}  // namespace patrickstar
