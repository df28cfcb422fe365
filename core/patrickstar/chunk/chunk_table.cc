// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/chunk/chunk_table.h"

#include <utility>

#include "patrickstar/base/check.h"

namespace patrickstar {

ChunkId ChunkTable::Add(Kind kind, int64_t num_bytes) {
  PS_CHECK(num_bytes > 0, "a chunk of ", num_bytes, " bytes");
  if (free_ids_.empty()) {
    records_.push_back(std::make_unique<ChunkRecord>());
    free_ids_.reserve(records_.capacity());  // so that Remove never allocates
    free_ids_.push_back(size() - 1);
  }
  const ChunkId chunk = free_ids_.back();
  free_ids_.pop_back();
  ChunkRecord& record = *records_[chunk];
  record = ChunkRecord{};
  record.kind = kind;
  record.num_bytes = num_bytes;
  record.payload_bytes = AlignUp(num_bytes, kPageAlignment);
  return chunk;
}

void ChunkTable::Remove(ChunkId chunk) {
  const ChunkRecord& record = *records_[chunk];
  PS_CHECK(record.is_destroyed && record.state == PayloadState::kNone && !record.is_leased() &&
               record.num_claims == 0 && !record.slot.is_valid(),
           "chunk ", chunk, " is still in use");
  free_ids_.push_back(chunk);
}

void ChunkTable::Apply(ChunkId chunk, PayloadEvent event) {
  ChunkRecord& record = *records_[chunk];
  const std::optional<PayloadState> next = NextState(record.state, event);
  PS_CHECK(next.has_value(), "chunk ", chunk, " in state ", PayloadStateName(record.state),
           " got event ", PayloadEventName(event));
  PS_CHECK(event != PayloadEvent::kDetach || !record.is_leased(), "chunk ", chunk, " is leased");
  PS_CHECK(event != PayloadEvent::kDrop || !record.is_dirty, "chunk ", chunk, " is dirty");
  record.state = *next;
}

std::exception_ptr ChunkTable::TakeFailure(ChunkId chunk) {
  Apply(chunk, PayloadEvent::kReport);
  return std::exchange((*this)[chunk].failure, nullptr);
}

}  // namespace patrickstar
