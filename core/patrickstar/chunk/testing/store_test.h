// SPDX-License-Identifier: Apache-2.0
//
// StoreTest: the fixture of the chunk store's tests. Its verbs speak of pages and of
// chunks filled with one number, so that a test reads as a story. The disk is a
// FaultyFile in memory. After every test it holds that no budget was passed, that no
// more memory than the budget was mapped, and that the binder was called sensibly.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <future>
#include <initializer_list>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "patrickstar/base/error.h"
#include "patrickstar/chunk/chunk_store.h"
#include "patrickstar/chunk/testing/doubles.h"
#include "patrickstar/io/faulty_file.h"

namespace patrickstar {

inline constexpr int64_t kPage = kPageAlignment;

struct StoreTestSetup {
  bool has_disk = true;
  StressOptions stress = {};
  int max_transfers_in_flight = 8;
  int64_t write_behind_bytes = 0;
  int64_t max_disk_bytes = INT64_MAX;
};

// The leases of one operation, of this thread or held; ends when it dies.
class TestLease {
 public:
  TestLease(ChunkStore* store, std::vector<ChunkAccess> set, LeaseKind kind)
      : store_(*store), set_(std::move(set)), kind_(kind) {
    store_.Acquire(set_, kind_, "op");
  }
  ~TestLease() { store_.Release(set_, kind_); }
  TestLease(const TestLease&) = delete;
  TestLease& operator=(const TestLease&) = delete;

 private:
  ChunkStore& store_;
  const std::vector<ChunkAccess> set_;
  const LeaseKind kind_;
};

class StoreTest : public testing::Test {
 protected:
  void Open(int64_t num_pages, const StoreTestSetup& setup = {}) {
    std::unique_ptr<SpillFile> spill;
    if (setup.has_disk) {
      auto file = std::make_unique<FaultyFile>();
      disk_ = file.get();
      spill = std::make_unique<SpillFile>(std::move(file),
                                          SpillFileOptions{.max_bytes = setup.max_disk_bytes});
    }
    most_pages_ = num_pages;
    const StoreOptions options{.host_bytes = num_pages * kPage,
                               .stress = setup.stress,
                               .max_transfers_in_flight = setup.max_transfers_in_flight,
                               .write_behind_bytes = setup.write_behind_bytes};
    store_ = std::make_unique<ChunkStore>(options, std::move(spill), &binder_, &clock_);
  }

  void SetBudget(int64_t num_pages) {
    most_pages_ = std::max(most_pages_, num_pages);
    store_->set_host_bytes(num_pages * kPage);
  }

  void TearDown() override {
    if (!store_) return;
    const StoreStats stats = store_->stats();
    EXPECT_LE(stats.peak_bytes, most_pages_ * kPage);
    EXPECT_LE(stats.peak_mapped_bytes, most_pages_ * kPage);
    EXPECT_EQ(binder_.num_faults(), 0);
  }

  ChunkId New(int64_t num_pages = 1, Content content = Content::kUndefined) {
    const ChunkId chunk = store_->Create(Kind::kParam, num_pages * kPage, content);
    sizes_.resize(std::max<size_t>(sizes_.size(), chunk + 1), kPage);
    sizes_[chunk] = num_pages * kPage;
    return chunk;
  }
  // A chunk that holds `value`, dirty.
  ChunkId NewWith(int value, int64_t num_pages = 1) {
    const ChunkId chunk = New(num_pages);
    Write(chunk, value);
    return chunk;
  }

  std::unique_ptr<TestLease> Read(std::initializer_list<ChunkId> chunks,
                                  LeaseKind kind = LeaseKind::kOp) {
    return Lease(chunks, Access::kRead, kind);
  }
  std::unique_ptr<TestLease> Hold(std::initializer_list<ChunkId> chunks) {
    return Lease(chunks, Access::kRead, LeaseKind::kHeld);
  }
  void Use(std::initializer_list<ChunkId> chunks) { Read(chunks); }
  void Write(ChunkId chunk, int value) {
    const auto lease = Lease({chunk}, Access::kWrite, LeaseKind::kOp);
    std::memset(binder_.data(chunk), value, static_cast<size_t>(size(chunk)));
  }
  int ValueOf(ChunkId chunk) {
    const auto lease = Read({chunk});
    return AttachedValue(chunk);
  }
  // The value of every byte of an attached chunk; -1 when they differ.
  int AttachedValue(ChunkId chunk) const {
    const std::byte* data = binder_.data(chunk);
    const bool is_same =
        std::all_of(data, data + size(chunk), [data](std::byte byte) { return byte == data[0]; });
    return is_same ? static_cast<int>(data[0]) : -1;
  }

  // The message of the E that `work` throws; empty, and a failure, when it does not.
  template <typename E>
  static std::string MessageOf(const std::function<void()>& work) {
    try {
      work();
    } catch (const E& error) {
      return error.what();
    }
    ADD_FAILURE() << "expected an error";
    return "";
  }
  // The smallest budget that an OutOfMemory names, in bytes.
  static int64_t NamedBudget(const std::string& message) {
    const std::string words = "raise host_memory to at least ";
    const size_t at = message.find(words);
    EXPECT_NE(at, std::string::npos) << message;
    return at == std::string::npos ? 0 : std::stoll(message.substr(at + words.size()));
  }

  // Runs `work` on a thread and returns once it waits in the store.
  std::future<void> StartAndWaitUntilItWaits(std::function<void()> work) {
    const int num_looks = clock_.num_looks();
    std::future<void> future = std::async(std::launch::async, std::move(work));
    clock_.WaitForLooks(num_looks + 1);
    store_->stats();  // takes the mutex: the caller has let go of it
    return future;
  }

  // The write-backs of everything that nobody leases have begun and hang in the disk.
  std::future<void> StartEvictAllOnPausedDisk(int num_saves) {
    disk_->Pause();
    std::future<void> future = std::async(std::launch::async, [this] { store_->EvictAll(); });
    disk_->WaitForPaused(num_saves);
    return future;
  }

  void WaitUntilWritten(int64_t num_pages) {
    while (store_->stats().disk_written_bytes < num_pages * kPage) std::this_thread::yield();
  }

  int64_t size(ChunkId chunk) const { return chunk < sizes_.size() ? sizes_[chunk] : kPage; }
  int64_t num_resident_pages() { return store_->stats().resident_bytes / kPage; }

  FakeBinder binder_;
  AlertClock clock_;
  FaultyFile* disk_ = nullptr;
  std::unique_ptr<ChunkStore> store_;

 private:
  std::unique_ptr<TestLease> Lease(std::initializer_list<ChunkId> chunks, Access access,
                                   LeaseKind kind) {
    std::vector<ChunkAccess> set;
    for (const ChunkId chunk : chunks) set.push_back({.chunk = chunk, .access = access});
    return std::make_unique<TestLease>(store_.get(), std::move(set), kind);
  }

  std::vector<int64_t> sizes_;  // of the chunks, by id
  int64_t most_pages_ = 0;      // of all budgets so far
};

}  // namespace patrickstar
