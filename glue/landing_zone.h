// SPDX-License-Identifier: Apache-2.0
//
// LandingZone: room in the host budget for gradients that autograd has made and that are
// not in a chunk yet. A fresh gradient is as large as its parameter and exists beside the
// chunks until the post-accumulate hook has moved it. So once chunks have to leave memory
// at all, room for the largest gradients is kept free outside of optimizer steps.
//
// A best effort: where the budget cannot spare the bytes, ops come first. For the same
// reason the heap's free pages, which no budget knows, go back to the system now and then
// while chunks leave: between buffers that live for different times they add up.
// Thread-safe.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>

#include "patrickstar/chunk/chunk_store.h"

namespace patrickstar {

class LandingZone {
 public:
  explicit LandingZone(ChunkStore* store) : store_(*store) {}

  // A trainable parameter of that size is managed: its gradient must have room.
  void Expect(int64_t num_bytes);

  // Before a fetch.
  void Prepare();

  // A gradient moves into its chunk now: it may use the room.
  void Release();

  // An op needs every byte: there is no room from now on.
  void GiveUp();

  // Around an optimizer step, which makes no gradients.
  void BeginStep();
  void EndStep() { --num_steps_; }

 private:
  bool IsTakingDue(int64_t* num_bytes);

  ChunkStore& store_;
  std::atomic<int> num_steps_{0};
  std::mutex mutex_;  // not held while the store makes room
  int64_t largest_bytes_ = 0;
  int64_t trimmed_at_bytes_ = 0;  // evicted when the heap was last trimmed
  bool is_spilling_ = false;      // a chunk has left memory
  bool is_given_up_ = false;
  bool is_taking_ = false;
  std::optional<OutsideBytes> room_;
};

}  // namespace patrickstar
