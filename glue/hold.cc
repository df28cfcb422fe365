// SPDX-License-Identifier: Apache-2.0
#include "glue/hold.h"

#include <utility>

#include "glue/managed_storage.h"

namespace patrickstar {

Hold::Hold(Engine* engine, std::vector<HeldStorage> storages, std::string_view what)
    : engine_(engine), storages_(std::move(storages)) {
  for (const HeldStorage& held : storages_) {
    const ManagedStorage* const storage = ManagedStorageOf(held.storage.unsafeGetStorageImpl());
    if (storage != nullptr) set_.Add(storage->slot()->chunk, held.access);
  }
  AcquireWithoutGil(engine_, set_.accesses(), LeaseKind::kHeld, what);
}

void Hold::Release() {
  engine_->store().Release(set_.accesses(), LeaseKind::kHeld);
  set_.clear();
  storages_.clear();
}

}  // namespace patrickstar
