// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/chunk/chunk_store.h"

#include <gtest/gtest.h>

#include <thread>

#include "patrickstar/chunk/testing/store_test.h"

namespace patrickstar {
namespace {

class ChunkStoreTest : public StoreTest {};

TEST_F(ChunkStoreTest, FetchesWhatItEvicted) {
  Open(2);
  const ChunkId first = NewWith(1);
  const ChunkId second = NewWith(2);
  const ChunkId third = NewWith(3);
  EXPECT_FALSE(binder_.is_attached(first));
  EXPECT_EQ(ValueOf(first), 1);
  EXPECT_EQ(ValueOf(second), 2);
  EXPECT_EQ(ValueOf(third), 3);
  EXPECT_GT(store_->stats().counters.num_evictions, 0);
  EXPECT_GT(store_->stats().disk_read_bytes, 0);
}

TEST_F(ChunkStoreTest, MovesChunksOfAnySize) {
  Open(700);
  const ChunkId large = NewWith(1, 600);  // blocks of 1 MiB on disk: two and a rest
  const ChunkId odd = store_->Create(Kind::kGrad, 2 * kPage + 1, Content::kUndefined);
  Write(odd, 2);
  store_->EvictAll();
  EXPECT_EQ(num_resident_pages(), 0);
  EXPECT_EQ(ValueOf(large), 1);
  EXPECT_EQ(ValueOf(odd), 2);
  EXPECT_EQ(num_resident_pages(), 603);
}

TEST_F(ChunkStoreTest, ZeroContentReadsAsZerosAndNeedsNoDisk) {
  Open(1);
  const ChunkId dead = NewWith(7);
  store_->Discard(dead, Content::kUndefined);  // its memory is used again
  const ChunkId zero = New(1, Content::kZero);
  EXPECT_EQ(ValueOf(zero), 0);
  store_->EvictAll();
  EXPECT_EQ(ValueOf(zero), 0);
  EXPECT_EQ(disk_->num_reads() + disk_->num_writes(), 0);
}

TEST_F(ChunkStoreTest, UndefinedContentIsNotWritten) {
  Open(1);
  Use({New()});
  store_->EvictAll();
  EXPECT_EQ(num_resident_pages(), 0);
  EXPECT_EQ(disk_->num_writes(), 0);
}

TEST_F(ChunkStoreTest, DropsCleanPayloadsWithoutAWrite) {
  Open(1);
  const ChunkId chunk = NewWith(1);
  store_->EvictAll();
  EXPECT_EQ(disk_->num_writes(), 1);
  EXPECT_EQ(ValueOf(chunk), 1);
  store_->EvictAll();
  EXPECT_EQ(disk_->num_writes(), 1);
  EXPECT_EQ(ValueOf(chunk), 1);
}

TEST_F(ChunkStoreTest, WritesBackWhatWasChangedAfterAFetch) {
  Open(1);
  const ChunkId chunk = NewWith(1);
  store_->EvictAll();
  Write(chunk, 2);
  store_->EvictAll();
  EXPECT_EQ(ValueOf(chunk), 2);
  EXPECT_EQ(disk_->num_writes(), 2);
}

TEST_F(ChunkStoreTest, EvictsLeastRecentlyUsedFirstAndNoMoreThanNeeded) {
  Open(3);
  const ChunkId first = NewWith(1);
  const ChunkId second = NewWith(2);
  const ChunkId third = NewWith(3);
  Use({first});
  const ChunkId fourth = NewWith(4);
  EXPECT_TRUE(binder_.is_attached(first));
  EXPECT_FALSE(binder_.is_attached(second));
  EXPECT_TRUE(binder_.is_attached(third));
  EXPECT_TRUE(binder_.is_attached(fourth));
}

TEST_F(ChunkStoreTest, EvictAllLeavesLeasedChunks) {
  Open(3);
  const ChunkId leased = NewWith(1);
  const ChunkId held = NewWith(2);
  const ChunkId idle = NewWith(3);
  const auto op_lease = Read({leased});
  const auto held_lease = Hold({held});
  store_->EvictAll();
  EXPECT_TRUE(binder_.is_attached(leased));
  EXPECT_TRUE(binder_.is_attached(held));
  EXPECT_FALSE(binder_.is_attached(idle));
  EXPECT_EQ(store_->stats().mapped_bytes, 2 * kPage);
  EXPECT_EQ(store_->stats().num_held_leases, 1);
}

TEST_F(ChunkStoreTest, DiscardFreesMemoryAndReadsAsTold) {
  Open(1);
  const ChunkId chunk = NewWith(1);
  EXPECT_TRUE(store_->Discard(chunk, Content::kZero));
  EXPECT_EQ(num_resident_pages(), 0);
  EXPECT_FALSE(binder_.is_attached(chunk));
  EXPECT_EQ(ValueOf(chunk), 0);
}

TEST_F(ChunkStoreTest, DiscardOfAnEvictedChunkForgetsTheDisk) {
  Open(1);
  const ChunkId chunk = NewWith(1);
  store_->EvictAll();
  EXPECT_TRUE(store_->Discard(chunk, Content::kZero));
  EXPECT_EQ(ValueOf(chunk), 0);
  EXPECT_EQ(disk_->num_reads(), 0);
}

TEST_F(ChunkStoreTest, DiscardOfALeasedChunkWaitsForTheLease) {
  Open(1);
  const ChunkId chunk = NewWith(1);
  auto lease = Read({chunk});
  EXPECT_FALSE(store_->Discard(chunk, Content::kZero));
  EXPECT_EQ(AttachedValue(chunk), 1);
  lease.reset();
  EXPECT_FALSE(binder_.is_attached(chunk));
  EXPECT_EQ(num_resident_pages(), 0);
}

TEST_F(ChunkStoreTest, ALaterLeaseTakesADiscardBack) {
  Open(1);
  const ChunkId chunk = NewWith(1);
  auto lease = Read({chunk});
  store_->Discard(chunk, Content::kZero);
  Write(chunk, 2);
  lease.reset();
  EXPECT_EQ(ValueOf(chunk), 2);
}

TEST_F(ChunkStoreTest, DiscardDuringASaveFreesMemoryWhenItEnds) {
  Open(1);
  const ChunkId chunk = NewWith(1);
  auto evicting = StartEvictAllOnPausedDisk(1);
  EXPECT_FALSE(store_->Discard(chunk, Content::kUndefined));
  disk_->Resume();
  evicting.get();
  EXPECT_EQ(num_resident_pages(), 0);
  Use({chunk});
  EXPECT_EQ(disk_->num_reads(), 0);
}

TEST_F(ChunkStoreTest, DiscardOfAQueuedSaveCancelsIt) {
  Open(2, {.max_transfers_in_flight = 1});
  NewWith(1);
  const ChunkId queued = NewWith(2);
  auto evicting = StartEvictAllOnPausedDisk(1);
  EXPECT_TRUE(store_->Discard(queued, Content::kZero));
  EXPECT_EQ(num_resident_pages(), 1);
  disk_->Resume();
  evicting.get();
  EXPECT_EQ(disk_->num_writes(), 1);
  EXPECT_EQ(ValueOf(queued), 0);
}

TEST_F(ChunkStoreTest, DiscardDuringALoadDoesNotTakeTheBytesFromWhoWaits) {
  Open(1);
  const ChunkId chunk = NewWith(1);
  store_->EvictAll();
  disk_->Pause();
  auto reading = StartAndWaitUntilItWaits([&] { Use({chunk}); });
  disk_->WaitForPaused(1);
  EXPECT_FALSE(store_->Discard(chunk, Content::kZero));
  disk_->Resume();
  reading.get();
  EXPECT_TRUE(binder_.is_attached(chunk));
}

TEST_F(ChunkStoreTest, DestroyGivesBackMemoryAndDisk) {
  Open(1);
  const ChunkId resident = NewWith(1);
  const ChunkId evicted = NewWith(2);
  store_->Destroy(resident);
  store_->Destroy(evicted);
  const StoreStats stats = store_->stats();
  EXPECT_EQ(stats.num_chunks, 0);
  EXPECT_EQ(stats.managed_bytes, 0);
  EXPECT_EQ(stats.resident_bytes, 0);
  EXPECT_EQ(stats.disk_used_bytes, 0);
}

TEST_F(ChunkStoreTest, IdsOfDestroyedChunksAreUsedAgain) {
  Open(2);
  const ChunkId kept = NewWith(1);
  ChunkId highest = kept;
  for (int round = 0; round < 1000; ++round) {
    const ChunkId first = NewWith(2);
    const ChunkId second = New(1, Content::kZero);
    highest = std::max({highest, first, second});
    EXPECT_EQ(ValueOf(second), 0);
    if (round % 2 == 0) store_->EvictAll();
    store_->Destroy(first);
    store_->Destroy(second);
  }
  EXPECT_LE(highest, kept + 2);
  EXPECT_EQ(ValueOf(kept), 1);
  EXPECT_EQ(store_->stats().num_chunks, 1);
  EXPECT_EQ(store_->stats().managed_bytes, kPage);
}

TEST_F(ChunkStoreTest, DestroyDuringASaveWaitsForItsEnd) {
  Open(1);
  const ChunkId chunk = NewWith(1);
  auto evicting = StartEvictAllOnPausedDisk(1);
  auto destroying = std::async(std::launch::async, [&] { store_->Destroy(chunk); });
  disk_->Resume();
  destroying.get();
  evicting.get();
  EXPECT_EQ(store_->stats().resident_bytes, 0);
  EXPECT_EQ(store_->stats().disk_used_bytes, 0);
}

TEST_F(ChunkStoreTest, DestroyDoesNotWaitForWhoWantedTheChunkAndGaveUp) {
  Open(1);
  const ChunkId chunk = NewWith(1);
  const ChunkId large = New(5);
  auto evicting = StartEvictAllOnPausedDisk(1);
  EXPECT_THROW(Use({chunk, large}), OutOfMemory);
  auto destroying = std::async(std::launch::async, [&] { store_->Destroy(chunk); });
  disk_->Resume();
  destroying.get();
  evicting.get();
  EXPECT_EQ(num_resident_pages(), 0);
}

TEST_F(ChunkStoreTest, DiscardIsStrongerThanWhoWantedTheChunkAndGaveUp) {
  Open(1);
  const ChunkId chunk = NewWith(1);
  const ChunkId large = New(5);
  auto evicting = StartEvictAllOnPausedDisk(1);
  EXPECT_THROW(Use({chunk, large}), OutOfMemory);
  EXPECT_FALSE(store_->Discard(chunk, Content::kUndefined));
  disk_->Resume();
  evicting.get();
  EXPECT_EQ(num_resident_pages(), 0);
}

TEST_F(ChunkStoreTest, ALowerBudgetEvictsLeastRecentlyUsedDownToIt) {
  Open(4);
  const ChunkId first = NewWith(1);
  const ChunkId second = NewWith(2);
  const ChunkId third = NewWith(3);
  const ChunkId fourth = NewWith(4);
  Use({first});
  store_->EvictAll();
  Use({second, third});  // all clean: leaving is done at once
  Use({fourth, first});
  Use({second});
  SetBudget(2);
  EXPECT_EQ(num_resident_pages(), 2);
  EXPECT_TRUE(binder_.is_attached(first));
  EXPECT_TRUE(binder_.is_attached(second));
  EXPECT_LE(store_->stats().mapped_bytes, 2 * kPage);
  EXPECT_EQ(ValueOf(third), 3);
  EXPECT_EQ(ValueOf(fourth), 4);
  EXPECT_EQ(num_resident_pages(), 2);
}

TEST_F(ChunkStoreTest, ALowerBudgetBelowWhatIsLeasedTakesEffectLater) {
  Open(2);
  const ChunkId first = NewWith(1);
  const ChunkId second = NewWith(2);
  {
    const auto lease = Read({first});
    const auto other = Read({second});
    SetBudget(1);
    EXPECT_EQ(AttachedValue(first), 1);
  }
  EXPECT_EQ(ValueOf(New(1, Content::kZero)), 0);
  EXPECT_LE(num_resident_pages(), 1);
  EXPECT_LE(store_->stats().mapped_bytes, kPage);
  EXPECT_EQ(ValueOf(first), 1);
}

TEST_F(ChunkStoreTest, ALowerBudgetStillHoldsTheLargestSetOfOneOperation) {
  Open(8);
  const ChunkId first = NewWith(1);
  const ChunkId second = NewWith(2, 2);
  const ChunkId third = NewWith(3);
  Use({first, second});
  Use({second, third});
  SetBudget(1);
  EXPECT_EQ(store_->stats().budget_bytes, 3 * kPage);
  Use({first, second});
  {
    const auto held = Hold({third});
    Use({first, second});
    SetBudget(0);
    EXPECT_EQ(store_->stats().budget_bytes, 4 * kPage);
  }
  SetBudget(5);
  EXPECT_EQ(store_->stats().budget_bytes, 5 * kPage);
}

TEST_F(ChunkStoreTest, WhatIsReservedForOthersLeavesLessToHold) {
  Open(4);
  const std::vector<ChunkAccess> set = {{.chunk = NewWith(1, 2), .access = Access::kRead},
                                        {.chunk = NewWith(2, 2), .access = Access::kRead}};
  EXPECT_TRUE(store_->CanHold(set));
  {
    const OutsideBytes reserved = store_->Reserve(1, "data not in chunks yet");
    EXPECT_FALSE(store_->CanHold(set));
    EXPECT_TRUE(store_->CanHold(std::span(set).first(1)));
  }
  EXPECT_TRUE(store_->CanHold(set));
}

TEST_F(ChunkStoreTest, AHigherBudgetWakesWhoWaitsForRoom) {
  Open(1);
  const auto lease = Read({NewWith(1)});
  const ChunkId other = New(1, Content::kZero);
  auto reading = StartAndWaitUntilItWaits([&] { EXPECT_EQ(ValueOf(other), 0); });
  SetBudget(2);
  reading.get();
}

TEST_F(ChunkStoreTest, WithoutADiskDirtyChunksStayAndCleanOnesGo) {
  Open(2, {.has_disk = false});
  const ChunkId dirty = NewWith(1);
  Use({New(1, Content::kZero)});
  Use({New(1, Content::kZero)});
  EXPECT_TRUE(binder_.is_attached(dirty));
  store_->EvictAll();
  EXPECT_EQ(num_resident_pages(), 1);
  EXPECT_EQ(ValueOf(dirty), 1);
}

TEST_F(ChunkStoreTest, CreateRefusesWhatNeitherMemoryNorDiskCanTake) {
  Open(2, {.max_disk_bytes = 3 * kPage});
  NewWith(1, 2);
  NewWith(2, 1);
  EXPECT_THROW(New(1), OutOfMemory);
  EXPECT_EQ(store_->stats().num_chunks, 2);
  EXPECT_EQ(store_->stats().managed_bytes, 3 * kPage);
}

TEST_F(ChunkStoreTest, DiskIsTakenOnlyOnceNotEverythingFits) {
  Open(2);
  NewWith(1);
  NewWith(2);
  EXPECT_EQ(store_->stats().disk_used_bytes, 0);
  New();
  EXPECT_EQ(store_->stats().disk_used_bytes, 3 * kPage);
}

TEST_F(ChunkStoreTest, DataIsOnlyForThoseWhoLease) {
  Open(1);
  const ChunkId chunk = NewWith(1);
  EXPECT_THROW(store_->data(chunk), std::logic_error);
  const auto lease = Read({chunk});
  EXPECT_EQ(store_->data(chunk), binder_.data(chunk));
}

TEST_F(ChunkStoreTest, CountsWhatItDoes) {
  Open(1);
  const ChunkId first = NewWith(1);
  NewWith(2);
  Use({first});
  const StoreStats stats = store_->stats();
  EXPECT_EQ(stats.counters.num_op_leases, 3);
  EXPECT_EQ(stats.counters.num_fetches, 3);
  EXPECT_EQ(stats.counters.fetched_bytes, 3 * kPage);
  EXPECT_EQ(stats.counters.num_evictions, 2);
  EXPECT_EQ(stats.counters.evicted_bytes, 2 * kPage);
  EXPECT_EQ(stats.disk_written_bytes, 2 * kPage);
  EXPECT_EQ(stats.disk_read_bytes, kPage);
}

TEST_F(ChunkStoreTest, CountsTheTimeThatCallersWait) {
  Open(1);
  const ChunkId chunk = NewWith(1);
  store_->EvictAll();
  const double before = store_->stats().counters.stall_seconds;
  disk_->Pause();
  auto reading = StartAndWaitUntilItWaits([&] { Use({chunk}); });
  clock_.Advance(2.5);
  disk_->Resume();
  reading.get();
  EXPECT_EQ(store_->stats().counters.stall_seconds - before, 2.5);
}

TEST_F(ChunkStoreTest, StressEvictTakesEverythingAwayAfterEveryOperation) {
  Open(4, {.stress = {.evict = true}});
  const ChunkId first = NewWith(1);
  const ChunkId second = NewWith(2);
  EXPECT_FALSE(binder_.is_attached(first));
  for (int round = 0; round < 20; ++round) {
    EXPECT_EQ(ValueOf(first), 1);
    EXPECT_EQ(ValueOf(second), 2);
  }
  EXPECT_FALSE(binder_.is_attached(second));
  EXPECT_EQ(disk_->num_reads(), 40);
}

TEST_F(ChunkStoreTest, StressPoisonFillsUndefinedMemoryAndOnlyThat) {
  Open(2, {.stress = {.poison = true}});
  EXPECT_EQ(ValueOf(New()), 0x7f);
  const ChunkId zero = New(1, Content::kZero);
  EXPECT_EQ(ValueOf(zero), 0);
  const ChunkId written = NewWith(3);
  EXPECT_EQ(ValueOf(zero), 0);
  EXPECT_EQ(ValueOf(written), 3);
}

TEST_F(ChunkStoreTest, ShutdownFinishesTransfersAndRefusesFetches) {
  Open(2);
  const ChunkId evicted = NewWith(1);
  store_->EvictAll();
  const ChunkId resident = NewWith(2);
  store_->Shutdown();
  store_->Shutdown();
  EXPECT_EQ(ValueOf(resident), 2);
  EXPECT_THROW(Use({evicted}), Error);
  EXPECT_THROW(store_->Reserve(kPage, "op"), Error);
}

TEST_F(ChunkStoreTest, ShutdownWakesEveryWaitingCaller) {
  Open(2);
  const ChunkId on_disk = NewWith(1);
  store_->EvictAll();
  const auto held = Read({NewWith(2)});
  disk_->Pause();
  auto for_load = StartAndWaitUntilItWaits([&] { Use({on_disk}); });
  auto for_room = StartAndWaitUntilItWaits([&] { Use({New(1, Content::kZero)}); });
  auto shutdown = std::async(std::launch::async, [&] { store_->Shutdown(); });
  EXPECT_THROW(for_room.get(), Error);
  disk_->Resume();
  shutdown.get();
  EXPECT_THROW(for_load.get(), Error);
}

}  // namespace
}  // namespace patrickstar
