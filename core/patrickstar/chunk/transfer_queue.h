// SPDX-License-Identifier: Apache-2.0
//
// TransferQueue: the transfers that wait for their turn, demand loads before
// write-backs. What is still queued can be cancelled; what was taken ends by itself.
//
// Not thread-safe: every call needs the store's mutex.
#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include "patrickstar/base/types.h"
#include "patrickstar/io/spill_file.h"

namespace patrickstar {

enum class Direction : uint8_t { kLoad, kSave };

// One queued I/O between a payload and its disk slot. Whoever queues it keeps the
// payload alive and still until it is finished or cancelled.
struct Transfer {
  ChunkId chunk = kNoChunk;
  Direction direction = Direction::kLoad;
  std::byte* data = nullptr;
  int64_t num_bytes = 0;
  SpillSlot slot;
};

class TransferQueue {
 public:
  // At most max_in_flight transfers are taken and not finished.
  explicit TransferQueue(int max_in_flight) : max_in_flight_(max_in_flight) {}

  void Push(Transfer transfer);

  // Removes the transfer of `chunk` if it is still queued; false when it is not.
  bool Cancel(ChunkId chunk);

  // The transfers to start now, in order. Each must be ended by Finish.
  std::vector<Transfer> TakeRunnable();
  void Finish();

  bool is_idle() const { return num_in_flight_ == 0 && loads_.empty() && saves_.empty(); }

 private:
  int max_in_flight_;
  int num_in_flight_ = 0;
  std::deque<Transfer> loads_;
  std::deque<Transfer> saves_;
};

}  // namespace patrickstar
