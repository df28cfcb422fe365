// SPDX-License-Identifier: Apache-2.0
//
// LandingZone: room in the host budget for gradients that autograd has made and that are
// not in a chunk yet. A fresh gradient is as large as its parameter and exists beside the
// chunks until the post-accumulate hook has moved it, so while a backward pass runs that
// has to fetch at all, the bytes of the largest one are kept free.
//
// A best effort: where the budget cannot spare the bytes, ops come first. Thread-safe.
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

  // A gradient moves into its chunk now, or an op needs every byte.
  void Release();

 private:
  ChunkStore& store_;
  std::mutex mutex_;  // not held while the store makes room
  int64_t largest_bytes_ = 0;
  bool is_taking_ = false;
  std::optional<OutsideBytes> room_;
};

}  // namespace patrickstar
