// SPDX-License-Identifier: Apache-2.0
//
// ChunkStore: the facade over table, budget, acquirer and transfers. It owns every
// payload and every disk slot; its users own the meaning of the bytes.
//
// Thread-safe. Callers (threads that run operations) lease; I/O threads move bytes. A
// background failure is thrown by the next caller that needs the chunk, or by
// ThrowPendingFailure, once.
#pragma once

#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "patrickstar/chunk/acquirer.h"
#include "patrickstar/chunk/chunk_stream.h"
#include "patrickstar/chunk/payload_mover.h"
#include "patrickstar/chunk/store_state.h"

namespace patrickstar {

// What the store holds and did. Bytes of payloads are whole pages.
struct StoreStats {
  StoreCounters counters;
  int64_t num_chunks = 0;
  int64_t managed_bytes = 0;   // of all payloads, if all were resident
  int64_t resident_bytes = 0;  // of payloads on the compute tier now
  int64_t peak_bytes = 0;      // the most that was reserved, OutsideBytes included
  int64_t budget_bytes = 0;
  int64_t mapped_bytes = 0;  // mapped now, freed slabs included
  int64_t peak_mapped_bytes = 0;
  int64_t disk_used_bytes = 0;  // allocated in the spill file
  int64_t disk_read_bytes = 0;
  int64_t disk_written_bytes = 0;
  int64_t num_held_leases = 0;
  int64_t held_bytes = 0;  // payloads under held leases
};

// Bytes of the budget for data that lies outside the chunks, while it lives. The store
// must outlive it.
class OutsideBytes {
 public:
  OutsideBytes(Reservation reservation, SlabPool* pool);
  OutsideBytes(OutsideBytes&& other) noexcept = default;
  OutsideBytes& operator=(OutsideBytes&& other) noexcept;
  ~OutsideBytes() { Release(); }

  int64_t num_bytes() const { return reservation_.num_bytes(); }

  // Gives the bytes back now.
  void Release();

 private:
  Reservation reservation_;
  SlabPool* pool_;
};

class ChunkStore {
 public:
  // `spill` may be null: then nothing dirty ever leaves memory.
  ChunkStore(StoreOptions options, std::unique_ptr<SpillFile> spill, Binder* binder, Clock* clock);
  ~ChunkStore();
  ChunkStore(const ChunkStore&) = delete;
  ChunkStore& operator=(const ChunkStore&) = delete;

  // A new chunk of undefined or zero content, without memory. Its place on disk is
  // reserved as soon as not everything fits in memory.
  // Throws: OutOfMemory, IoError when the disk tier cannot take what memory cannot.
  ChunkId Create(Kind kind, int64_t num_bytes, Content content);

  // The chunk and its disk slot are gone. A new chunk may get its id.
  // REQUIRES: it is not leased.
  void Destroy(ChunkId chunk);

  // The content is dead; the chunk and its disk slot stay for what comes next, which
  // reads as `content` if the bytes could go at once: then true.
  bool Discard(ChunkId chunk, Content content);

  // See Acquirer.
  void Acquire(std::span<const ChunkAccess> set, LeaseKind kind, std::string_view what) {
    acquirer_.Acquire(set, kind, what);
  }
  bool TryAcquire(std::span<const ChunkAccess> set, LeaseKind kind) {
    return acquirer_.TryAcquire(set, kind);
  }
  void Release(std::span<const ChunkAccess> set, LeaseKind kind) { acquirer_.Release(set, kind); }
  OutsideBytes Reserve(int64_t num_bytes, std::string_view what) {
    return OutsideBytes(acquirer_.Reserve(num_bytes, what), &state_.pool);
  }

  // Passes over chunks of one layout in ranges, see ChunkStream::Run.
  bool Stream(std::vector<StreamedChunk> chunks, const ChunkStream::Work& work) {
    return ChunkStream(&state_, &mover_, &acquirer_, std::move(chunks)).Run(work);
  }

  // Whether the budget, less what held leases and reservations keep, could hold the set at once.
  bool CanHold(std::span<const ChunkAccess> set) const;

  // The address of a leased chunk. REQUIRES: the caller leases it.
  std::byte* data(ChunkId chunk);

  // Bytes of payloads under held leases, and of the budget: what stats() says of them.
  int64_t held_bytes() const;
  int64_t host_bytes() const { return state_.budget.limit_bytes(); }

  // Whether a held lease keeps the chunk where it is.
  bool is_held(ChunkId chunk) const;

  // Evicts everything that nobody leases and waits until it has left. What cannot be written
  // stays. Throws: OutOfMemory, IoError when the disk tier cannot take it all.
  void EvictAll();

  // Later leases keep within the new budget; evicts down to it where possible. It never falls
  // below what one op has leased so far, or the next such op would fail.
  void set_host_bytes(int64_t num_bytes);

  // Throws a failed load that nobody has met yet, once. (A failed write-back loses nothing and is
  // thrown by the demand that cannot make room because of it.)
  void ThrowPendingFailure();

  StoreStats stats();

  // Ends all transfers and joins the I/O threads. Later fetches throw. Idempotent.
  void Shutdown();

  // fork(): the mutex is held across it, and the child is cut off from threads and file.
  void PrepareFork();
  void ResumeParent();
  void ResumeChild();

 private:
  mutable StoreState state_;  // mutable: its mutex is taken to read
  PayloadMover mover_;
  Acquirer acquirer_;
};

// An op lease for as long as it lives. `set` must outlive it.
class OpLease {
 public:
  OpLease(ChunkStore* store, std::span<const ChunkAccess> set, std::string_view what)
      : store_(*store), set_(set) {
    store_.Acquire(set_, LeaseKind::kOp, what);
  }
  ~OpLease() { store_.Release(set_, LeaseKind::kOp); }
  OpLease(const OpLease&) = delete;
  OpLease& operator=(const OpLease&) = delete;

 private:
  ChunkStore& store_;
  std::span<const ChunkAccess> set_;
};

}  // namespace patrickstar
