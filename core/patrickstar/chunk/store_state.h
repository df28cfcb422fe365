// SPDX-License-Identifier: Apache-2.0
//
// StoreState: what the parts of the chunk store share - the one mutex, the one
// condition variable, and what they guard. Internal to chunk/: users of the store see
// ChunkStore only.
//
// The mutex is held for table work alone: never over I/O, memcpy, an allocator, a
// deleter, torch or Python. What must happen without it is collected (garbage, the
// transfer queue) and done by PayloadMover::Flush.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "patrickstar/base/clock.h"
#include "patrickstar/chunk/binder.h"
#include "patrickstar/chunk/budget.h"
#include "patrickstar/chunk/chunk_table.h"
#include "patrickstar/chunk/transfer_queue.h"
#include "patrickstar/device/host_slab.h"
#include "patrickstar/io/spill_file.h"

namespace patrickstar {

// Faults that a test run provokes on purpose.
struct StressOptions {
  bool evict = false;   // evict the chunks of an op when it ends
  bool poison = false;  // fill memory with garbage before it is freed or first written
};

struct StoreOptions {
  // Bytes of payloads on the compute tier. Hard. No default.
  int64_t host_bytes = 0;
  StressOptions stress;
  // Transfers handed to the disk at once: enough to keep its queue full, few enough
  // that what is still queued can be cancelled.
  int max_transfers_in_flight = 8;
  // Payloads that leave next are written back ahead of need while others leave, so that the
  // disk works on while a caller computes: at most these bytes, and 1/8 of host_bytes.
  int64_t write_behind_bytes = int64_t{64} << 20;
};

// Counted since the store was made. Bytes are whole payloads.
struct StoreCounters {
  int64_t num_op_leases = 0;
  int64_t num_fetches = 0;
  int64_t fetched_bytes = 0;  // given a payload on the compute tier, from disk or from nothing
  int64_t num_evictions = 0;
  int64_t evicted_bytes = 0;
  double stall_seconds = 0.0;  // callers waiting for room or I/O
};

struct StoreState {
  StoreState(StoreOptions store_options, std::unique_ptr<SpillFile> spill_file, Binder* b, Clock* c)
      : options(store_options),
        binder(*b),
        clock(*c),
        spill(std::move(spill_file)),
        budget(store_options.host_bytes),
        pool(store_options.host_bytes),
        queue(store_options.max_transfers_in_flight) {}

  // Waits for `changed`, counted as a waiting caller.
  void WaitForChange(std::unique_lock<std::mutex>& lock) {
    ++num_waiting;
    changed.wait(lock);
    --num_waiting;
  }

  const StoreOptions options;
  Binder& binder;
  Clock& clock;
  const std::unique_ptr<SpillFile> spill;  // null without a disk tier
  Budget budget;
  SlabPool pool;

  std::mutex mutex;
  // End of a lease, transfer, failure, freed bytes, shutdown.
  std::condition_variable changed;

  // Guarded by mutex.
  ChunkTable table;
  TransferQueue queue;
  std::vector<Payload> garbage;  // to be freed without the mutex
  int64_t freeing_bytes = 0;     // taken from the garbage, not yet free
  StoreCounters counters;
  uint64_t tick = 0;                // of leases
  uint64_t num_save_failures = 0;   // serial numbers of failed write-backs
  std::exception_ptr save_failure;  // the latest one
  int num_waiting = 0;              // callers in changed.wait
  int64_t managed_bytes = 0;
  int64_t held_bytes = 0;         // of payloads with a held lease
  int64_t largest_set_bytes = 0;  // that one op has leased so far, beside what was held
  bool is_shut_down = false;
  bool is_forked = false;  // this process is a child: threads and file are the parent's
};

}  // namespace patrickstar
