// SPDX-License-Identifier: Apache-2.0
#include "glue/hold.h"

#include <utility>

#include "glue/managed_storage.h"

namespace patrickstar {

Hold::Hold(Engine* engine, std::vector<HeldStorage> storages, std::string_view what)
    : engine_(engine), storages_(std::move(storages)) {
  if (engine_ == nullptr) return;
  engine_->AddHold(what);  // first: slots stay then
  try {
    for (const HeldStorage& held : storages_) {
      const ManagedStorage* const storage = ManagedStorageOf(held.storage.unsafeGetStorageImpl());
      if (storage != nullptr) set_.Add(storage->slot()->chunk, held.access);
    }
    AcquireWithoutGil(engine_, set_.accesses(), LeaseKind::kHeld, what);
  } catch (...) {
    engine_->RemoveHold();
    throw;
  }
}

void Hold::Release() {
  // Taken before the GIL is released: the next caller finds nothing to do.
  Engine* const engine = std::exchange(engine_, nullptr);
  if (engine == nullptr) return;
  {
    const GilReleaseIfHeld without_gil;
    engine->store().Release(set_.accesses(), LeaseKind::kHeld);
  }
  engine->RemoveHold();
  storages_.clear();
}

}  // namespace patrickstar
