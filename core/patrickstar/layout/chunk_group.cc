// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/layout/chunk_group.h"

#include <algorithm>

#include "patrickstar/base/check.h"

namespace patrickstar {
namespace {

void Append(GroupLayout* group, size_t tensor, int64_t num_elements) {
  group->tensors.push_back(tensor);
  group->extents.push_back({.offset = group->num_elements, .num_elements = num_elements});
  group->num_elements += AlignUp(num_elements, kElementAlignment);
}

}  // namespace

std::vector<GroupLayout> PackTensors(std::span<const int64_t> num_elements, int64_t capacity) {
  std::vector<GroupLayout> groups;
  GroupLayout open;
  for (size_t tensor = 0; tensor < num_elements.size(); ++tensor) {
    const int64_t count = num_elements[tensor];
    PS_CHECK(count > 0, "tensor ", tensor, " has ", count, " elements");
    const int64_t padded = AlignUp(count, kElementAlignment);
    if (padded > capacity) {
      Append(&groups.emplace_back(), tensor, count);
      continue;
    }
    if (open.num_elements + padded > capacity) {
      groups.push_back(std::move(open));
      open = GroupLayout{};
    }
    Append(&open, tensor, count);
  }
  if (!open.tensors.empty()) groups.push_back(std::move(open));
  return groups;
}

std::optional<Place> ChunkGroup::Take(Kind kind, int dtype, size_t index) {
  for (Member& member : members_) {
    if (member.kind != kind || member.dtype != dtype || member.is_taken[index]) continue;
    const Place place{.chunk = member.chunk, .index = index, .is_zero = member.is_zero[index]};
    member.is_taken[index] = true;
    member.is_zero[index] = false;
    ++member.num_taken;
    return place;
  }
  return std::nullopt;
}

void ChunkGroup::Add(ChunkId chunk, Kind kind, int dtype, bool is_zero) {
  const size_t num_places = layout_.extents.size();
  members_.push_back({.chunk = chunk,
                      .kind = kind,
                      .dtype = dtype,
                      .is_taken = std::vector<bool>(num_places, false),
                      .is_zero = std::vector<bool>(num_places, is_zero)});
}

bool ChunkGroup::Vacate(ChunkId chunk, size_t index) {
  Member& member = Find(chunk);
  PS_CHECK(member.is_taken[index], "place ", index, " of chunk ", chunk, " is vacant");
  member.is_taken[index] = false;
  --member.num_taken;
  return member.num_taken == 0;
}

void ChunkGroup::Reset(ChunkId chunk, bool is_zero) {
  Member& member = Find(chunk);
  PS_CHECK(member.num_taken == 0, "chunk ", chunk, " has ", member.num_taken, " tensors");
  std::fill(member.is_zero.begin(), member.is_zero.end(), is_zero);
}

bool ChunkGroup::is_vacant() const {
  return std::all_of(members_.begin(), members_.end(),
                     [](const Member& member) { return member.num_taken == 0; });
}

std::vector<ChunkId> ChunkGroup::chunks() const {
  std::vector<ChunkId> chunks;
  for (const Member& member : members_) chunks.push_back(member.chunk);
  return chunks;
}

const ChunkGroup::Member& ChunkGroup::Find(ChunkId chunk) const {
  const auto member =
      std::find_if(members_.begin(), members_.end(),
                   [chunk](const Member& candidate) { return candidate.chunk == chunk; });
  PS_CHECK(member != members_.end(), "chunk ", chunk, " is of another group");
  return *member;
}

}  // namespace patrickstar
