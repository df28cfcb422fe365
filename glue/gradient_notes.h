// SPDX-License-Identifier: Apache-2.0
//
// GradientNotes: what is known of managed gradients, and what is owed to them, without their
// bytes: the 2-norm taken while they were in cache, and factors that they are still to be
// multiplied by. So clipping by norm fetches nothing.
//
// Factors are noted only while a chunk is detached. Whoever leases one settles it first:
// multiplies by the factors in order, each product rounded to the gradient's type. A write
// drops the norm. The notes lie in the slots and die with them.
//
// Thread-safe. The mutex comes before those of registry and store; it is held while factors are
// applied, so that who comes second finds the bytes done.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "patrickstar/chunk/chunk_store.h"

namespace patrickstar {

struct Slot;
class SlotRegistry;

// torch's 2-norm of a tensor, and what its last bits depend on.
struct KnownNorm {
  at::Tensor value;
  c10::SmallVector<int64_t, 5> sizes;
  c10::SmallVector<int64_t, 5> strides;
  int num_threads = 0;

  // Takes the norm. REQUIRES: the guard does not know the tensor.
  static KnownNorm Of(const at::Tensor& tensor);

  bool IsOf(const at::Tensor& tensor) const;
};

// In a slot; guarded by GradientNotes, but for has_norm.
struct GradientNote {
  std::atomic<bool> has_norm = false;  // cleared by every write, without the mutex
  KnownNorm norm;
  at::ScalarType dtype = at::ScalarType::Undefined;  // of the factors
  std::vector<at::Tensor> factors;                   // 0-dim, in the order of the multiplications
};

class GradientNotes {
 public:
  explicit GradientNotes(const SlotRegistry* registry) : registry_(*registry) {}

  // Norms cost a pass over each gradient: nobody pays before somebody has asked for one.
  void WantNorms() { are_norms_wanted_.store(true, std::memory_order_relaxed); }
  bool are_norms_wanted() const { return are_norms_wanted_.load(std::memory_order_relaxed); }

  void NoteNorm(Slot* slot, KnownNorm norm);

  // The norm of a tensor over all of the slot, if it is known. The caller must not write it.
  std::optional<at::Tensor> FindNorm(Slot* slot, const at::Tensor& tensor);

  // Notes that all of a slot of that type is to be multiplied by a tensor of one element. False
  // when its bytes are at hand, or it is owed too much already: multiply now.
  // REQUIRES: nobody writes `factor` any more.
  bool NoteFactor(Slot* slot, at::ScalarType dtype, const at::Tensor& factor);

  // Whether any slot is owed a factor.
  bool has_factors() const { return num_owed_.load(std::memory_order_acquire) != 0; }

  // Multiplies what is owed to the chunks of `set`.
  // REQUIRES: the caller leases all of them.
  void Settle(ChunkStore* store, std::span<const ChunkAccess> set);

  // For a pass over copies of the bytes: what a slot is owed, and that it got so many.
  std::vector<at::Tensor> FactorsOf(Slot* slot);
  void DropFactors(Slot* slot, size_t num_factors);

  // The slot is about to be freed.
  void Forget(Slot* slot);

  // fork(): nobody is in the middle of applying factors.
  void PrepareFork() { mutex_.lock(); }
  void Resume() { mutex_.unlock(); }

 private:
  bool IsOwed(ChunkId chunk);
  void SettleSlot(std::byte* data, Slot* slot);
  void RemoveOwed(Slot* slot);

  const SlotRegistry& registry_;
  std::atomic<bool> are_norms_wanted_ = false;
  std::atomic<int64_t> num_owed_ = 0;  // slots
  std::mutex mutex_;
  std::unordered_map<ChunkId, std::vector<Slot*>> owed_;
};

// Multiplies elements that lie in memory one after the other, with torch's own operation.
void MultiplyMemory(void* data, int64_t num_elements, at::ScalarType dtype,
                    const std::vector<at::Tensor>& factors);

}  // namespace patrickstar
