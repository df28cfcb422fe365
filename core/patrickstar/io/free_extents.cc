// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/io/free_extents.h"

#include <iterator>

#include "patrickstar/base/check.h"

namespace patrickstar {

int64_t FreeExtents::Take(int64_t num_bytes) {
  const auto best = by_size_.lower_bound({num_bytes, 0});
  if (best == by_size_.end()) return -1;
  const auto [hole_bytes, offset] = *best;
  Erase(by_offset_.find(offset));
  if (hole_bytes > num_bytes) Insert(offset + num_bytes, hole_bytes - num_bytes);
  return offset;
}

void FreeExtents::Add(int64_t offset, int64_t num_bytes) {
  auto next = by_offset_.lower_bound(offset);
  PS_CHECK(next == by_offset_.end() || next->first >= offset + num_bytes, "offset ", offset,
           " is freed twice");
  if (next != by_offset_.end() && next->first == offset + num_bytes) {
    num_bytes += next->second;
    next = Erase(next);
  }
  if (next != by_offset_.begin()) {
    const auto previous = std::prev(next);
    const int64_t previous_end = previous->first + previous->second;
    PS_CHECK(previous_end <= offset, "offset ", offset, " is freed twice");
    if (previous_end == offset) {
      offset = previous->first;
      num_bytes += previous->second;
      Erase(previous);
    }
  }
  Insert(offset, num_bytes);
}

int64_t FreeExtents::BytesBefore(int64_t end) const {
  const auto next = by_offset_.lower_bound(end);
  if (next == by_offset_.begin()) return 0;
  const auto last = std::prev(next);
  return last->first + last->second == end ? last->second : 0;
}

int64_t FreeExtents::LargestBytes() const {
  return by_size_.empty() ? 0 : by_size_.rbegin()->first;
}

void FreeExtents::Insert(int64_t offset, int64_t num_bytes) {
  by_offset_.emplace(offset, num_bytes);
  by_size_.emplace(num_bytes, offset);
  total_bytes_ += num_bytes;
}

FreeExtents::ByOffset::iterator FreeExtents::Erase(ByOffset::iterator hole) {
  by_size_.erase({hole->second, hole->first});
  total_bytes_ -= hole->second;
  return by_offset_.erase(hole);
}

}  // namespace patrickstar
