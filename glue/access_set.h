// SPDX-License-Identifier: Apache-2.0
//
// AccessSet: the chunks that one op or hold leases, each once, with the strongest access.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <span>

#include "glue/managed_storage.h"
#include "glue/sparse_parts.h"
#include "patrickstar/chunk/chunk_store.h"

namespace patrickstar {

// For tests of the tests, see SkipReadLeases.
inline std::atomic<bool> are_read_leases_skipped{false};

class AccessSet {
 public:
  // The chunk of a managed tensor, or those of a sparse one's parts; nothing for any other.
  void Add(const c10::TensorImpl* tensor, bool is_written) {
    if (!has_managed_key(tensor)) return;
    if (!tensor->has_storage()) return AddParts(tensor, is_written);
    ManagedStorage* const storage = ManagedStorageOf(tensor);
    if (storage == nullptr) return;
    if (!is_written && are_read_leases_skipped.load(std::memory_order_relaxed)) return;
    Add(storage->slot()->chunk, is_written ? Access::kWrite : Access::kRead);
  }

  void Add(ChunkId chunk, Access access) {
    for (ChunkAccess& known : accesses_) {
      if (known.chunk != chunk) continue;
      if (access == Access::kWrite) known.access = access;
      return;
    }
    accesses_.push_back({.chunk = chunk, .access = access});
  }

  std::span<const ChunkAccess> accesses() const { return {accesses_.data(), accesses_.size()}; }
  bool empty() const { return accesses_.empty(); }
  void clear() { accesses_.clear(); }

 private:
  void AddParts(const c10::TensorImpl* tensor, bool is_written) {
    for (const c10::TensorImpl* const part : SparsePartsOf(tensor)) Add(part, is_written);
  }

  c10::SmallVector<ChunkAccess, 8> accesses_;
};

}  // namespace patrickstar
