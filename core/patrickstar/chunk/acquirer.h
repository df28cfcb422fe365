// SPDX-License-Identifier: Apache-2.0
//
// Acquirer: leases all chunks of one operation at once, waiting for room and I/O where
// it must. The rules that keep hard budgets free of deadlock are here:
//
//  - room is reserved as one amount, all or nothing, in order of arrival (tickets), and
//    nothing is claimed before it;
//  - with its room reserved a caller claims its set, so that nobody evicts it, and waits
//    for I/O only;
//  - a thread that already holds op leases waits for transfers only: when its room would
//    need another thread's lease it fails at once;
//  - held leases are never waited for: they count as the operation's own set.
//
// Every wait is therefore for an I/O, or for an operation that has all it needs.
// Thread-safe.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "patrickstar/chunk/payload_mover.h"
#include "patrickstar/chunk/store_state.h"
#include "patrickstar/plan/eviction_policy.h"

namespace patrickstar {

struct ChunkAccess {
  ChunkId chunk = kNoChunk;
  Access access = Access::kRead;
};

// An op lease ends by itself and belongs to one thread; a held lease ends when its
// owner says so, on any thread.
enum class LeaseKind : uint8_t { kOp, kHeld };

class Acquirer {
 public:
  Acquirer(StoreState* state, PayloadMover* mover) : state_(*state), mover_(*mover) {}

  // Leases every chunk of `set` (no chunk twice), for the operation named `what`.
  // Throws: OutOfMemory, IoError, CorruptData, Error after fork or shutdown. Then
  // nothing is leased.
  void Acquire(std::span<const ChunkAccess> set, LeaseKind kind, std::string_view what);

  // The same when nothing must be fetched or waited for; else false, and nothing is leased.
  bool TryAcquire(std::span<const ChunkAccess> set, LeaseKind kind) {
    std::lock_guard lock(state_.mutex);
    return TryLease(set, kind);
  }

  // Ends the leases of `set`.
  void Release(std::span<const ChunkAccess> set, LeaseKind kind);

  // Evicts until the payloads fit the budget, as far as nobody leases them. Does not wait.
  void EvictDownToBudget();

  // Bytes of the compute tier for data that is not in a chunk yet.
  // Throws: OutOfMemory.
  Reservation Reserve(int64_t num_bytes, std::string_view what);

 private:
  class Waiter;
  struct Request {
    std::span<const ChunkAccess> set;
    int64_t extra_bytes = 0;  // to be reserved beside the chunks
    std::string_view what;
    uint64_t save_failures_before = 0;  // victims that failed since are not tried again
  };
  // What came of the attempt to reserve room.
  enum class Room : uint8_t {
    kReserved,
    kOnItsWay,    // transfers under way will free bytes
    kNeedsSlots,  // dirty payloads have no place on disk yet
    kLeased,      // only other threads' leases or claims are in the way
    kNone,        // nothing that could be waited for
  };

  bool TryLease(std::span<const ChunkAccess> set, LeaseKind kind);
  Reservation AcquireSlow(std::unique_lock<std::mutex>& lock, const Request& request,
                          LeaseKind kind);
  Room MakeRoom(const Request& request, int64_t num_bytes, Reservation* reservation);
  bool IsAnyStreamed(std::span<const ChunkAccess> set) const;
  std::vector<EvictionCandidate> Candidates(const Request& request, bool* is_slot_missing) const;
  void CleanAhead(const Request& request);
  bool IsLeaseInTheWay(const Request& request) const;
  bool IsTransferUnderWay() const;
  int64_t ForeignBytes() const;  // reserved, but not for payloads
  void ThrowSaveFailure(const Request& request) const;
  void WaitForLoads(std::unique_lock<std::mutex>& lock, const Request& request,
                    std::span<const ChunkId> missing, Reservation reservation);
  void KeepOwnSaves(std::span<const ChunkAccess> set);
  void ThrowLoadFailure(std::span<const ChunkAccess> set);
  void ThrowUnusable(std::string_view what) const;
  void ThrowIfTooLarge(std::unique_lock<std::mutex>& lock, const Request& request,
                       int64_t num_missing_bytes);
  [[noreturn]] void ThrowOutOfMemory(std::unique_lock<std::mutex>& lock, const Request& request,
                                     int64_t num_missing_bytes);

  StoreState& state_;
  PayloadMover& mover_;
  std::deque<uint64_t> tickets_;  // guarded by the store's mutex
  uint64_t next_ticket_ = 0;
};

// Gives every chunk that lacks one a slot on the disk tier. Takes and leaves the mutex.
// Throws: OutOfMemory, IoError when the disk tier has no room; the slots it got stay.
void AllocateSlots(StoreState* state);

}  // namespace patrickstar
