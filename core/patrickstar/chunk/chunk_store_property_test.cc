// SPDX-License-Identifier: Apache-2.0
//
// Threads that acquire, nest, hold and discard at random, under random budgets that
// change while they run, over a disk that is slow, stutters and sometimes fails: nobody
// waits for ever, no budget is passed, no byte is lost. A run follows from its seed but
// for the order in which the threads get their turns.
//
// PATRICKSTAR_PROPERTY_SEEDS=<first>:<number> runs other seeds than the fixed few.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "patrickstar/base/error.h"
#include "patrickstar/chunk/chunk_store.h"
#include "patrickstar/chunk/testing/doubles.h"
#include "patrickstar/io/faulty_file.h"

namespace patrickstar {
namespace {

using Random = std::mt19937_64;

constexpr int kSecondsUntilStuck = 120;  // a run takes well under one, also under sanitizers
constexpr size_t kMaxSetSize = 4;
constexpr int kNumOperations = 150;  // of each thread

int64_t Pick(Random* random, int64_t least, int64_t most) {
  return std::uniform_int_distribution<int64_t>(least, most)(*random);
}
bool Happens(Random* random, int percent) { return Pick(random, 0, 99) < percent; }

// What a chunk must hold. A write makes a new version; the bytes follow from it.
struct Truth {
  static constexpr uint64_t kUnknown = 0;
  static constexpr uint64_t kZeros = 1;

  ChunkId chunk = kNoChunk;
  int64_t num_bytes = 0;
  std::mutex mutex;  // guards what follows, and the bytes while they are looked at
  uint64_t version = kUnknown;
  int num_users = 0;  // threads that lease it or are about to
};

// Ends the process when the test does not get on: a deadlock must not look like a slow machine.
class Watchdog {
 public:
  explicit Watchdog(std::string what) : what_(std::move(what)), thread_([this] { Watch(); }) {}
  ~Watchdog() {
    {
      std::lock_guard lock(mutex_);
      is_done_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }

 private:
  void Watch() {
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, std::chrono::seconds(kSecondsUntilStuck),
                          [this] { return is_done_; })) {
      return;
    }
    std::fprintf(stderr, "stuck after %d seconds: %s\n", kSecondsUntilStuck, what_.c_str());
    std::abort();
  }

  const std::string what_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_done_ = false;
  std::thread thread_;
};

// What a run is like, all from its seed.
struct Plan {
  explicit Plan(uint64_t seed) : random(seed) {
    num_threads = static_cast<int>(Pick(&random, 4, 8));
    const int64_t num_chunks = Pick(&random, 5, 24);
    for (int64_t count = 0; count < num_chunks; ++count) {
      const int64_t num_pages = Happens(&random, 3) ? Pick(&random, 250, 600) : Pick(&random, 1, 8);
      sizes.push_back(num_pages * kPageAlignment - (Happens(&random, 30) ? 40 : 0));
    }
    is_nesting = Happens(&random, 60);
    is_holding = Happens(&random, 40);
    is_failing = Happens(&random, 30);
    is_budget_changing = Happens(&random, 40);
    stress = {.evict = Happens(&random, 25), .poison = Happens(&random, 25)};
    max_transfers_in_flight = static_cast<int>(Pick(&random, 1, 8));
    write_behind_bytes = kPageAlignment * Pick(&random, 0, 16);
    least_budget = LeastBudget();
    budget = least_budget;
    if (Happens(&random, 60)) budget += kPageAlignment * Pick(&random, 0, 100);
  }

  // The largest set of one operation, beside what may be held.
  int64_t LeastBudget() const {
    std::vector<int64_t> payloads;
    for (const int64_t num_bytes : sizes) payloads.push_back(AlignUp(num_bytes, kPageAlignment));
    std::sort(payloads.rbegin(), payloads.rend());
    const int64_t set =
        std::accumulate(payloads.begin(), payloads.begin() + kMaxSetSize, int64_t{0});
    return set + (is_holding ? num_threads * payloads.front() : 0);
  }

  Random random;
  int num_threads;
  std::vector<int64_t> sizes;
  bool is_nesting;
  bool is_holding;
  bool is_failing;
  bool is_budget_changing;
  StressOptions stress;
  int max_transfers_in_flight;
  int64_t write_behind_bytes;
  int64_t least_budget;
  int64_t budget;
};

class World {
 public:
  explicit World(uint64_t seed) : plan_(seed) {
    auto file = std::make_unique<FaultyFile>(
        FaultyFileOptions{.seed = seed,
                          .short_probability = 0.1,
                          .interrupt_probability = 0.1,
                          .max_delay_us = static_cast<int>(Pick(&plan_.random, 0, 1) * 100)});
    disk_ = file.get();
    auto spill = std::make_unique<SpillFile>(
        std::move(file),
        SpillFileOptions{.num_threads = static_cast<int>(Pick(&plan_.random, 1, 4)),
                         .random_delays = Happens(&plan_.random, 25),
                         .seed = seed});
    store_ = std::make_unique<ChunkStore>(
        StoreOptions{.host_bytes = plan_.budget,
                     .stress = plan_.stress,
                     .max_transfers_in_flight = plan_.max_transfers_in_flight,
                     .write_behind_bytes = plan_.write_behind_bytes},
        std::move(spill), &binder_, &clock_);
    for (const int64_t num_bytes : plan_.sizes) {
      auto& truth = truths_.emplace_back(std::make_unique<Truth>());
      const bool is_zero = Happens(&plan_.random, 50);
      truth->chunk =
          store_->Create(Kind::kParam, num_bytes, is_zero ? Content::kZero : Content::kUndefined);
      truth->num_bytes = num_bytes;
      truth->version = is_zero ? Truth::kZeros : Truth::kUnknown;
    }
  }

  void Run() {
    std::vector<std::thread> threads;
    for (int index = 0; index < plan_.num_threads; ++index) {
      threads.emplace_back([this, seed = plan_.random()] { Work(seed); });
    }
    std::atomic<bool> is_over = false;
    std::thread disturber([&] { Disturb(is_over); });
    for (std::thread& thread : threads) thread.join();
    is_over = true;
    disturber.join();
    disk_->Heal();
    CheckEnd();
  }

 private:
  void Disturb(const std::atomic<bool>& is_over) {
    Random random(plan_.budget);
    while (!is_over) {
      if (plan_.is_failing) disk_->FailNthCall(Pick(&random, 1, 20), EIO);
      if (plan_.is_budget_changing) {
        store_->set_host_bytes(Happens(&random, 50) ? plan_.budget : plan_.least_budget);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    store_->set_host_bytes(plan_.budget);
  }

  void Work(uint64_t seed) {
    Random random(seed);
    std::vector<Truth*> held;
    for (int count = 0; count < kNumOperations; ++count) {
      if (plan_.is_holding && Happens(&random, 10)) {
        if (held.empty()) {
          held = Choose(&random, 1);
          if (!Lease(&random, held, LeaseKind::kHeld, false)) held.clear();
        } else {
          Release(&held, LeaseKind::kHeld);
        }
      } else if (Happens(&random, 10)) {
        Discard(&random);
      } else {
        Operate(&random, kMaxSetSize, false);
      }
    }
    if (!held.empty()) Release(&held, LeaseKind::kHeld);
  }

  void Operate(Random* random, size_t max_set_size, bool is_nested) {
    std::vector<Truth*> set = Choose(random, max_set_size);
    if (!Lease(random, set, LeaseKind::kOp, is_nested)) return;
    if (plan_.is_nesting && !is_nested && Happens(random, 30)) Operate(random, 2, true);
    Release(&set, LeaseKind::kOp);
  }

  std::vector<Truth*> Choose(Random* random, size_t max_size) {
    std::vector<Truth*> set;
    for (const auto& truth : truths_) set.push_back(truth.get());
    std::shuffle(set.begin(), set.end(), *random);
    set.resize(static_cast<size_t>(Pick(random, 1, static_cast<int64_t>(max_size))));
    return set;
  }

  // False when the disk failed, or when there is no room for a nested operation: both are told.
  bool Lease(Random* random, const std::vector<Truth*>& set, LeaseKind kind, bool is_nested) {
    std::vector<ChunkAccess> accesses;
    for (Truth* truth : set) {
      const bool is_write = Happens(random, 50);
      accesses.push_back(
          {.chunk = truth->chunk, .access = is_write ? Access::kWrite : Access::kRead});
      std::lock_guard lock(truth->mutex);
      ++truth->num_users;
    }
    try {
      store_->Acquire(accesses, kind, "op");
    } catch (const Error& error) {
      const bool is_for_room = dynamic_cast<const OutOfMemory*>(&error) != nullptr;
      EXPECT_TRUE(is_for_room ? is_nested : plan_.is_failing) << error.what();
      Leave(set);
      return false;
    }
    for (size_t index = 0; index < set.size(); ++index) {
      Visit(*set[index], accesses[index].access);
    }
    return true;
  }

  void Release(std::vector<Truth*>* set, LeaseKind kind) {
    std::vector<ChunkAccess> accesses;
    for (Truth* truth : *set) {
      Visit(*truth, Access::kRead);
      accesses.push_back({.chunk = truth->chunk});
    }
    store_->Release(accesses, kind);
    Leave(*set);
    set->clear();
  }

  static void Leave(const std::vector<Truth*>& set) {
    for (Truth* truth : set) {
      std::lock_guard lock(truth->mutex);
      --truth->num_users;
    }
  }

  // Checks a leased chunk and, for a write, gives it a new version.
  void Visit(Truth& truth, Access access) {
    std::lock_guard lock(truth.mutex);
    std::byte* data = binder_.data(truth.chunk);
    ASSERT_NE(data, nullptr) << "chunk " << truth.chunk << " is leased and not attached";
    if (truth.version != Truth::kUnknown) {
      ASSERT_TRUE(Holds(data, truth)) << "chunk " << truth.chunk << " lost its bytes";
    }
    if (access == Access::kRead) return;
    truth.version = ++last_version_;
    for (int64_t at = 0; at < truth.num_bytes; at += 8) {
      const uint64_t word = WordOf(truth, at);
      std::memcpy(data + at, &word, sizeof(word));
    }
  }

  static uint64_t WordOf(const Truth& truth, int64_t at) {
    if (truth.version == Truth::kZeros) return 0;
    return (truth.version << 40) ^ (uint64_t{truth.chunk} << 32) ^ static_cast<uint64_t>(at);
  }

  static bool Holds(const std::byte* data, const Truth& truth) {
    for (int64_t at = 0; at < truth.num_bytes; at += 8) {
      uint64_t word;
      std::memcpy(&word, data + at, sizeof(word));
      if (word != WordOf(truth, at)) return false;
    }
    return true;
  }

  // Declares a chunk dead that no thread uses; transfers of it may be under way.
  void Discard(Random* random) {
    Truth& truth = *Choose(random, 1).front();
    std::lock_guard lock(truth.mutex);
    if (truth.num_users != 0) return;
    const bool is_zero = Happens(random, 50);
    const bool is_gone =
        store_->Discard(truth.chunk, is_zero ? Content::kZero : Content::kUndefined);
    truth.version = is_gone && is_zero ? Truth::kZeros : Truth::kUnknown;
  }

  // Loads that failed beside the one whose failure was thrown.
  void MeetPendingFailures() {
    while (true) {
      try {
        store_->ThrowPendingFailure();
        return;
      } catch (const IoError&) {
        EXPECT_TRUE(plan_.is_failing);
      }
    }
  }

  void CheckEnd() {
    MeetPendingFailures();
    for (const auto& truth : truths_) {
      const std::vector<ChunkAccess> accesses = {{.chunk = truth->chunk}};
      const OpLease lease(store_.get(), accesses, "check");
      Visit(*truth, Access::kRead);
    }
    const StoreStats stats = store_->stats();
    EXPECT_LE(stats.peak_bytes, plan_.budget);
    EXPECT_LE(stats.peak_mapped_bytes, plan_.budget);
    EXPECT_GT(stats.counters.num_op_leases, 0);
    EXPECT_EQ(stats.num_held_leases, 0);
    for (const auto& truth : truths_) store_->Destroy(truth->chunk);
    EXPECT_EQ(store_->stats().resident_bytes, 0);
    EXPECT_EQ(store_->stats().disk_used_bytes, 0);
    EXPECT_EQ(binder_.num_faults(), 0);
  }

  Plan plan_;
  FakeBinder binder_;
  SteadyClock clock_;
  FaultyFile* disk_ = nullptr;
  std::unique_ptr<ChunkStore> store_;
  std::vector<std::unique_ptr<Truth>> truths_;
  std::atomic<uint64_t> last_version_{Truth::kZeros};
};

TEST(ChunkStoreProperty, NoDeadlockNoByteLostNoBudgetPassed) {
  uint64_t first_seed = 1;
  uint64_t num_seeds = 8;
  if (const char* seeds = std::getenv("PATRICKSTAR_PROPERTY_SEEDS")) {
    ASSERT_EQ(std::sscanf(seeds, "%lu:%lu", &first_seed, &num_seeds), 2) << seeds;
  }
  for (uint64_t seed = first_seed; seed < first_seed + num_seeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Watchdog watchdog("seed " + std::to_string(seed));
    World(seed).Run();
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace patrickstar
