// SPDX-License-Identifier: Apache-2.0
//
// PayloadMover: carries out what others decided - fill, load, evict, write back,
// discard - and what happens when an I/O ends. It decides nothing itself.
//
// Unless said otherwise a call needs the store's mutex. Ends of transfers arrive on
// I/O threads; those never wait, never lease and never touch a storage.
#pragma once

#include <mutex>
#include <span>
#include <vector>

#include "patrickstar/chunk/store_state.h"

namespace patrickstar {

class PayloadMover {
 public:
  explicit PayloadMover(StoreState* state) : state_(*state) {}

  // Gives every chunk of `missing` memory out of `reservation` and either fills it or
  // queues its load. The chunks go None -> Loading at once; releases the lock while it
  // allocates. When the system has no memory, everything is as before.
  // REQUIRES: all are None and the reservation is the sum of their payloads.
  // Throws: OutOfMemory.
  void Load(std::unique_lock<std::mutex>& lock, std::span<const ChunkId> missing,
            Reservation reservation);

  // Writes an evictable dirty payload back ahead of need: it stays, and is clean then.
  // REQUIRES: the chunk has a disk slot.
  void Clean(ChunkId chunk);

  // Takes an evictable payload off the tier: dropped when clean, else written back.
  // REQUIRES: a dirty chunk has a disk slot.
  void Evict(ChunkId chunk);

  // The bytes of a chunk being saved stay here: cancelled when still queued, else kept
  // when the write-back ends.
  void Keep(ChunkId chunk);

  // The content is dead. A leased chunk, or one in a transfer, goes when that ends:
  // then false.
  bool Discard(ChunkId chunk);

  // Frees garbage and hands runnable transfers to the disk, without the lock, which is
  // held again on return. True if there was anything to do.
  bool Flush(std::unique_lock<std::mutex>& lock);

  // Bytes that will be free without a further decision: garbage and write-backs under way.
  int64_t LeavingBytes() const;

 private:
  void Fill(ChunkId chunk, Payload payload);
  void Detach(ChunkId chunk);
  void Save(ChunkId chunk);
  void Start(const Transfer& transfer);                            // without the mutex
  void EndLoad(ChunkId chunk, const std::exception_ptr& failure);  // takes the mutex
  void EndSave(ChunkId chunk, const std::exception_ptr& failure);  // takes the mutex
  void Free(std::vector<Payload> garbage) const;                   // without the mutex
  void ThrowAway(ChunkId chunk, PayloadEvent event);

  StoreState& state_;
};

}  // namespace patrickstar
