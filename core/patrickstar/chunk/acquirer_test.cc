// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/chunk/acquirer.h"

#include <gtest/gtest.h>

#include <mutex>
#include <thread>
#include <vector>

#include "patrickstar/chunk/testing/store_test.h"

namespace patrickstar {
namespace {

class AcquirerTest : public StoreTest {
 protected:
  // A full budget of dirty pages, each with its index; when one leaves, two are written ahead.
  std::vector<ChunkId> FillThatTwoAreCleanedAhead() {
    Open(16, {.write_behind_bytes = 2 * kPage});
    std::vector<ChunkId> chunks;
    for (int value = 0; value < 16; ++value) chunks.push_back(NewWith(value));
    return chunks;
  }

  // `work` fails for want of memory, names the smallest budget that does, works with that
  // one, and does not with a page less.
  void ExpectExactBudget(const std::function<void()>& work) {
    const int64_t named = NamedBudget(MessageOf<OutOfMemory>(work));
    SetBudget(named / kPage - 1);
    EXPECT_EQ(NamedBudget(MessageOf<OutOfMemory>(work)), named);
    SetBudget(named / kPage);
    work();
  }
};

TEST_F(AcquirerTest, LeasesTheWholeSet) {
  Open(3);
  const ChunkId first = NewWith(1);
  const ChunkId second = NewWith(2, 2);
  store_->EvictAll();
  const auto lease = Read({first, second});
  EXPECT_EQ(AttachedValue(first), 1);
  EXPECT_EQ(AttachedValue(second), 2);
}

TEST_F(AcquirerTest, LeasesNothingWhenItFails) {
  Open(2);
  const ChunkId first = NewWith(1);
  const ChunkId second = NewWith(2, 2);
  EXPECT_THROW(Use({first, second}), OutOfMemory);
  store_->EvictAll();
  EXPECT_EQ(num_resident_pages(), 0);
}

TEST_F(AcquirerTest, TryAcquireNeverFetches) {
  Open(2);
  const ChunkId resident = NewWith(1);
  const ChunkId missing = New();
  const std::vector<ChunkAccess> both = {{.chunk = resident}, {.chunk = missing}};
  const std::vector<ChunkAccess> one = {{.chunk = resident}};
  EXPECT_FALSE(store_->TryAcquire(both, LeaseKind::kOp));
  ASSERT_TRUE(store_->TryAcquire(one, LeaseKind::kOp));
  store_->Release(one, LeaseKind::kOp);
  store_->EvictAll();
  EXPECT_EQ(num_resident_pages(), 0);
}

TEST_F(AcquirerTest, ThreadsShareAChunk) {
  Open(1);
  const ChunkId chunk = NewWith(1);
  const auto lease = Read({chunk});
  std::async(std::launch::async, [&] { EXPECT_EQ(ValueOf(chunk), 1); }).get();
  EXPECT_EQ(AttachedValue(chunk), 1);
}

TEST_F(AcquirerTest, ASetLargerThanTheBudgetNamesTheSmallestThatDoes) {
  Open(3);
  const ChunkId first = NewWith(1, 3);
  const ChunkId second = NewWith(2, 2);
  const std::string message = MessageOf<OutOfMemory>([&] { Use({first, second}); });
  EXPECT_EQ(message,
            "cannot bring 12.0 KiB to host memory for op (weight0; weight1): the operation needs "
            "20.0 KiB at once and 4.0 KiB of the 12.0 KiB budget are free; raise host_memory to at "
            "least 20480 bytes (20.0 KiB)");
  ExpectExactBudget([&] { Use({first, second}); });
}

TEST_F(AcquirerTest, HeldLeasesCountAsTheOperationsOwnSet) {
  Open(3);
  const ChunkId held = NewWith(1, 2);
  const ChunkId wanted = NewWith(2, 3);
  const auto lease = Hold({held});
  const std::string message = MessageOf<OutOfMemory>([&] { Use({wanted}); });
  EXPECT_NE(message.find("1 other chunks are leased (weight0)"), std::string::npos) << message;
  ExpectExactBudget([&] { Use({wanted}); });
}

TEST_F(AcquirerTest, HeldLeasesOfOtherThreadsAreNotWaitedFor) {
  Open(1);
  const auto held = Hold({NewWith(1)});
  const ChunkId wanted = New();
  std::async(std::launch::async, [&] { EXPECT_THROW(Use({wanted}), OutOfMemory); }).get();
}

TEST_F(AcquirerTest, LeasesOfThisThreadCountAsItsOwnSetWhenNested) {
  Open(3);
  const ChunkId outer = NewWith(1, 2);
  const ChunkId inner = NewWith(2, 3);
  const auto lease = Read({outer});
  ExpectExactBudget([&] { Use({inner}); });
}

TEST_F(AcquirerTest, OperationsOfOtherThreadsAreNotCountedIntoTheSmallestBudget) {
  Open(2);
  const ChunkId wanted = New(3);
  const auto lease = Read({NewWith(1)});
  std::async(std::launch::async, [&] {
    EXPECT_EQ(NamedBudget(MessageOf<OutOfMemory>([&] { Use({wanted}); })), 3 * kPage);
  }).get();
}

TEST_F(AcquirerTest, ReservedBytesCountIntoTheSmallestBudget) {
  Open(3);
  const ChunkId wanted = NewWith(1, 3);
  const OutsideBytes reservation = store_->Reserve(2 * kPage, "building");
  EXPECT_EQ(num_resident_pages(), 0);  // reserved, and no payload
  ExpectExactBudget([&] { Use({wanted}); });
}

TEST_F(AcquirerTest, ReserveThatIsTooLargeNamesTheSmallestBudget) {
  Open(3);
  const auto lease = Hold({NewWith(1)});
  ExpectExactBudget([&] { store_->Reserve(3 * kPage, "building"); });
}

TEST_F(AcquirerTest, WithoutADiskTheNamedBudgetHoldsEverything) {
  Open(2, {.has_disk = false});
  NewWith(1);
  NewWith(2);
  const ChunkId third = New();
  const std::string message = MessageOf<OutOfMemory>([&] { Write(third, 3); });
  EXPECT_NE(message.find("or let it spill (spill_dir, disk_space)"), std::string::npos) << message;
  ExpectExactBudget([&] { Write(third, 3); });
}

TEST_F(AcquirerTest, WaitsForOperationsOfOtherThreads) {
  Open(1);
  const ChunkId wanted = New(1, Content::kZero);
  auto lease = Read({NewWith(1)});
  auto reading = StartAndWaitUntilItWaits([&] { EXPECT_EQ(ValueOf(wanted), 0); });
  lease.reset();
  reading.get();
}

TEST_F(AcquirerTest, ANestedCallerDoesNotWaitForOperationsOfOtherThreads) {
  Open(3);
  const ChunkId outer = NewWith(1);
  const ChunkId others = NewWith(2);
  const ChunkId idle = NewWith(3);
  const ChunkId inner = New(2);
  const auto lease = Read({others});
  std::async(std::launch::async, [&] {
    const auto outer_lease = Read({outer});
    const std::string message = MessageOf<OutOfMemory>([&] { Use({inner}); });
    EXPECT_NE(message.find("2 other chunks are leased (weight0; weight1)"), std::string::npos)
        << message;
    EXPECT_EQ(NamedBudget(message), 4 * kPage);
  }).get();
  EXPECT_TRUE(binder_.is_attached(idle)) << "nothing is evicted in vain";
}

TEST_F(AcquirerTest, ANestedCallerEvictsWhatNobodyLeases) {
  Open(2);
  const ChunkId outer = NewWith(1);
  const ChunkId idle = NewWith(2);
  const ChunkId inner = NewWith(3);
  const auto lease = Read({outer});
  EXPECT_EQ(ValueOf(inner), 3);
  EXPECT_EQ(ValueOf(idle), 2);
  EXPECT_EQ(AttachedValue(outer), 1);
}

TEST_F(AcquirerTest, ANestedCallerWaitsForTransfers) {
  Open(2);
  const ChunkId outer = NewWith(1);
  NewWith(2);
  const ChunkId inner = New(1, Content::kZero);
  disk_->Pause();
  auto reading = StartAndWaitUntilItWaits([&] {
    const auto lease = Read({outer});
    EXPECT_EQ(ValueOf(inner), 0);
  });
  disk_->WaitForPaused(1);  // the write-back that makes room
  disk_->Resume();
  reading.get();
}

TEST_F(AcquirerTest, ANestedCallerDoesNotStandBehindOneThatWaitsForItsLease) {
  Open(3);
  const ChunkId outer = NewWith(1);
  const ChunkId inner = New(1, Content::kZero);
  const ChunkId large = New(3, Content::kZero);
  auto lease = Read({outer});
  auto waiting = StartAndWaitUntilItWaits([&] { Use({large}); });
  EXPECT_EQ(ValueOf(inner), 0);
  lease.reset();
  waiting.get();
}

TEST_F(AcquirerTest, RoomIsGivenInOrderOfArrival) {
  Open(2);
  auto first_lease = Read({NewWith(1)});
  auto second_lease = Read({NewWith(2)});
  const ChunkId large = New(2, Content::kZero);
  const ChunkId small = New(1, Content::kZero);
  std::mutex mutex;
  std::vector<ChunkId> order;
  const auto use = [&](ChunkId chunk) {
    const auto lease = Read({chunk});
    std::lock_guard lock(mutex);
    order.push_back(chunk);
  };
  auto large_use = StartAndWaitUntilItWaits([&] { use(large); });
  auto small_use = StartAndWaitUntilItWaits([&] { use(small); });
  first_lease.reset();  // room enough for the small one, but it came later
  store_->stats();
  second_lease.reset();
  large_use.get();
  small_use.get();
  EXPECT_EQ(order, (std::vector<ChunkId>{large, small}));
}

TEST_F(AcquirerTest, ACallerWithItsRoomKeepsItsSetWhileItWaits) {
  Open(2);
  const ChunkId resident = NewWith(1);
  const ChunkId on_disk = NewWith(2);
  const ChunkId other = New(1, Content::kZero);
  store_->EvictAll();
  Use({resident});
  disk_->Pause();
  auto both = StartAndWaitUntilItWaits([&] {
    const auto lease = Read({resident, on_disk});
    EXPECT_EQ(binder_.num_detaches(resident), 1);  // by EvictAll
  });
  disk_->WaitForPaused(1);
  auto one = StartAndWaitUntilItWaits([&] { Use({other}); });
  SetBudget(1);  // wants room as well
  disk_->Resume();
  both.get();
  one.get();
}

TEST_F(AcquirerTest, WaitsForMemoryThatIsBeingFreed) {
  constexpr int64_t kManyPages = 8192;  // so that filling them with garbage takes a while
  Open(kManyPages, {.stress = {.poison = true}});
  const ChunkId old = NewWith(1, kManyPages);
  const ChunkId next = New(kManyPages, Content::kZero);
  auto discarding =
      std::async(std::launch::async, [&] { store_->Discard(old, Content::kUndefined); });
  while (binder_.is_attached(old)) std::this_thread::yield();
  Use({next});  // nothing is leased and nothing can be evicted: only the garbage is in the way
  discarding.get();
}

TEST_F(AcquirerTest, KeepsWhatIsBeingSavedWhenItIsWantedAgain) {
  Open(1);
  const ChunkId chunk = NewWith(1);
  auto evicting = StartEvictAllOnPausedDisk(1);
  auto reading = StartAndWaitUntilItWaits([&] { EXPECT_EQ(ValueOf(chunk), 1); });
  disk_->Resume();
  reading.get();
  evicting.get();
  EXPECT_EQ(disk_->num_reads(), 0);
  store_->EvictAll();
  EXPECT_EQ(disk_->num_writes(), 1) << "kept, and clean";
}

TEST_F(AcquirerTest, WritesBackWhatLeavesNextAheadOfNeed) {
  const std::vector<ChunkId> chunks = FillThatTwoAreCleanedAhead();
  Use({New()});
  WaitUntilWritten(3);
  const StoreStats first = store_->stats();
  EXPECT_EQ(first.disk_written_bytes, 3 * kPage);  // the one that left, and the two after it
  EXPECT_EQ(first.counters.num_evictions, 1);
  EXPECT_EQ(num_resident_pages(), 16);
  EXPECT_EQ(ValueOf(chunks[1]), 1);
  EXPECT_EQ(store_->stats().disk_read_bytes, 0);  // it was still there
  Write(chunks[2], 40);                           // and what is written again is dirty again
  for (int count = 0; count < 16; ++count) Use({New()});
  EXPECT_EQ(ValueOf(chunks[0]), 0);
  EXPECT_EQ(ValueOf(chunks[2]), 40);
}

TEST_F(AcquirerTest, TakesTheRoomOfWhatIsWrittenBackAheadOfNeedWhenThatEnds) {
  const std::vector<ChunkId> chunks = FillThatTwoAreCleanedAhead();
  disk_->Pause();
  auto first = StartAndWaitUntilItWaits([&] { Use({New()}); });
  disk_->WaitForPaused(3);
  auto second = StartAndWaitUntilItWaits([&] { Use({New(2)}); });
  disk_->Resume();
  first.get();
  second.get();
  EXPECT_EQ(store_->stats().counters.num_evictions, 3);
  EXPECT_EQ(ValueOf(chunks[3]), 3);
  EXPECT_EQ(store_->stats().disk_read_bytes, 0);
  EXPECT_EQ(ValueOf(chunks[2]), 2);
}

TEST_F(AcquirerTest, AFailedWriteBackAheadOfNeedLosesNothing) {
  const std::vector<ChunkId> chunks = FillThatTwoAreCleanedAhead();
  disk_->Pause();
  auto first = StartAndWaitUntilItWaits([&] { Use({New()}); });
  disk_->WaitForPaused(3);
  disk_->SetWritesFull(true);
  store_->Discard(chunks[1], Content::kUndefined);
  disk_->Resume();
  EXPECT_NO_THROW(first.get());  // in the place of the discarded chunk
  EXPECT_EQ(store_->stats().counters.num_evictions, 1);
  disk_->Heal();
  for (int count = 0; count < 16; ++count) Use({New()});
  for (const int value : {0, 2, 3, 15}) EXPECT_EQ(ValueOf(chunks[value]), value);
}

TEST_F(AcquirerTest, CancelsAQueuedSaveOfWhatIsWantedAgain) {
  Open(2, {.max_transfers_in_flight = 1});
  NewWith(1);
  const ChunkId queued = NewWith(2);
  auto evicting = StartEvictAllOnPausedDisk(1);
  EXPECT_EQ(ValueOf(queued), 2);  // while the disk still hangs
  disk_->Resume();
  evicting.get();
  EXPECT_EQ(disk_->num_writes(), 1);
}

}  // namespace
}  // namespace patrickstar
