// SPDX-License-Identifier: Apache-2.0
//
// ChunkTable: the facts about every chunk, one record each, and the only place where
// a payload changes state. Residency is known here and nowhere else.
//
// Not thread-safe: every call needs the store's mutex.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include "patrickstar/base/types.h"
#include "patrickstar/chunk/payload.h"
#include "patrickstar/io/spill_file.h"

namespace patrickstar {

// What a chunk holds while its payload is None.
enum class Content : uint8_t {
  kUndefined,  // nothing was written yet, or what was written is dead
  kZero,       // every byte is zero: needs no bytes anywhere
  kOnDisk,     // the disk slot has the bytes
};

struct ChunkRecord {
  Kind kind = Kind::kParam;
  int64_t num_bytes = 0;      // of the chunk
  int64_t payload_bytes = 0;  // of its payload: num_bytes in whole pages

  PayloadState state = PayloadState::kNone;
  Payload payload;
  Content content = Content::kUndefined;
  bool is_dirty = false;  // the payload has bytes that `content` does not
  SpillSlot slot;         // place on the disk tier, kept while the chunk lives

  uint32_t num_op_leases = 0;
  uint32_t num_held_leases = 0;
  uint32_t num_claims = 0;  // acquirers that have their room and wait for I/O
  uint64_t last_use = 0;    // tick of the latest lease

  bool is_cleaning = false;    // saved ahead of need: the bytes stay until their room is needed
  bool is_streamed = false;    // a ChunkStream passes over it: wait for its end
  bool is_wanted = false;      // a caller waits for the end of a save: keep the bytes
  bool is_dead = false;        // discarded while leased, claimed or moving: goes when that ends
  bool is_destroyed = false;   // the chunk is going, or its id is free
  std::exception_ptr failure;  // of a load, in state kFailed
  uint64_t save_failure = 0;   // serial number of its latest failed write-back; 0 is none

  bool is_resident() const {
    return state == PayloadState::kReady || state == PayloadState::kAttached;
  }
  bool is_leased() const { return num_op_leases != 0 || num_held_leases != 0; }
  bool is_evictable() const {
    return (is_resident() || is_cleaning) && !is_leased() && num_claims == 0;
  }
};

class ChunkTable {
 public:
  // A new chunk; its id may be that of one that was removed.
  ChunkId Add(Kind kind, int64_t num_bytes);

  // REQUIRES: is_destroyed, in state kNone, without leases, claims or a disk slot.
  void Remove(ChunkId chunk);

  ChunkRecord& operator[](ChunkId chunk) { return *records_[chunk]; }
  const ChunkRecord& operator[](ChunkId chunk) const { return *records_[chunk]; }
  ChunkId size() const { return static_cast<ChunkId>(records_.size()); }

  // REQUIRES: the transition is legal.
  void Apply(ChunkId chunk, PayloadEvent event);

  // The failure of a load, to be thrown by the caller; the next load tries again.
  // REQUIRES: state kFailed.
  std::exception_ptr TakeFailure(ChunkId chunk);

 private:
  std::vector<std::unique_ptr<ChunkRecord>> records_;  // addresses stay
  std::vector<ChunkId> free_ids_;                      // of removed chunks
};

}  // namespace patrickstar
