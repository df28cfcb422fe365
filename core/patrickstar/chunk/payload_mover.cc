// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/chunk/payload_mover.h"

#include <cstring>
#include <utility>

namespace patrickstar {
namespace {

// Not a plausible weight, a NaN in no format, and far from zero in all: a stale read shows.
constexpr int kPoisonByte = 0x7f;

void Poison(const HostSlab& slab) {
  if (slab.data() == nullptr) return;
  std::memset(slab.data(), kPoisonByte, static_cast<size_t>(slab.num_bytes()));
}

int64_t ReservedBytes(const std::vector<Payload>& payloads) {
  int64_t num_bytes = 0;
  for (const Payload& payload : payloads) num_bytes += payload.reservation.num_bytes();
  return num_bytes;
}

}  // namespace

void PayloadMover::Load(std::unique_lock<std::mutex>& lock, std::span<const ChunkId> missing,
                        Reservation reservation) {
  // Copied, because the table may grow while the mutex is released.
  std::vector<int64_t> num_bytes;
  std::vector<bool> is_zero;
  for (const ChunkId chunk : missing) {
    state_.table.Apply(chunk, PayloadEvent::kReserve);
    num_bytes.push_back(state_.table[chunk].payload_bytes);
    is_zero.push_back(state_.table[chunk].content == Content::kZero);
  }
  std::vector<Payload> payloads(missing.size());
  lock.unlock();
  std::exception_ptr failure;
  try {
    for (size_t index = 0; index < missing.size(); ++index) {
      payloads[index].slab = state_.pool.Allocate(num_bytes[index], is_zero[index]);
      payloads[index].reservation = reservation.Split(num_bytes[index]);
      if (state_.options.stress.poison && !is_zero[index]) Poison(payloads[index].slab);
    }
  } catch (...) {
    failure = std::current_exception();
  }
  lock.lock();
  for (size_t index = 0; index < missing.size(); ++index) {
    if (failure) {
      state_.table.Apply(missing[index], PayloadEvent::kCancel);
      state_.garbage.push_back(std::move(payloads[index]));
    } else {
      Fill(missing[index], std::move(payloads[index]));
    }
  }
  if (failure) std::rethrow_exception(failure);
}

void PayloadMover::Fill(ChunkId chunk, Payload payload) {
  ChunkRecord& record = state_.table[chunk];
  record.payload = std::move(payload);
  record.is_dirty = false;
  ++state_.counters.num_fetches;
  state_.counters.fetched_bytes += record.payload_bytes;
  if (record.content == Content::kOnDisk) {
    state_.queue.Push({.chunk = chunk,
                       .direction = Direction::kLoad,
                       .data = record.payload.slab.data(),
                       .num_bytes = record.num_bytes,
                       .slot = record.slot});
  } else {
    state_.table.Apply(chunk, PayloadEvent::kLoaded);
    state_.changed.notify_all();
  }
}

void PayloadMover::Clean(ChunkId chunk) {
  if (std::exchange(state_.table[chunk].is_cleaning, true)) return;
  Save(chunk);
}

void PayloadMover::Evict(ChunkId chunk) {
  ChunkRecord& record = state_.table[chunk];
  ++state_.counters.num_evictions;
  state_.counters.evicted_bytes += record.payload_bytes;
  if (std::exchange(record.is_cleaning, false)) return;  // leaves when its write-back ends
  if (record.is_dirty) return Save(chunk);
  Detach(chunk);
  ThrowAway(chunk, PayloadEvent::kDrop);
}

void PayloadMover::Detach(ChunkId chunk) {
  if (state_.table[chunk].state != PayloadState::kAttached) return;
  state_.table.Apply(chunk, PayloadEvent::kDetach);
  state_.binder.Detach(chunk);
}

void PayloadMover::Save(ChunkId chunk) {
  const ChunkRecord& record = state_.table[chunk];
  Detach(chunk);
  state_.table.Apply(chunk, PayloadEvent::kSave);
  state_.queue.Push({.chunk = chunk,
                     .direction = Direction::kSave,
                     .data = record.payload.slab.data(),
                     .num_bytes = record.num_bytes,
                     .slot = record.slot});
}

void PayloadMover::Keep(ChunkId chunk) {
  state_.table[chunk].is_cleaning = false;
  if (state_.queue.Cancel(chunk)) {
    state_.table.Apply(chunk, PayloadEvent::kKeep);
  } else {
    state_.table[chunk].is_wanted = true;
  }
}

bool PayloadMover::Discard(ChunkId chunk) {
  ChunkRecord& record = state_.table[chunk];
  record.is_cleaning = false;
  if (record.state == PayloadState::kSaving && state_.queue.Cancel(chunk)) {
    state_.table.Apply(chunk, PayloadEvent::kKeep);
  }
  if (record.state == PayloadState::kLoading || record.state == PayloadState::kSaving ||
      record.is_leased() || record.num_claims != 0) {
    record.is_dead = true;
    return false;
  }
  record.is_dead = false;
  record.is_dirty = false;
  record.content = Content::kUndefined;
  if (record.state == PayloadState::kFailed) state_.table.TakeFailure(chunk);
  if (record.state == PayloadState::kNone) return true;
  Detach(chunk);
  ThrowAway(chunk, PayloadEvent::kDiscard);
  return true;
}

void PayloadMover::ThrowAway(ChunkId chunk, PayloadEvent event) {
  state_.table.Apply(chunk, event);
  state_.garbage.push_back(std::exchange(state_.table[chunk].payload, Payload{}));
}

bool PayloadMover::Flush(std::unique_lock<std::mutex>& lock) {
  bool is_anything_done = false;
  while (true) {
    std::vector<Payload> garbage = std::exchange(state_.garbage, {});
    const std::vector<Transfer> runnable = state_.queue.TakeRunnable();
    if (garbage.empty() && runnable.empty()) return is_anything_done;
    is_anything_done = true;
    const int64_t garbage_bytes = ReservedBytes(garbage);
    state_.freeing_bytes += garbage_bytes;
    lock.unlock();
    Free(std::move(garbage));
    for (const Transfer& transfer : runnable) Start(transfer);
    lock.lock();
    state_.freeing_bytes -= garbage_bytes;
    state_.changed.notify_all();
  }
}

int64_t PayloadMover::LeavingBytes() const {
  int64_t num_bytes = state_.freeing_bytes + ReservedBytes(state_.garbage);
  for (ChunkId chunk = 0; chunk < state_.table.size(); ++chunk) {
    const ChunkRecord& record = state_.table[chunk];
    const bool is_staying = record.is_wanted || record.is_cleaning || record.num_claims != 0;
    if (record.state == PayloadState::kSaving && !is_staying) num_bytes += record.payload_bytes;
  }
  return num_bytes;
}

void PayloadMover::Free(std::vector<Payload> garbage) const {
  for (Payload& payload : garbage) {
    if (state_.options.stress.poison) Poison(payload.slab);
    state_.pool.Free(std::move(payload.slab));
    payload.reservation.Release();  // after the slab: reserved bytes cover mapped ones
  }
}

void PayloadMover::Start(const Transfer& transfer) {
  const ChunkId chunk = transfer.chunk;
  if (transfer.direction == Direction::kLoad) {
    state_.spill->Read(
        transfer.slot, transfer.data, transfer.num_bytes,
        [this, chunk](const std::exception_ptr& failure) { EndLoad(chunk, failure); });
  } else {
    state_.spill->Write(
        transfer.slot, transfer.data, transfer.num_bytes,
        [this, chunk](const std::exception_ptr& failure) { EndSave(chunk, failure); });
  }
}

void PayloadMover::EndLoad(ChunkId chunk, const std::exception_ptr& failure) {
  std::unique_lock lock(state_.mutex);
  state_.queue.Finish();
  ChunkRecord& record = state_.table[chunk];
  if (failure) {
    record.failure = failure;
    state_.table.Apply(chunk, PayloadEvent::kLoadFailed);
    state_.garbage.push_back(std::exchange(record.payload, Payload{}));
  } else {
    state_.table.Apply(chunk, PayloadEvent::kLoaded);
  }
  Flush(lock);
  state_.changed.notify_all();
}

void PayloadMover::EndSave(ChunkId chunk, const std::exception_ptr& failure) {
  std::unique_lock lock(state_.mutex);
  state_.queue.Finish();
  ChunkRecord& record = state_.table[chunk];
  const bool was_cleaning = std::exchange(record.is_cleaning, false);
  const bool was_wanted = std::exchange(record.is_wanted, false);
  const bool is_staying = was_cleaning || was_wanted || record.num_claims != 0;
  if (failure) {
    record.save_failure = ++state_.num_save_failures;
    state_.save_failure = failure;
    state_.table.Apply(chunk, PayloadEvent::kKeep);
  } else {
    record.is_dirty = false;
    record.content = Content::kOnDisk;
    if (is_staying || record.is_dead) {
      state_.table.Apply(chunk, PayloadEvent::kKeep);
    } else {
      ThrowAway(chunk, PayloadEvent::kSaved);
    }
  }
  if (record.is_dead && record.num_claims == 0) Discard(chunk);
  Flush(lock);
  state_.changed.notify_all();
}

}  // namespace patrickstar
