// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/chunk/chunk_table.h"

#include "patrickstar/base/check.h"

namespace patrickstar {

ChunkId ChunkTable::Add(Kind kind, int64_t num_bytes) {
  PS_CHECK(num_bytes > 0, "a chunk of ", num_bytes, " bytes");
  ChunkRecord& record = *records_.emplace_back(std::make_unique<ChunkRecord>());
  record.kind = kind;
  record.num_bytes = num_bytes;
  record.payload_bytes = AlignUp(num_bytes, kPageAlignment);
  return size() - 1;
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

}  // namespace patrickstar
