// SPDX-License-Identifier: Apache-2.0
//
// LandingZone: room in the host budget for gradients that autograd has made and that are
// not in a chunk yet. A fresh gradient is as large as its parameter and exists beside the
// chunks until the post-accumulate hook has moved it, so while a backward pass runs that
// has to fetch at all, room for the largest ones is kept free.
//
// A best effort: where the budget cannot spare the bytes, ops come first. For the same
// reason the heap's free pages, which no budget knows, go back to the system now and then
// in such a pass: between buffers that live for different times they add up to a lot.
// Thread-safe.
#pragma once

#include <mutex>
#include <optional>

#include "patrickstar/chunk/chunk_store.h"

namespace patrickstar {

class LandingZone {
 public:
  explicit LandingZone(ChunkStore* store) : store_(*store) {}

  // A trainable parameter of that size is managed: its gradient must have room.
  void Expect(int64_t num_bytes);

  // Before a fetch: takes the room inside a backward pass, until that ends.
  void Prepare();

  // A gradient of that size moves into its chunk now.
  void Land(int64_t num_bytes);

  // An op needs every byte.
  void Release();

 private:
  ChunkStore& store_;
  std::mutex mutex_;  // not held while the store makes room
  int64_t largest_bytes_ = 0;
  bool is_taking_ = false;
  int64_t landed_bytes_ = 0;  // since the heap was last trimmed
  std::optional<OutsideBytes> room_;
};

}  // namespace patrickstar
