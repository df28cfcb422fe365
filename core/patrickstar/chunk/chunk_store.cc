// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/chunk/chunk_store.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "patrickstar/base/check.h"

namespace patrickstar {

OutsideBytes::OutsideBytes(Reservation reservation, SlabPool* pool)
    : reservation_(std::move(reservation)), pool_(pool) {
  pool_->AddOutside(reservation_.num_bytes());
}

OutsideBytes& OutsideBytes::operator=(OutsideBytes&& other) noexcept {
  std::swap(reservation_, other.reservation_);
  std::swap(pool_, other.pool_);
  return *this;
}

void OutsideBytes::Release() {
  if (reservation_.num_bytes() != 0) pool_->AddOutside(-reservation_.num_bytes());
  reservation_.Release();
}

ChunkStore::ChunkStore(StoreOptions options, std::unique_ptr<SpillFile> spill, Binder* binder,
                       Clock* clock)
    : state_(options, std::move(spill), binder, clock),
      mover_(&state_),
      acquirer_(&state_, &mover_) {}

ChunkStore::~ChunkStore() { Shutdown(); }

ChunkId ChunkStore::Create(Kind kind, int64_t num_bytes, Content content) {
  ChunkId chunk = kNoChunk;
  bool is_slot_needed = false;
  {
    std::lock_guard lock(state_.mutex);
    chunk = state_.table.Add(kind, num_bytes);
    state_.table[chunk].content = content;
    state_.managed_bytes += state_.table[chunk].payload_bytes;
    // Once not everything fits, any chunk may have to leave.
    is_slot_needed = state_.spill && (state_.managed_bytes > state_.budget.limit_bytes() ||
                                      state_.options.stress.evict);
  }
  if (!is_slot_needed) return chunk;
  try {
    AllocateSlots(&state_);
  } catch (...) {
    Destroy(chunk);
    throw;
  }
  return chunk;
}

void ChunkStore::Destroy(ChunkId chunk) {
  std::unique_lock lock(state_.mutex);
  ChunkRecord& record = state_.table[chunk];
  if (state_.is_forked || record.is_destroyed) return;
  PS_CHECK(!record.is_leased(), "chunk ", chunk, " is leased");
  record.is_destroyed = true;
  state_.managed_bytes -= record.payload_bytes;
  while (!mover_.Discard(chunk)) {  // a transfer still uses payload and slot
    if (!mover_.Flush(lock)) state_.changed.wait(lock);
  }
  const SpillSlot slot = std::exchange(record.slot, SpillSlot{});
  state_.table.Remove(chunk);
  mover_.Flush(lock);
  lock.unlock();
  if (slot.is_valid()) state_.spill->Free(slot);
}

bool ChunkStore::Discard(ChunkId chunk, Content content) {
  std::unique_lock lock(state_.mutex);
  if (state_.is_forked) return false;
  const bool is_gone = mover_.Discard(chunk);
  if (is_gone) state_.table[chunk].content = content;
  mover_.Flush(lock);
  return is_gone;
}

bool ChunkStore::CanHold(std::span<const ChunkAccess> set) const {
  std::lock_guard lock(state_.mutex);
  int64_t num_bytes = state_.held_bytes + state_.pool.outside_bytes();
  for (const ChunkAccess& access : set) {
    const ChunkRecord& record = state_.table[access.chunk];
    if (record.num_held_leases == 0) num_bytes += record.payload_bytes;
  }
  return num_bytes <= state_.budget.limit_bytes();
}

std::byte* ChunkStore::data(ChunkId chunk) {
  std::lock_guard lock(state_.mutex);
  const ChunkRecord& record = state_.table[chunk];
  PS_CHECK(record.is_leased(), "chunk ", chunk, " is not leased");
  return record.payload.slab.data();
}

int64_t ChunkStore::held_bytes() const {
  std::lock_guard lock(state_.mutex);
  return state_.held_bytes;
}

bool ChunkStore::is_held(ChunkId chunk) const {
  std::lock_guard lock(state_.mutex);
  return state_.table[chunk].num_held_leases != 0;
}

void ChunkStore::EvictAll() {
  std::unique_lock lock(state_.mutex);
  if (state_.is_forked || state_.is_shut_down) return;
  if (state_.spill) {
    lock.unlock();
    AllocateSlots(&state_);
    lock.lock();
  }
  for (ChunkId chunk = 0; chunk < state_.table.size(); ++chunk) {
    const ChunkRecord& record = state_.table[chunk];
    if (!record.is_evictable() || (record.is_dirty && !record.slot.is_valid())) continue;
    mover_.Evict(chunk);
  }
  mover_.Flush(lock);
  state_.changed.wait(lock, [this] { return state_.queue.is_idle() && state_.freeing_bytes == 0; });
  lock.unlock();
  state_.pool.Trim();
}

void ChunkStore::set_host_bytes(int64_t num_bytes) {
  {
    std::lock_guard lock(state_.mutex);
    num_bytes = std::max(num_bytes, state_.largest_set_bytes);
  }
  state_.budget.set_limit_bytes(num_bytes);
  acquirer_.EvictDownToBudget();
  state_.pool.set_limit_bytes(num_bytes);
}

void ChunkStore::ThrowPendingFailure() {
  std::lock_guard lock(state_.mutex);
  if (state_.is_forked) return;
  for (ChunkId chunk = 0; chunk < state_.table.size(); ++chunk) {
    if (state_.table[chunk].state != PayloadState::kFailed) continue;
    std::rethrow_exception(state_.table.TakeFailure(chunk));
  }
}

StoreStats ChunkStore::stats() {
  std::lock_guard lock(state_.mutex);
  StoreStats stats;
  stats.counters = state_.counters;
  for (ChunkId chunk = 0; chunk < state_.table.size(); ++chunk) {
    if (!state_.table[chunk].is_destroyed) ++stats.num_chunks;
    stats.num_held_leases += state_.table[chunk].num_held_leases;
  }
  stats.held_bytes = state_.held_bytes;
  stats.managed_bytes = state_.managed_bytes;
  stats.resident_bytes = state_.budget.used_bytes() - state_.pool.outside_bytes();
  stats.peak_bytes = state_.budget.peak_bytes();
  stats.budget_bytes = state_.budget.limit_bytes();
  stats.mapped_bytes = state_.pool.mapped_bytes();
  stats.peak_mapped_bytes = state_.pool.peak_mapped_bytes();
  if (state_.spill && !state_.is_forked) {
    stats.disk_used_bytes = state_.spill->allocated_bytes();
    stats.disk_read_bytes = state_.spill->bytes_read();
    stats.disk_written_bytes = state_.spill->bytes_written();
  }
  return stats;
}

void ChunkStore::Shutdown() {
  std::unique_lock lock(state_.mutex);
  if (state_.is_forked || state_.is_shut_down) return;
  state_.is_shut_down = true;
  state_.changed.notify_all();
  mover_.Flush(lock);
  state_.changed.wait(lock, [this] { return state_.queue.is_idle(); });
  mover_.Flush(lock);
  lock.unlock();
  if (state_.spill) state_.spill->Shutdown();
  state_.pool.Trim();
}

void ChunkStore::PrepareFork() {
  state_.mutex.lock();
  state_.pool.PrepareFork();
}

void ChunkStore::ResumeParent() {
  state_.pool.ResumeAfterFork();
  state_.mutex.unlock();
}

void ChunkStore::ResumeChild() {
  state_.is_forked = true;
  // The threads that waited do not exist here, and destroying the old one would wait for them.
  std::construct_at(&state_.changed);
  state_.num_waiting = 0;
  state_.pool.ResumeAfterFork();
  if (state_.spill) state_.spill->AbandonAfterFork();
  state_.mutex.unlock();
}

}  // namespace patrickstar
