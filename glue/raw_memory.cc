// SPDX-License-Identifier: Apache-2.0
#include "glue/raw_memory.h"

#include <utility>

#include "glue/access_set.h"
#include "glue/adoption.h"
#include "glue/managed_storage.h"

namespace patrickstar {
namespace {

// An op lease, if there is room.
class LeaseIfItFits {
 public:
  LeaseIfItFits(Engine* engine, std::span<const ChunkAccess> set, const std::string& what)
      : engine_(*engine), set_(set) {
    if (set_.empty()) return;
    if (!engine_.store().CanHold(set_)) {
      is_taken_ = false;
    } else if (!engine_.store().TryAcquire(set_, LeaseKind::kOp)) {
      is_taken_ = TryAcquireWithoutGil(engine, set_, LeaseKind::kOp, what);
    }
  }
  ~LeaseIfItFits() {
    if (is_taken_ && !set_.empty()) engine_.store().Release(set_, LeaseKind::kOp);
  }
  LeaseIfItFits(const LeaseIfItFits&) = delete;
  LeaseIfItFits& operator=(const LeaseIfItFits&) = delete;

  bool is_taken() const { return is_taken_; }

 private:
  Engine& engine_;
  const std::span<const ChunkAccess> set_;
  bool is_taken_ = true;
};

}  // namespace

bool RunOnRawMemory(Engine* engine, const std::vector<at::Tensor>& tensors,
                    const std::vector<bool>& is_written, const std::string& what,
                    const std::function<void(std::vector<at::Tensor>)>& pass) {
  AccessSet set;
  for (size_t index = 0; index < tensors.size(); ++index) {
    set.Add(tensors[index].unsafeGetTensorImpl(), is_written[index]);
  }
  const LeaseIfItFits lease(engine, set.accesses(), what);
  if (!lease.is_taken()) return false;
  std::vector<at::Tensor> raw;
  raw.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    ManagedStorage* const storage = ManagedStorageOf(tensor);
    if (storage == nullptr) {
      raw.push_back(tensor.detach());
      continue;
    }
    const Slot& slot = *storage->slot();
    raw.push_back(MakeRawTensor(engine->store().data(slot.chunk) + slot.byte_offset, tensor));
  }
  pass(std::move(raw));
  return true;
}

std::optional<size_t> GroupOf(const at::Tensor& tensor) {
  ManagedStorage* const storage = ManagedStorageOf(tensor);
  if (storage == nullptr || !FillsItsSlot(tensor)) return std::nullopt;
  return storage->slot()->group;
}

}  // namespace patrickstar
