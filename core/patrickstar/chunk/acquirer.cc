// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/chunk/acquirer.h"

#include <algorithm>
#include <utility>

#include "patrickstar/base/error.h"
#include "patrickstar/base/text.h"

namespace patrickstar {
namespace {

// Op leases that this thread holds. A thread inside an op of one store does not enter
// another store, so one count serves all.
thread_local int64_t num_thread_op_leases = 0;

// Names of at most this many chunks go into a message.
constexpr size_t kMaxNamedChunks = 3;

// At most one part in so many of the budget is written back ahead of need: what is written
// early may be changed again.
constexpr int64_t kCleanShare = 8;

bool Contains(std::span<const ChunkAccess> set, ChunkId chunk) {
  return std::any_of(set.begin(), set.end(),
                     [chunk](const ChunkAccess& access) { return access.chunk == chunk; });
}

std::string Describe(Binder* binder, const std::vector<ChunkId>& chunks) {
  std::string names;
  for (size_t index = 0; index < chunks.size() && index < kMaxNamedChunks; ++index) {
    names += StrCat(index == 0 ? "" : "; ", binder->Describe(chunks[index]));
  }
  if (chunks.size() > kMaxNamedChunks) {
    names += StrCat("; and ", chunks.size() - kMaxNamedChunks, " more chunks");
  }
  return names;
}

}  // namespace

// Counts the caller as waiting, keeps its place in the queue, and adds up its stall.
class Acquirer::Waiter {
 public:
  // A thread that holds leases must not stand behind one that may wait for them.
  explicit Waiter(Acquirer* acquirer)
      : acquirer_(*acquirer),
        is_nested_(num_thread_op_leases != 0),
        ticket_(acquirer->next_ticket_++),
        start_(acquirer->state_.clock.NowSeconds()) {
    if (!is_nested_) acquirer_.tickets_.push_back(ticket_);
  }
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

  // The mutex is held here, also when an exception passes.
  ~Waiter() {
    std::erase(acquirer_.tickets_, ticket_);
    acquirer_.state_.counters.stall_seconds += acquirer_.state_.clock.NowSeconds() - start_;
    acquirer_.state_.changed.notify_all();
  }

  bool is_nested() const { return is_nested_; }
  bool may_reserve() const { return is_nested_ || acquirer_.tickets_.front() == ticket_; }

  void Wait(std::unique_lock<std::mutex>& lock) const { acquirer_.state_.WaitForChange(lock); }

 private:
  Acquirer& acquirer_;
  const bool is_nested_;
  const uint64_t ticket_;
  const double start_;
};

void Acquirer::Acquire(std::span<const ChunkAccess> set, LeaseKind kind, std::string_view what) {
  std::unique_lock lock(state_.mutex);
  if (!TryLease(set, kind)) AcquireSlow(lock, {.set = set, .what = what}, kind);
}

Reservation Acquirer::Reserve(int64_t num_bytes, std::string_view what) {
  std::unique_lock lock(state_.mutex);
  return AcquireSlow(lock, {.set = {}, .extra_bytes = num_bytes, .what = what}, LeaseKind::kOp);
}

bool Acquirer::TryLease(std::span<const ChunkAccess> set, LeaseKind kind) {
  for (const ChunkAccess& access : set) {
    if (!state_.table[access.chunk].is_resident()) return false;
  }
  int64_t set_bytes = 0;
  for (const ChunkAccess& access : set) {
    ChunkRecord& record = state_.table[access.chunk];
    if (record.num_held_leases == 0) set_bytes += record.payload_bytes;
    if (record.state == PayloadState::kReady) {
      state_.table.Apply(access.chunk, PayloadEvent::kAttach);
      state_.binder.Attach(access.chunk, record.payload.slab.data());
    }
    if (kind == LeaseKind::kOp) {
      ++record.num_op_leases;
    } else if (++record.num_held_leases == 1) {
      state_.held_bytes += record.payload_bytes;
    }
    record.last_use = ++state_.tick;
    record.is_dead = false;
    if (access.access == Access::kWrite) record.is_dirty = true;
  }
  if (kind == LeaseKind::kOp) {
    num_thread_op_leases += static_cast<int64_t>(set.size());
    state_.counters.num_op_leases += static_cast<int64_t>(set.size());
    state_.largest_set_bytes = std::max(state_.largest_set_bytes, set_bytes + state_.held_bytes);
  }
  return true;
}

void Acquirer::Release(std::span<const ChunkAccess> set, LeaseKind kind) {
  std::unique_lock lock(state_.mutex);
  bool is_any_free = false;
  bool is_any_leaving = false;
  for (const ChunkAccess& access : set) {
    ChunkRecord& record = state_.table[access.chunk];
    if (kind == LeaseKind::kOp) {
      --record.num_op_leases;
    } else if (--record.num_held_leases == 0) {
      state_.held_bytes -= record.payload_bytes;
    }
    if (record.is_leased()) continue;
    is_any_free = true;
    if (state_.is_forked) continue;
    if (record.is_dead) {
      mover_.Discard(access.chunk);
      is_any_leaving = true;
    } else if (state_.options.stress.evict && record.is_evictable() &&
               (!record.is_dirty || record.slot.is_valid())) {
      mover_.Evict(access.chunk);
      is_any_leaving = true;
    }
  }
  if (kind == LeaseKind::kOp) num_thread_op_leases -= static_cast<int64_t>(set.size());
  if (is_any_leaving) mover_.Flush(lock);
  if (is_any_free && state_.num_waiting > 0) state_.changed.notify_all();
}

Reservation Acquirer::AcquireSlow(std::unique_lock<std::mutex>& lock, const Request& start,
                                  LeaseKind kind) {
  ThrowUnusable(start.what);
  Request request = start;
  request.save_failures_before = state_.num_save_failures;
  const Waiter waiter(this);
  while (true) {
    ThrowUnusable(request.what);
    ThrowLoadFailure(request.set);
    KeepOwnSaves(request.set);
    if (IsAnyStreamed(request.set)) {
      waiter.Wait(lock);
      continue;
    }
    if (request.extra_bytes == 0 && TryLease(request.set, kind)) return Reservation();
    std::vector<ChunkId> missing;
    int64_t num_bytes = request.extra_bytes;
    for (const ChunkAccess& access : request.set) {
      const ChunkRecord& record = state_.table[access.chunk];
      if (record.state != PayloadState::kNone) continue;
      missing.push_back(access.chunk);
      num_bytes += record.payload_bytes;
    }
    if (num_bytes != 0 && waiter.may_reserve()) {
      ThrowIfTooLarge(lock, request, num_bytes);
      Reservation reservation;
      const Room room = MakeRoom(request, num_bytes, &reservation);
      if (room == Room::kReserved && request.extra_bytes != 0) return reservation;
      if (room == Room::kReserved) {
        WaitForLoads(lock, request, missing, std::move(reservation));
        continue;
      }
      if (room == Room::kNeedsSlots) {
        lock.unlock();
        try {
          AllocateSlots(&state_);
        } catch (...) {
          lock.lock();
          throw;
        }
        lock.lock();
        continue;
      }
      if (room == Room::kNone || (room == Room::kLeased && waiter.is_nested())) {
        ThrowSaveFailure(request);
        ThrowOutOfMemory(lock, request, num_bytes);
      }
    }
    if (!mover_.Flush(lock)) waiter.Wait(lock);
  }
}

Acquirer::Room Acquirer::MakeRoom(const Request& request, int64_t num_bytes,
                                  Reservation* reservation) {
  if (auto reserved = state_.budget.TryReserve(num_bytes)) {
    *reservation = std::move(*reserved);
    return Room::kReserved;
  }
  const int64_t leaving_bytes = mover_.LeavingBytes();
  const int64_t shortage = num_bytes - state_.budget.free_bytes() - leaving_bytes;
  if (shortage <= 0) return Room::kOnItsWay;
  bool is_slot_missing = false;
  const std::vector<ChunkId> victims =
      ChooseLeastRecentlyUsed(Candidates(request, &is_slot_missing), shortage);
  int64_t victim_bytes = 0;
  for (const ChunkId victim : victims) victim_bytes += state_.table[victim].payload_bytes;
  if (victim_bytes >= shortage) {  // else nothing is evicted in vain
    for (const ChunkId victim : victims) mover_.Evict(victim);
    CleanAhead(request);
    return Room::kOnItsWay;
  }
  if (is_slot_missing) return Room::kNeedsSlots;
  if (leaving_bytes != 0 || IsTransferUnderWay()) return Room::kOnItsWay;
  return IsLeaseInTheWay(request) ? Room::kLeased : Room::kNone;
}

std::vector<EvictionCandidate> Acquirer::Candidates(const Request& request,
                                                    bool* is_slot_missing) const {
  std::vector<EvictionCandidate> candidates;
  for (ChunkId chunk = 0; chunk < state_.table.size(); ++chunk) {
    const ChunkRecord& record = state_.table[chunk];
    if (!record.is_evictable() || Contains(request.set, chunk)) continue;
    if (record.is_dirty && !state_.spill) continue;
    if (record.is_dirty && record.save_failure > request.save_failures_before) continue;
    if (record.is_dirty && !record.slot.is_valid()) {
      *is_slot_missing = true;
      continue;
    }
    candidates.push_back({.chunk = chunk,
                          .num_bytes = record.payload_bytes,
                          .is_dirty = record.is_dirty,
                          .last_use = record.last_use});
  }
  return candidates;
}

void Acquirer::CleanAhead(const Request& request) {
  if (!state_.spill || state_.options.stress.evict) return;
  const int64_t max_bytes =
      std::min(state_.options.write_behind_bytes, state_.budget.limit_bytes() / kCleanShare);
  bool is_slot_missing = false;
  for (const ChunkId chunk : ChooseToClean(Candidates(request, &is_slot_missing), max_bytes)) {
    mover_.Clean(chunk);
  }
}

void Acquirer::EvictDownToBudget() {
  std::unique_lock lock(state_.mutex);
  if (state_.is_forked) return;
  const int64_t excess = -state_.budget.free_bytes() - mover_.LeavingBytes();
  bool is_slot_missing = false;
  const Request nothing{.set = {}, .what = {}, .save_failures_before = state_.num_save_failures};
  for (const ChunkId victim :
       ChooseLeastRecentlyUsed(Candidates(nothing, &is_slot_missing), excess)) {
    mover_.Evict(victim);
  }
  mover_.Flush(lock);
  state_.changed.notify_all();  // the budget may have grown
}

bool Acquirer::IsAnyStreamed(std::span<const ChunkAccess> set) const {
  return std::any_of(set.begin(), set.end(), [this](const ChunkAccess& access) {
    return state_.table[access.chunk].is_streamed;
  });
}

bool Acquirer::IsTransferUnderWay() const {
  for (ChunkId chunk = 0; chunk < state_.table.size(); ++chunk) {
    const PayloadState state = state_.table[chunk].state;
    if (state == PayloadState::kLoading || state == PayloadState::kSaving) return true;
  }
  return false;
}

bool Acquirer::IsLeaseInTheWay(const Request& request) const {
  for (ChunkId chunk = 0; chunk < state_.table.size(); ++chunk) {
    const ChunkRecord& record = state_.table[chunk];
    if (Contains(request.set, chunk) || record.num_held_leases != 0) continue;
    if (record.num_op_leases != 0 || record.num_claims != 0) return true;
  }
  return false;
}

void Acquirer::WaitForLoads(std::unique_lock<std::mutex>& lock, const Request& request,
                            std::span<const ChunkId> missing, Reservation reservation) {
  for (const ChunkAccess& access : request.set) ++state_.table[access.chunk].num_claims;
  std::exception_ptr failure;
  try {
    mover_.Load(lock, missing, std::move(reservation));
    mover_.Flush(lock);
    const auto is_moving = [this](const ChunkAccess& access) {
      const PayloadState state = state_.table[access.chunk].state;
      return state == PayloadState::kLoading || state == PayloadState::kSaving;
    };
    while (std::any_of(request.set.begin(), request.set.end(), is_moving)) {
      state_.WaitForChange(lock);
    }
  } catch (...) {
    failure = std::current_exception();
  }
  for (const ChunkAccess& access : request.set) --state_.table[access.chunk].num_claims;
  if (failure) std::rethrow_exception(failure);
}

void Acquirer::KeepOwnSaves(std::span<const ChunkAccess> set) {
  if (state_.options.stress.evict) return;  // what is evicted shall really have left
  for (const ChunkAccess& access : set) {
    if (state_.table[access.chunk].state == PayloadState::kSaving) mover_.Keep(access.chunk);
  }
}

void Acquirer::ThrowLoadFailure(std::span<const ChunkAccess> set) {
  for (const ChunkAccess& access : set) {
    if (state_.table[access.chunk].state != PayloadState::kFailed) continue;
    std::rethrow_exception(state_.table.TakeFailure(access.chunk));
  }
}

void Acquirer::ThrowSaveFailure(const Request& request) const {
  if (state_.num_save_failures > request.save_failures_before) {
    std::rethrow_exception(state_.save_failure);
  }
}

void Acquirer::ThrowUnusable(std::string_view what) const {
  if (state_.is_forked) {
    throw Error(StrCat("cannot fetch for ", what,
                       ": this process was forked from the one that trains and has no access to "
                       "its spill file; what was resident at the fork stays readable; pass tensors "
                       "to workers as copies (tensor.detach().clone())"));
  }
  if (state_.is_shut_down) {
    throw Error(StrCat("cannot fetch for ", what,
                       ": management has been shut down; call patrickstar.init() again before the "
                       "model is built"));
  }
}

void Acquirer::ThrowIfTooLarge(std::unique_lock<std::mutex>& lock, const Request& request,
                               int64_t num_missing_bytes) {
  int64_t own_bytes = request.extra_bytes;
  for (const ChunkAccess& access : request.set) {
    own_bytes += state_.table[access.chunk].payload_bytes;
  }
  if (own_bytes > state_.budget.limit_bytes()) ThrowOutOfMemory(lock, request, num_missing_bytes);
}

int64_t Acquirer::ForeignBytes() const {
  int64_t num_bytes = state_.budget.used_bytes() - state_.freeing_bytes;
  for (const Payload& payload : state_.garbage) num_bytes -= payload.reservation.num_bytes();
  for (ChunkId chunk = 0; chunk < state_.table.size(); ++chunk) {
    const ChunkRecord& record = state_.table[chunk];
    if (record.state == PayloadState::kNone || record.state == PayloadState::kFailed) continue;
    num_bytes -= record.payload_bytes;
  }
  return std::max<int64_t>(num_bytes, 0);
}

void Acquirer::ThrowOutOfMemory(std::unique_lock<std::mutex>& lock, const Request& request,
                                int64_t num_missing_bytes) {
  int64_t own_bytes = request.extra_bytes;
  std::vector<ChunkId> own;
  for (const ChunkAccess& access : request.set) {
    own_bytes += state_.table[access.chunk].payload_bytes;
    own.push_back(access.chunk);
  }
  int64_t leased_bytes = 0;
  std::vector<ChunkId> leased;
  for (ChunkId chunk = 0; chunk < state_.table.size(); ++chunk) {
    const ChunkRecord& record = state_.table[chunk];
    // Operations of other threads end by themselves, but a nested caller cannot wait for that.
    const bool is_in_the_way =
        record.num_held_leases != 0 || (record.num_op_leases != 0 && num_thread_op_leases != 0);
    if (!is_in_the_way || Contains(request.set, chunk)) continue;
    leased_bytes += record.payload_bytes;
    leased.push_back(chunk);
  }
  const int64_t limit = state_.budget.limit_bytes();
  const int64_t free = state_.budget.free_bytes();
  const bool is_spill_possible = state_.spill != nullptr;
  const int64_t everything_bytes = state_.managed_bytes + request.extra_bytes;
  const int64_t foreign_bytes = ForeignBytes();
  lock.unlock();
  const std::string own_names = own.empty() ? "" : StrCat(" (", Describe(&state_.binder, own), ")");
  std::string message =
      StrCat("cannot bring ", FormatBytes(num_missing_bytes), " to host memory for ", request.what,
             own_names, ": the operation needs ", FormatBytes(own_bytes), " at once and ",
             FormatBytes(free), " of the ", FormatBytes(limit), " budget are free");
  if (!leased.empty()) {
    message += StrCat(", ", leased.size(), " other chunks are leased (",
                      Describe(&state_.binder, leased), ")");
  }
  if (foreign_bytes != 0) {
    message += StrCat(", ", FormatBytes(foreign_bytes), " are reserved for data not in chunks yet");
  }
  const int64_t at_once_bytes = own_bytes + leased_bytes;
  const int64_t needed =
      foreign_bytes +
      (is_spill_possible ? at_once_bytes : std::max(everything_bytes, at_once_bytes));
  message +=
      StrCat("; raise host_memory to at least ", needed, " bytes (", FormatBytes(needed), ")");
  if (!is_spill_possible) message += " or let it spill (spill_dir, disk_space)";
  lock.lock();
  throw OutOfMemory(message);
}

void AllocateSlots(StoreState* state) {
  std::vector<std::pair<ChunkId, int64_t>> without;
  {
    std::lock_guard lock(state->mutex);
    for (ChunkId chunk = 0; chunk < state->table.size(); ++chunk) {
      const ChunkRecord& record = state->table[chunk];
      if (!record.slot.is_valid() && !record.is_destroyed) {
        without.emplace_back(chunk, record.num_bytes);
      }
    }
  }
  for (const auto& [chunk, num_bytes] : without) {
    SpillSlot slot = state->spill->Allocate(num_bytes);
    {
      std::lock_guard lock(state->mutex);
      ChunkRecord& record = state->table[chunk];
      // Another chunk may have its id by now.
      const bool is_same_size = record.num_bytes == num_bytes;
      if (!record.slot.is_valid() && !record.is_destroyed && is_same_size) {
        std::swap(record.slot, slot);
      }
    }
    if (slot.is_valid()) state->spill->Free(slot);  // another thread was faster
  }
}

}  // namespace patrickstar
