// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/io/spill_file.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <future>
#include <map>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "patrickstar/base/error.h"
#include "patrickstar/base/types.h"
#include "patrickstar/io/faulty_file.h"
#include "patrickstar/io/os_file.h"
#include "patrickstar/io/test_support.h"

namespace patrickstar {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

class SpillFileTest : public testing::Test {
 protected:
  void Open(const FaultyFileOptions& file_options = {}, const SpillFileOptions& options = {}) {
    auto faulty = std::make_unique<FaultyFile>(file_options);
    faulty_ = faulty.get();
    file_ = std::make_unique<SpillFile>(std::move(faulty), options);
  }

  void OpenOnDisk() {
    file_ = std::make_unique<SpillFile>(OpenSpillFile(std::filesystem::current_path().string()),
                                        SpillFileOptions{});
  }

  Outcome StartWrite(const SpillSlot& slot, PageBuffer* payload) {
    const Outcome outcome;
    file_->Write(slot, payload->data(), payload->num_bytes(),
                 [outcome](std::exception_ptr error) { outcome.Set(std::move(error)); });
    return outcome;
  }

  Outcome StartRead(const SpillSlot& slot, PageBuffer* payload) {
    const Outcome outcome;
    file_->Read(slot, payload->data(), payload->num_bytes(),
                [outcome](std::exception_ptr error) { outcome.Set(std::move(error)); });
    return outcome;
  }

  // The block of the payload that begins at `offset`.
  void WritePart(const SpillSlot& slot, int64_t offset, PageBuffer* payload) {
    const Outcome outcome;
    file_->WritePart(slot, offset, payload->data() + offset,
                     std::min(kMiB, payload->num_bytes() - offset),
                     [outcome](std::exception_ptr error) { outcome.Set(std::move(error)); });
    outcome.Wait();
  }

  void Write(const SpillSlot& slot, PageBuffer* payload) { StartWrite(slot, payload).Wait(); }
  void Read(const SpillSlot& slot, PageBuffer* payload) { StartRead(slot, payload).Wait(); }

  SpillSlot Save(PageBuffer* payload) {
    const SpillSlot slot = file_->Allocate(payload->num_bytes());
    Write(slot, payload);
    return slot;
  }

  void ExpectHolds(const SpillSlot& slot, const PageBuffer& expected) {
    PageBuffer found(expected.num_bytes(), 0);
    Read(slot, &found);
    EXPECT_EQ(found, expected);
  }

  void ExpectRoundTrips() {
    uint32_t seed = 1;
    for (const int64_t num_bytes : {int64_t{1}, int64_t{511}, int64_t{513}, int64_t{4095},
                                    int64_t{4096}, kMiB - 1, kMiB, kMiB + 1, int64_t{28824000}}) {
      PageBuffer payload(num_bytes, ++seed);
      const SpillSlot slot = Save(&payload);
      EXPECT_EQ(slot.num_bytes, AlignUp(num_bytes, 4096));
      ExpectHolds(slot, payload);
    }
  }

  template <typename Exception, typename Call>
  std::string Failure(const Call& call) {
    try {
      call();
    } catch (const Exception& error) {
      return error.what();
    }
    return "no failure";
  }

  FaultyFile* faulty_ = nullptr;
  std::unique_ptr<SpillFile> file_;
};

TEST_F(SpillFileTest, ReadsBackEverySizeFromMemory) {
  Open();
  ExpectRoundTrips();
}

TEST_F(SpillFileTest, ReadsBackEverySizeFromADisk) {
  OpenOnDisk();
  ExpectRoundTrips();
}

TEST_F(SpillFileTest, ReadsBackThroughShortInterruptedAndSlowIo) {
  Open({.short_probability = 0.3, .interrupt_probability = 0.3, .max_delay_us = 50},
       {.random_delays = true, .seed = 5});
  ExpectRoundTrips();
}

TEST_F(SpillFileTest, CountsTheBytesThatItMoves) {
  Open();
  PageBuffer payload(5000, 1);
  const SpillSlot slot = Save(&payload);
  ExpectHolds(slot, payload);
  ExpectHolds(slot, payload);
  EXPECT_EQ(file_->bytes_written(), 8192);
  EXPECT_EQ(file_->bytes_read(), 16384);
  EXPECT_EQ(file_->allocated_bytes(), 8192);
  file_->Free(slot);
  EXPECT_EQ(file_->allocated_bytes(), 0);
}

TEST_F(SpillFileTest, GrowsByExactlyWhatIsMissing) {
  Open();
  const SpillSlot first = file_->Allocate(10 * 4096);
  const SpillSlot second = file_->Allocate(4 * 4096);
  EXPECT_EQ(faulty_->num_bytes(), 14 * 4096);
  file_->Free(second);
  // The hole at the end is used: only two pages are added.
  const SpillSlot third = file_->Allocate(6 * 4096);
  EXPECT_EQ(third.offset, second.offset);
  EXPECT_EQ(faulty_->num_bytes(), 16 * 4096);
  EXPECT_EQ(file_->file_bytes(), 16 * 4096);
  file_->Free(first);
  EXPECT_EQ(file_->Allocate(10 * 4096).offset, first.offset);
  EXPECT_EQ(faulty_->num_bytes(), 16 * 4096);
}

TEST_F(SpillFileTest, RefusesToPassItsLimitAndStaysUsable) {
  Open({.path = "/data/spill"}, {.max_bytes = 8 * 4096});
  const SpillSlot slot = file_->Allocate(6 * 4096);
  EXPECT_EQ(Failure<OutOfMemory>([&] { file_->Allocate(3 * 4096); }),
            "cannot spill 12.0 KiB to /data/spill: 24.0 KiB of 32.0 KiB allowed are used, largest "
            "hole 0 bytes; raise disk_space to at least 36.0 KiB (36864 bytes)");
  EXPECT_TRUE(file_->Allocate(2 * 4096).is_valid());
  file_->Free(slot);
  EXPECT_TRUE(file_->Allocate(3 * 4096).is_valid());
}

TEST_F(SpillFileTest, AFullDiskIsAnErrorUntilThereIsSpaceAgain) {
  Open({.path = "/data/spill"});
  PageBuffer payload(3 * kMiB, 1);
  const SpillSlot slot = Save(&payload);
  faulty_->SetFreeBytes(kMiB);
  const std::string message = Failure<IoError>([&] { file_->Allocate(2 * kMiB); });
  EXPECT_EQ(message,
            "cannot grow the spill file in /data/spill: No space left on device, 2.0 MiB (2097152 "
            "bytes) needed, 1.0 MiB free; free space in /data/spill, raise host_memory or name "
            "another spill_dir");
  EXPECT_EQ(file_->allocated_bytes(), 3 * kMiB);
  ExpectHolds(slot, payload);
  EXPECT_TRUE(file_->Allocate(kMiB).is_valid());
  faulty_->SetFreeBytes(2 * kMiB);
  EXPECT_TRUE(file_->Allocate(2 * kMiB).is_valid());
}

TEST_F(SpillFileTest, AFailedWriteLeavesASlotThatCanBeWrittenAgain) {
  Open();
  PageBuffer payload(5 * kMiB, 1);
  const SpillSlot slot = Save(&payload);
  faulty_->SetWritesFull(true);
  EXPECT_THROW(Write(slot, &payload), IoError);
  EXPECT_THROW(Read(slot, &payload), std::logic_error);
  faulty_->SetWritesFull(false);
  Write(slot, &payload);
  ExpectHolds(slot, payload);
}

TEST_F(SpillFileTest, OneBadBlockFailsTheWholeReadOnce) {
  Open();
  PageBuffer payload(8 * kMiB, 1);
  const SpillSlot slot = Save(&payload);
  faulty_->FailRange(slot.offset + 5 * kMiB, slot.offset + 5 * kMiB + 1, EIO);
  const std::string message = Failure<IoError>([&] { Read(slot, &payload); });
  EXPECT_NE(message.find("at offset 5242880 "), std::string::npos) << message;
  faulty_->Heal();
  ExpectHolds(slot, PageBuffer(8 * kMiB, 1));
}

TEST_F(SpillFileTest, EveryFlippedBitIsDetected) {
  Open();
  PageBuffer payload(2 * kMiB + 100, 1);
  const SpillSlot slot = Save(&payload);
  for (const int64_t offset : {int64_t{0}, kMiB - 1, kMiB, 2 * kMiB + 99}) {
    faulty_->FlipBitOnRead(slot.offset + offset, 6);
    EXPECT_THROW(Read(slot, &payload), CorruptData) << offset;
    faulty_->Heal();
    Read(slot, &payload);
  }
}

TEST_F(SpillFileTest, SlotsOfAnotherPayloadAreOverwrittenOnlyAfterFree) {
  Open();
  PageBuffer first(kMiB, 1);
  PageBuffer second(kMiB, 2);
  const SpillSlot slot = Save(&first);
  file_->Free(slot);
  const SpillSlot reused = file_->Allocate(kMiB);
  EXPECT_EQ(reused.offset, slot.offset);
  // The old bytes are not content of the new slot.
  EXPECT_THROW(Read(reused, &first), std::logic_error);
  Write(reused, &second);
  ExpectHolds(reused, second);
}

TEST_F(SpillFileTest, MisuseIsABugOfTheCaller) {
  Open();
  PageBuffer payload(kMiB, 1);
  const SpillSlot slot = Save(&payload);
  faulty_->Pause();
  const Outcome reading = StartRead(slot, &payload);
  EXPECT_THROW(file_->Free(slot), std::logic_error);
  EXPECT_THROW(StartWrite(slot, &payload), std::logic_error);
  faulty_->Resume();
  reading.Wait();
  PageBuffer larger(kMiB + 1, 1);
  EXPECT_THROW(StartWrite(slot, &larger), std::logic_error);
  PageBuffer smaller(4096, 1);
  EXPECT_THROW(StartRead(slot, &smaller), std::logic_error);
  EXPECT_THROW(file_->Write(slot, payload.data() + 512, 512, [](const std::exception_ptr&) {}),
               std::logic_error);
  EXPECT_THROW(file_->Allocate(0), std::logic_error);
  file_->Free(slot);
  EXPECT_THROW(file_->Free(slot), std::logic_error);
}

// Against a model that keeps the slots in a map.
TEST_F(SpillFileTest, RandomSlotsNeverOverlapNorPassTheLimit) {
  constexpr int64_t kMaxBytes = 256 * 4096;
  for (uint32_t seed = 0; seed < 20; ++seed) {
    Open({}, {.max_bytes = kMaxBytes, .num_threads = 1});
    std::mt19937 random(seed);
    std::map<int64_t, int64_t> slots;
    int64_t num_refused = 0;
    for (int step = 0; step < 2000; ++step) {
      if (random() % 5 < 2 && !slots.empty()) {
        const auto slot = std::next(slots.begin(), static_cast<int>(random() % slots.size()));
        file_->Free({.offset = slot->first, .num_bytes = slot->second});
        slots.erase(slot);
        continue;
      }
      const int64_t num_bytes = 1 + random() % (24 * 4096);
      const int64_t rounded_bytes = AlignUp(num_bytes, 4096);
      int64_t largest_hole = 0;
      int64_t end = 0;
      for (const auto& [offset, slot_bytes] : slots) {
        largest_hole = std::max(largest_hole, offset - end);
        end = offset + slot_bytes;
      }
      largest_hole = std::max(largest_hole, kMaxBytes - end);
      try {
        const SpillSlot slot = file_->Allocate(num_bytes);
        ASSERT_EQ(slot.num_bytes, rounded_bytes);
        const auto next = slots.emplace(slot.offset, slot.num_bytes).first;
        if (next != slots.begin()) {
          ASSERT_LE(std::prev(next)->first + std::prev(next)->second, slot.offset);
        }
        if (std::next(next) != slots.end()) {
          ASSERT_LE(slot.offset + slot.num_bytes, std::next(next)->first);
        }
        ASSERT_LE(slot.offset + slot.num_bytes, kMaxBytes);
      } catch (const OutOfMemory&) {
        ++num_refused;
        ASSERT_LT(largest_hole, rounded_bytes);
      }
      ASSERT_LE(faulty_->num_bytes(), kMaxBytes);
    }
    EXPECT_GT(num_refused, 0);
    for (const auto& [offset, num_bytes] : slots) {
      file_->Free({.offset = offset, .num_bytes = num_bytes});
    }
    EXPECT_EQ(file_->allocated_bytes(), 0);
    const int64_t file_bytes = file_->file_bytes();
    EXPECT_EQ(file_->Allocate(file_bytes).offset, 0);
    EXPECT_EQ(file_->file_bytes(), file_bytes);
  }
}

TEST_F(SpillFileTest, ManyThreadsAllocateWriteReadAndFree) {
  Open({.short_probability = 0.1, .interrupt_probability = 0.1, .max_delay_us = 20},
       {.num_threads = 3});
  std::vector<std::thread> threads;
  for (uint32_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([this, thread] {
      std::mt19937 random(thread);
      for (uint32_t round = 0; round < 15; ++round) {
        PageBuffer payload(1 + random() % (3 * kMiB), thread * 100 + round);
        const SpillSlot slot = Save(&payload);
        ExpectHolds(slot, payload);
        file_->Free(slot);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(file_->allocated_bytes(), 0);
}

TEST_F(SpillFileTest, ManyReadsOfOneSlotAtOnce) {
  Open();
  PageBuffer payload(3 * kMiB + 17, 1);
  const SpillSlot slot = Save(&payload);
  std::vector<PageBuffer> found(6, PageBuffer(payload.num_bytes(), 0));
  std::vector<Outcome> reads;
  for (PageBuffer& target : found) reads.push_back(StartRead(slot, &target));
  for (const Outcome& read : reads) read.Wait();
  for (const PageBuffer& target : found) EXPECT_EQ(target, payload);
}

TEST_F(SpillFileTest, PartsOfAPayloadMoveInAnyOrder) {
  Open();
  PageBuffer payload(2 * kMiB + 3 * kPageAlignment, 5);
  const SpillSlot slot = file_->Allocate(payload.num_bytes());
  file_->BeginParts(slot, payload.num_bytes());
  for (const int64_t block : {2, 0, 1}) WritePart(slot, block * kMiB, &payload);
  file_->EndParts(slot, payload.num_bytes());
  ExpectHolds(slot, payload);
  PageBuffer part(kMiB, 9);
  const Outcome outcome;
  file_->ReadPart(slot, kMiB, part.data(), kMiB,
                  [outcome](std::exception_ptr error) { outcome.Set(std::move(error)); });
  outcome.Wait();
  EXPECT_TRUE(std::equal(part.data(), part.data() + kMiB, payload.data() + kMiB));
}

TEST_F(SpillFileTest, AFlippedBitInAPartIsFound) {
  Open();
  PageBuffer payload(2 * kMiB, 5);
  const SpillSlot slot = Save(&payload);
  faulty_->FlipBitOnRead(slot.offset + kMiB + 17, 3);
  PageBuffer part(kMiB, 9);
  const Outcome outcome;
  file_->ReadPart(slot, kMiB, part.data(), kMiB,
                  [outcome](std::exception_ptr error) { outcome.Set(std::move(error)); });
  EXPECT_THROW(outcome.Wait(), CorruptData);
}

TEST_F(SpillFileTest, AGivenUpWriteInPartsCanBeFreedOrBegunAgain) {
  Open();
  PageBuffer payload(2 * kMiB, 5);
  const SpillSlot slot = file_->Allocate(payload.num_bytes());
  file_->BeginParts(slot, payload.num_bytes());
  WritePart(slot, kMiB, &payload);
  file_->EndParts(slot, 0);
  Write(slot, &payload);
  ExpectHolds(slot, payload);
  file_->BeginParts(slot, payload.num_bytes());
  file_->EndParts(slot, 0);
  file_->Free(slot);
  EXPECT_EQ(file_->allocated_bytes(), 0);
}

TEST_F(SpillFileTest, TheSlotMayBeFreedInsideDone) {
  Open();
  PageBuffer payload(3 * kMiB, 1);
  const SpillSlot slot = file_->Allocate(payload.num_bytes());
  std::promise<int64_t> allocated_bytes;
  file_->Write(slot, payload.data(), payload.num_bytes(), [&](const std::exception_ptr&) {
    file_->Free(slot);
    allocated_bytes.set_value(file_->allocated_bytes());
  });
  EXPECT_EQ(allocated_bytes.get_future().get(), 0);
}

TEST_F(SpillFileTest, WhatDoneOwnsEndsWithItsCall) {
  Open();
  PageBuffer payload(3 * kMiB, 1);
  auto owned = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = owned;
  file_->Write(file_->Allocate(payload.num_bytes()), payload.data(), payload.num_bytes(),
               [owned](const std::exception_ptr&) {});
  owned.reset();
  file_->Shutdown();
  EXPECT_TRUE(watch.expired());
}

TEST_F(SpillFileTest, ShutdownFinishesQueuedWorkAndRefusesMore) {
  Open({.max_delay_us = 200}, {.num_threads = 2});
  PageBuffer payload(3 * kMiB, 1);
  std::vector<Outcome> writes;
  for (int write = 0; write < 10; ++write) {
    writes.push_back(StartWrite(file_->Allocate(payload.num_bytes()), &payload));
  }
  file_->Shutdown();
  for (const Outcome& write : writes) {
    ASSERT_TRUE(write.is_set());
    write.Wait();
  }
  EXPECT_EQ(file_->bytes_written(), 30 * kMiB);
  const SpillSlot slot = file_->Allocate(payload.num_bytes());
  const std::string message = Failure<Error>([&] { Write(slot, &payload); });
  EXPECT_NE(message.find("it was shut down"), std::string::npos) << message;
}

TEST_F(SpillFileTest, AForkedChildIsRefusedAndLeavesAlone) {
  Open();
  PageBuffer payload(3 * kMiB, 1);
  const SpillSlot slot = Save(&payload);
  faulty_->Pause();
  const Outcome reading = StartRead(slot, &payload);
  faulty_->WaitForPaused(1);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // A hang is a failure.
    file_->AbandonAfterFork();
    int num_refused = 0;
    const auto count = [&](const auto& call) {
      num_refused += Failure<Error>(call) == AsyncFile::kForkedMessage ? 1 : 0;
    };
    count([&] { Write(slot, &payload); });
    count([&] { Read(slot, &payload); });
    count([&] { file_->Allocate(1); });
    file_->Free(slot);
    file_->Shutdown();
    file_.reset();
    _exit(num_refused == 3 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  faulty_->Resume();
  reading.Wait();
  ExpectHolds(slot, PageBuffer(3 * kMiB, 1));
}

}  // namespace
}  // namespace patrickstar
