// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/chunk/transfer_queue.h"

#include <algorithm>

#include "patrickstar/base/check.h"

namespace patrickstar {

void TransferQueue::Push(Transfer transfer) {
  auto& queue = transfer.direction == Direction::kLoad ? loads_ : saves_;
  queue.push_back(transfer);
}

bool TransferQueue::Cancel(ChunkId chunk) {
  const auto is_of_chunk = [chunk](const Transfer& transfer) { return transfer.chunk == chunk; };
  return std::erase_if(loads_, is_of_chunk) + std::erase_if(saves_, is_of_chunk) != 0;
}

std::vector<Transfer> TransferQueue::TakeRunnable() {
  std::vector<Transfer> runnable;
  while (num_in_flight_ < max_in_flight_ && !(loads_.empty() && saves_.empty())) {
    auto& queue = loads_.empty() ? saves_ : loads_;
    runnable.push_back(queue.front());
    queue.pop_front();
    ++num_in_flight_;
  }
  return runnable;
}

void TransferQueue::Finish() {
  PS_CHECK(num_in_flight_ > 0, "no transfer is in flight");
  --num_in_flight_;
}

}  // namespace patrickstar
