// SPDX-License-Identifier: Apache-2.0
#include "glue/gradient_notes.h"

#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/linalg_vector_norm_cpu_dispatch.h>
#include <ATen/ops/mul_cpu_dispatch.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "glue/managed_storage.h"
#include "glue/slot_registry.h"

namespace patrickstar {
namespace {

// A gradient that nobody reads is not owed more than this.
constexpr size_t kMaxFactors = 16;

double ValueOf(const at::Tensor& tensor) { return tensor.item().toDouble(); }

}  // namespace

KnownNorm KnownNorm::Of(const at::Tensor& tensor) {
  KnownNorm norm;
  norm.value = at::cpu::linalg_vector_norm(tensor, 2);
  norm.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  norm.strides.assign(tensor.strides().begin(), tensor.strides().end());
  norm.num_threads = at::get_num_threads();
  return norm;
}

bool KnownNorm::IsOf(const at::Tensor& tensor) const {
  return tensor.sizes() == at::IntArrayRef(sizes) && tensor.strides() == at::IntArrayRef(strides) &&
         tensor.scalar_type() == value.scalar_type() && at::get_num_threads() == num_threads;
}

void GradientNotes::NoteNorm(Slot* slot, KnownNorm norm) {
  std::lock_guard lock(mutex_);
  slot->note.norm = std::move(norm);
  slot->note.has_norm.store(true, std::memory_order_relaxed);
}

std::optional<at::Tensor> GradientNotes::FindNorm(Slot* slot, const at::Tensor& tensor) {
  std::lock_guard lock(mutex_);
  const GradientNote& note = slot->note;
  if (!note.has_norm.load(std::memory_order_relaxed) || !note.norm.IsOf(tensor)) {
    return std::nullopt;
  }
  return note.norm.value;
}

bool GradientNotes::NoteFactor(Slot* slot, at::ScalarType dtype, const at::Tensor& factor) {
  const double value = ValueOf(factor);
  std::lock_guard lock(mutex_);
  GradientNote& note = slot->note;
  if (note.factors.size() >= kMaxFactors || registry_.is_attached(slot->chunk)) return false;
  // 1 changes no number. Of what is not a number it may change the bits.
  const bool is_known = note.has_norm.load(std::memory_order_relaxed);
  if (value == 1.0 && is_known && !std::isnan(ValueOf(note.norm.value))) return true;
  if (note.factors.empty()) {
    owed_[slot->chunk].push_back(slot);
    num_owed_.fetch_add(1, std::memory_order_release);
  }
  note.has_norm.store(false, std::memory_order_relaxed);
  note.dtype = dtype;
  note.factors.push_back(factor);
  return true;
}

void GradientNotes::Settle(ChunkStore* store, std::span<const ChunkAccess> set) {
  if (!has_factors()) return;
  for (const ChunkAccess& access : set) {
    if (!IsOwed(access.chunk)) continue;
    const ChunkAccess written{.chunk = access.chunk, .access = Access::kWrite};
    const OpLease lease(store, std::span(&written, 1), "multiplying gradients");  // never waits
    std::lock_guard lock(mutex_);
    const auto owed = owed_.find(access.chunk);
    if (owed == owed_.end()) continue;  // another thread was faster
    const std::vector<Slot*> slots = owed->second;
    for (Slot* const slot : slots) SettleSlot(store->data(access.chunk), slot);
  }
}

bool GradientNotes::IsOwed(ChunkId chunk) {
  std::lock_guard lock(mutex_);
  return owed_.contains(chunk);
}

void GradientNotes::SettleSlot(std::byte* data, Slot* slot) {
  const auto element_size = static_cast<int64_t>(c10::elementSize(slot->note.dtype));
  MultiplyMemory(data + slot->byte_offset, slot->num_bytes / element_size, slot->note.dtype,
                 slot->note.factors);
  slot->note.factors.clear();
  RemoveOwed(slot);
}

std::vector<at::Tensor> GradientNotes::FactorsOf(Slot* slot) {
  if (!has_factors()) return {};
  std::lock_guard lock(mutex_);
  return slot->note.factors;
}

void GradientNotes::DropFactors(Slot* slot, size_t num_factors) {
  std::lock_guard lock(mutex_);
  std::vector<at::Tensor>& factors = slot->note.factors;
  if (factors.empty()) return;
  const auto end =
      factors.begin() + static_cast<std::ptrdiff_t>(std::min(num_factors, factors.size()));
  factors.erase(factors.begin(), end);
  if (factors.empty()) RemoveOwed(slot);
}

void GradientNotes::Forget(Slot* slot) {
  if (!has_factors()) return;
  std::lock_guard lock(mutex_);
  if (slot->note.factors.empty()) return;
  slot->note.factors.clear();
  RemoveOwed(slot);
}

void GradientNotes::RemoveOwed(Slot* slot) {
  const auto owed = owed_.find(slot->chunk);
  std::erase(owed->second, slot);
  if (owed->second.empty()) owed_.erase(owed);
  num_owed_.fetch_sub(1, std::memory_order_release);
}

void MultiplyMemory(void* data, int64_t num_elements, at::ScalarType dtype,
                    const std::vector<at::Tensor>& factors) {
  // Straight to the kernel: no mode, hook or gradient of the caller's has a part in it.
  at::Tensor memory =
      at::from_blob(data, {num_elements}, at::TensorOptions().dtype(dtype).device(c10::kCPU));
  for (const at::Tensor& factor : factors) at::cpu::mul_(memory, factor);
}

}  // namespace patrickstar
