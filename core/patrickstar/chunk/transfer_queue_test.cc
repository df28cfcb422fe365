// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/chunk/transfer_queue.h"

#include <gtest/gtest.h>

namespace patrickstar {
namespace {

Transfer Make(ChunkId chunk, Direction direction) {
  Transfer transfer;
  transfer.chunk = chunk;
  transfer.direction = direction;
  return transfer;
}
Transfer Load(ChunkId chunk) { return Make(chunk, Direction::kLoad); }
Transfer Save(ChunkId chunk) { return Make(chunk, Direction::kSave); }

std::vector<ChunkId> Chunks(const std::vector<Transfer>& transfers) {
  std::vector<ChunkId> chunks;
  for (const Transfer& transfer : transfers) chunks.push_back(transfer.chunk);
  return chunks;
}

TEST(TransferQueue, StartsDemandLoadsBeforeWriteBacks) {
  TransferQueue queue(8);
  queue.Push(Save(1));
  queue.Push(Load(2));
  queue.Push(Load(3));
  EXPECT_EQ(Chunks(queue.TakeRunnable()), (std::vector<ChunkId>{2, 3, 1}));
}

TEST(TransferQueue, KeepsAtMostTheLimitInFlight) {
  TransferQueue queue(2);
  for (ChunkId chunk = 0; chunk < 4; ++chunk) queue.Push(Load(chunk));
  EXPECT_EQ(queue.TakeRunnable().size(), 2u);
  EXPECT_TRUE(queue.TakeRunnable().empty());
  queue.Finish();
  EXPECT_EQ(Chunks(queue.TakeRunnable()), (std::vector<ChunkId>{2}));
}

TEST(TransferQueue, CancelsOnlyWhatIsStillQueued) {
  TransferQueue queue(1);
  queue.Push(Save(1));
  queue.Push(Save(2));
  queue.TakeRunnable();
  EXPECT_FALSE(queue.Cancel(1));
  EXPECT_TRUE(queue.Cancel(2));
  EXPECT_FALSE(queue.is_idle());
  queue.Finish();
  EXPECT_TRUE(queue.is_idle());
}

}  // namespace
}  // namespace patrickstar
