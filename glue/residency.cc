// SPDX-License-Identifier: Apache-2.0
#include "glue/residency.h"

#include <algorithm>
#include <utility>

#include "glue/managed_storage.h"

namespace patrickstar {

Hold::Hold(Engine* engine, std::vector<at::Tensor> tensors)
    : engine_(engine), tensors_(std::move(tensors)) {
  for (const at::Tensor& tensor : tensors_) {
    const ManagedStorage* const storage = ManagedStorageOf(tensor);
    if (storage == nullptr) continue;
    const ChunkId chunk = storage->slot()->chunk;
    const bool is_known = std::any_of(set_.begin(), set_.end(), [chunk](const ChunkAccess& access) {
      return access.chunk == chunk;
    });
    if (!is_known) set_.push_back({.chunk = chunk, .access = Access::kWrite});
  }
  AcquireWithoutGil(engine_, set_, LeaseKind::kHeld, "patrickstar.resident");
}

void Hold::Release() {
  engine_->store().Release(std::exchange(set_, {}), LeaseKind::kHeld);
  tensors_.clear();
}

bool IsHeld(Engine* engine, const ManagedStorage& storage) {
  return engine->store().is_held(storage.slot()->chunk);
}

}  // namespace patrickstar
