// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/chunk/chunk_stream.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "patrickstar/base/error.h"

namespace patrickstar {
namespace {

// One range is read and one written while a third is worked on.
constexpr int64_t kNumWindowSets = 3;

// A pass takes at most one part in so many of the budget; others leave for it.
constexpr int64_t kWindowShare = 4;

// Of one chunk in one set: more does not make the disk faster.
constexpr int64_t kMaxWindowBytes = int64_t{8} << 20;

bool IsForWantOfRoom(const IoError& error) {
  return error.error_number() == ENOSPC || error.error_number() == EDQUOT;
}

}  // namespace

ChunkStream::ChunkStream(StoreState* state, PayloadMover* mover, Acquirer* acquirer,
                         std::vector<StreamedChunk> chunks)
    : state_(*state), mover_(*mover), acquirer_(*acquirer) {
  for (const StreamedChunk& streamed : chunks) members_.push_back({.streamed = streamed});
}

ChunkStream::~ChunkStream() {
  WaitForAll();
  std::unique_lock lock(state_.mutex);
  for (WindowSet& set : sets_) {
    for (Payload& payload : set.payloads) state_.garbage.push_back(std::move(payload));
  }
  if (is_begun_) {
    for (const Member& member : members_) {
      ChunkRecord& record = state_.table[member.streamed.chunk];
      record.is_streamed = false;
      --record.num_claims;
      if (record.is_dead) mover_.Discard(member.streamed.chunk);
    }
  }
  mover_.Flush(lock);
  state_.changed.notify_all();
  lock.unlock();
  FreeSlots();
}

bool ChunkStream::Run(const Work& work) {
  if (!state_.spill || members_.empty()) return false;
  try {
    ReserveWindows();
    if (!Begin()) return false;
    AllocateNewSlots();
  } catch (const OutOfMemory&) {
    return false;
  } catch (const IoError& error) {
    if (IsForWantOfRoom(error)) return false;
    throw;
  }
  PassOver(work);
  Commit();
  return true;
}

void ChunkStream::ReserveWindows() {
  int64_t element_bytes = 0;  // of one element in every chunk
  int64_t least_size = INT64_MAX;
  int64_t largest_size = 0;
  int64_t limit_bytes = 0;
  {
    std::lock_guard lock(state_.mutex);
    limit_bytes = state_.budget.limit_bytes();
    for (Member& member : members_) {
      member.num_bytes = state_.table[member.streamed.chunk].num_bytes;
    }
  }
  for (const Member& member : members_) {
    const int64_t size = member.streamed.element_size;
    element_bytes += size;
    least_size = std::min(least_size, size);
    largest_size = std::max(largest_size, size);
    num_elements_ = member.num_bytes / size;
  }
  // Ranges begin and end with a block in every chunk.
  const int64_t unit = SpillFile::kBlockBytes / least_size;
  const int64_t share = limit_bytes / kWindowShare / (kNumWindowSets * element_bytes);
  const int64_t most = std::min({share, kMaxWindowBytes / largest_size, num_elements_});
  range_elements_ = std::max(unit, most / unit * unit);
  const int64_t set_bytes = range_elements_ * element_bytes;
  // Where three sets are much of the budget, one does.
  const int64_t num_sets = kNumWindowSets * set_bytes <= limit_bytes / 2 ? kNumWindowSets : 1;
  Reservation reservation = acquirer_.Reserve(num_sets * set_bytes, "the windows of a step");
  sets_ = std::vector<WindowSet>(static_cast<size_t>(num_sets));
  for (WindowSet& set : sets_) {
    for (const Member& member : members_) {
      const int64_t num_bytes = range_elements_ * member.streamed.element_size;
      Payload& payload = set.payloads.emplace_back();
      payload.reservation = reservation.Split(num_bytes);
      payload.slab = state_.pool.Allocate(num_bytes, /*is_zeroed=*/false);
      set.data.push_back(payload.slab.data());
    }
  }
}

// Brings every chunk to the disk and takes it. False when somebody leases one.
bool ChunkStream::Begin() {
  AllocateSlots(&state_);
  std::unique_lock lock(state_.mutex);
  if (!EvictMembers(lock)) return false;
  for (Member& member : members_) {
    ChunkRecord& record = state_.table[member.streamed.chunk];
    record.is_streamed = true;
    ++record.num_claims;
    if (record.content == Content::kOnDisk) member.old_slot = record.slot;
  }
  is_begun_ = true;
  return true;
}

bool ChunkStream::EvictMembers(std::unique_lock<std::mutex>& lock) {
  const uint64_t save_failures_before = state_.num_save_failures;
  while (true) {
    bool is_moving = false;
    for (const Member& member : members_) {
      const ChunkId chunk = member.streamed.chunk;
      const ChunkRecord& record = state_.table[chunk];
      if (record.is_leased() || record.num_claims != 0) return false;
      if (record.state == PayloadState::kNone) continue;
      if (record.state == PayloadState::kFailed) {
        std::rethrow_exception(state_.table.TakeFailure(chunk));
      }
      if (state_.num_save_failures != save_failures_before) {
        std::rethrow_exception(state_.save_failure);
      }
      is_moving = true;
      if (record.is_evictable()) mover_.Evict(chunk);
    }
    if (!is_moving) return true;
    if (mover_.Flush(lock)) continue;
    state_.WaitForChange(lock);
  }
}

void ChunkStream::AllocateNewSlots() {
  for (Member& member : members_) {
    if (member.streamed.access == Access::kRead) continue;
    member.new_slot = state_.spill->Allocate(member.num_bytes);
    state_.spill->BeginParts(member.new_slot, member.num_bytes);
  }
}

void ChunkStream::PassOver(const Work& work) {
  const int64_t num_ranges = (num_elements_ + range_elements_ - 1) / range_elements_;
  const bool is_ahead = sets_.size() > 1;
  if (is_ahead) StartRead(0);
  for (int64_t range = 0; range < num_ranges; ++range) {
    const int64_t next = is_ahead ? range + 1 : range;
    if (next < num_ranges) {
      Wait(&SetOf(next));  // what was written from there
      StartRead(next);
    }
    WindowSet& set = SetOf(range);
    Wait(&set);
    work(FirstOf(range), CountOf(range), set.data);
    StartWrite(range);
  }
  for (WindowSet& set : sets_) Wait(&set);
}

int64_t ChunkStream::CountOf(int64_t range) const {
  return std::min(range_elements_, num_elements_ - FirstOf(range));
}

void ChunkStream::StartRead(int64_t range) {
  WindowSet& set = SetOf(range);
  for (size_t index = 0; index < members_.size(); ++index) {
    const Member& member = members_[index];
    const int64_t size = member.streamed.element_size;
    const int64_t num_bytes = CountOf(range) * size;
    if (member.old_slot.is_valid()) {
      state_.spill->ReadPart(member.old_slot, FirstOf(range) * size, set.data[index], num_bytes,
                             Pend(&set));
    } else {
      std::memset(set.data[index], 0, static_cast<size_t>(num_bytes));
    }
  }
}

void ChunkStream::StartWrite(int64_t range) {
  WindowSet& set = SetOf(range);
  for (size_t index = 0; index < members_.size(); ++index) {
    const Member& member = members_[index];
    if (!member.new_slot.is_valid()) continue;
    const int64_t size = member.streamed.element_size;
    state_.spill->WritePart(member.new_slot, FirstOf(range) * size, set.data[index],
                            CountOf(range) * size, Pend(&set));
  }
}

SpillFile::Done ChunkStream::Pend(WindowSet* set) {
  {
    std::lock_guard lock(mutex_);
    ++set->num_pending;
  }
  return [this, set](const std::exception_ptr& failure) {
    std::lock_guard lock(mutex_);
    if (failure && !set->failure) set->failure = failure;
    --set->num_pending;
    io_ended_.notify_all();
  };
}

void ChunkStream::Wait(WindowSet* set) {
  std::unique_lock lock(mutex_);
  const double start = state_.clock.NowSeconds();
  io_ended_.wait(lock, [set] { return set->num_pending == 0; });
  const double seconds = state_.clock.NowSeconds() - start;
  const std::exception_ptr failure = std::exchange(set->failure, nullptr);
  lock.unlock();
  {
    std::lock_guard store_lock(state_.mutex);
    state_.counters.stall_seconds += seconds;
  }
  if (failure) std::rethrow_exception(failure);
}

void ChunkStream::WaitForAll() noexcept {
  std::unique_lock lock(mutex_);
  io_ended_.wait(lock, [this] {
    return std::all_of(sets_.begin(), sets_.end(),
                       [](const WindowSet& set) { return set.num_pending == 0; });
  });
}

void ChunkStream::Commit() {
  for (const Member& member : members_) {
    if (member.new_slot.is_valid()) state_.spill->EndParts(member.new_slot, member.num_bytes);
  }
  std::lock_guard lock(state_.mutex);
  for (Member& member : members_) {
    if (!member.new_slot.is_valid()) continue;
    ChunkRecord& record = state_.table[member.streamed.chunk];
    std::swap(record.slot, member.new_slot);  // the old place is freed
    record.content = Content::kOnDisk;
  }
  is_committed_ = true;
}

void ChunkStream::FreeSlots() noexcept {
  for (const Member& member : members_) {
    if (!member.new_slot.is_valid()) continue;
    if (!is_committed_) state_.spill->EndParts(member.new_slot, 0);
    state_.spill->Free(member.new_slot);
  }
}

}  // namespace patrickstar
