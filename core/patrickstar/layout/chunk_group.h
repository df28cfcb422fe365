// SPDX-License-Identifier: Apache-2.0
//
// PackTensors: which tensors share a chunk. ChunkGroup: the chunks that share one
// layout (parameter, gradient, each optimizer state of the same tensors) and which of
// their places are taken.
//
// Offsets are in elements, so that one layout serves every element size. Nothing here
// owns memory or knows what a tensor is. Not thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "patrickstar/base/types.h"

namespace patrickstar {

// Consecutive elements of a chunk group: one tensor's place.
struct Extent {
  int64_t offset = 0;
  int64_t num_elements = 0;
};

struct GroupLayout {
  std::vector<size_t> tensors;  // indexes into the list that was packed
  std::vector<Extent> extents;  // one each
  int64_t num_elements = 0;     // of the group, padding included
};

// Every offset is a multiple of this: kTensorAlignment bytes at every element size from
// 2 bytes up to 8, so that a bf16 copy of a layout is as well aligned as its fp32 one.
inline constexpr int64_t kElementAlignment = kTensorAlignment / 2;

// Packs tensors in order into groups of at most `capacity` elements. A tensor larger
// than that has a group of its own, and the group before it stays open.
// REQUIRES: every count is positive.
std::vector<GroupLayout> PackTensors(std::span<const int64_t> num_elements, int64_t capacity);

// A place in one chunk of a group.
struct Place {
  ChunkId chunk = kNoChunk;
  size_t index = 0;      // of the extent
  bool is_zero = false;  // known to hold only zeros
};

class ChunkGroup {
 public:
  explicit ChunkGroup(GroupLayout layout) : layout_(std::move(layout)) {}

  const GroupLayout& layout() const { return layout_; }

  // Bytes of a chunk of this group.
  int64_t num_bytes(int64_t element_size) const { return layout_.num_elements * element_size; }

  // A chunk of that kind and dtype whose place `index` is vacant; the place is taken.
  std::optional<Place> Take(Kind kind, int dtype, size_t index);

  // Adds a chunk with every place vacant, all zeros if is_zero.
  void Add(ChunkId chunk, Kind kind, int dtype, bool is_zero);

  // The place is vacant again and what it held is dead. True if the whole chunk is vacant.
  bool Vacate(ChunkId chunk, size_t index);

  // A vacant chunk was emptied: it reads as zeros (or as nothing) from now on.
  void Reset(ChunkId chunk, bool is_zero);

  Kind kind(ChunkId chunk) const { return Find(chunk).kind; }
  bool is_vacant() const;
  std::vector<ChunkId> chunks() const;

 private:
  struct Member {
    ChunkId chunk;
    Kind kind;
    int dtype;
    std::vector<bool> is_taken;
    std::vector<bool> is_zero;  // never taken since the chunk was all zeros
    size_t num_taken = 0;
  };

  const Member& Find(ChunkId chunk) const;
  Member& Find(ChunkId chunk) { return const_cast<Member&>(std::as_const(*this).Find(chunk)); }

  GroupLayout layout_;
  std::vector<Member> members_;
};

}  // namespace patrickstar
