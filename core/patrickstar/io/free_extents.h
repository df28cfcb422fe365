// SPDX-License-Identifier: Apache-2.0
//
// FreeExtents: the holes of a file. Freed ranges that touch become one, and a
// request gets the smallest hole that is large enough, the lowest of equals. It
// only counts; the file it speaks of belongs to somebody else.
// Not thread-safe: the owner's lock guards it.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>

namespace patrickstar {

class FreeExtents {
 public:
  // Takes `num_bytes` from the best hole and returns its offset, or -1 when no hole is large
  // enough.
  int64_t Take(int64_t num_bytes);

  // Adds a range. Throws: std::logic_error when a part of it is free already.
  void Add(int64_t offset, int64_t num_bytes);

  // Size of the hole that ends at `end`; 0 when there is none.
  int64_t BytesBefore(int64_t end) const;

  int64_t LargestBytes() const;
  int64_t TotalBytes() const { return total_bytes_; }

 private:
  using ByOffset = std::map<int64_t, int64_t>;

  void Insert(int64_t offset, int64_t num_bytes);
  ByOffset::iterator Erase(ByOffset::iterator hole);

  ByOffset by_offset_;                             // Offset to size.
  std::set<std::pair<int64_t, int64_t>> by_size_;  // (size, offset) of the same holes.
  int64_t total_bytes_ = 0;
};

}  // namespace patrickstar
