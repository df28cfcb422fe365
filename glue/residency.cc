// SPDX-License-Identifier: Apache-2.0
#include "glue/residency.h"

#include <utility>

#include "glue/managed_storage.h"

namespace patrickstar {
namespace {

std::vector<HeldStorage> WithAccess(const std::vector<c10::Storage>& storages, Access access) {
  std::vector<HeldStorage> held;
  for (const c10::Storage& storage : storages)
    held.push_back({.storage = storage, .access = access});
  return held;
}

}  // namespace

Hold::Hold(Engine* engine, std::vector<HeldStorage> storages, std::string_view what)
    : engine_(engine), storages_(std::move(storages)) {
  for (const HeldStorage& held : storages_) {
    const ManagedStorage* const storage = ManagedStorageOf(held.storage.unsafeGetStorageImpl());
    if (storage != nullptr) Add(storage->slot()->chunk, held.access);
  }
  AcquireWithoutGil(engine_, set_, LeaseKind::kHeld, what);
}

Hold::Hold(Engine* engine, const std::vector<c10::Storage>& storages, Access access,
           std::string_view what)
    : Hold(engine, WithAccess(storages, access), what) {}

void Hold::Add(ChunkId chunk, Access access) {
  for (ChunkAccess& known : set_) {
    if (known.chunk != chunk) continue;
    if (access == Access::kWrite) known.access = access;
    return;
  }
  set_.push_back({.chunk = chunk, .access = access});
}

void Hold::Release() {
  engine_->store().Release(std::exchange(set_, {}), LeaseKind::kHeld);
  storages_.clear();
}

}  // namespace patrickstar
