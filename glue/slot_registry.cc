// SPDX-License-Identifier: Apache-2.0
#include "glue/slot_registry.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "patrickstar/base/check.h"
#include "patrickstar/base/text.h"

namespace patrickstar {
namespace {

// Names of at most this many tensors of one chunk go into a message.
constexpr size_t kMaxNamedTensors = 3;

std::string RawAccessMessage(const Slot& slot) {
  return StrCat("the data of managed tensor '", slot.name,
                "' is not resident: it was read outside an operator; use "
                "tensor.detach().clone(), or patrickstar.resident(tensor) around the access");
}

ManagedStorage* StorageOf(const Slot& slot) {
  // The weak reference keeps the object, alive or not, until the slot is freed.
  return static_cast<ManagedStorage*>(slot.storage._unsafe_get_target());
}

}  // namespace

size_t SlotRegistry::AddGroup(GroupLayout layout) {
  std::lock_guard lock(mutex_);
  if (free_groups_.empty()) {
    free_groups_.reserve(groups_.size() + 1);  // so that Vacate never allocates
    free_groups_.push_back(groups_.size());
    groups_.emplace_back();
  }
  const size_t group = free_groups_.back();
  free_groups_.pop_back();
  groups_[group].emplace(std::move(layout));
  return group;
}

NewStorage SlotRegistry::MakeStorage(size_t group, size_t index, Kind kind, at::ScalarType dtype,
                                     int64_t num_bytes, const std::string& name) {
  FreeDeadSlots();
  auto slot = std::make_unique<Slot>();
  NewStorage made;
  {
    std::lock_guard lock(mutex_);
    ChunkGroup& chunks = groups_.at(group).value();
    const int dtype_id = static_cast<int>(dtype);
    const auto element_size = static_cast<int64_t>(c10::elementSize(dtype));
    std::optional<Place> place = chunks.Take(kind, dtype_id, index);
    if (!place) {
      const bool is_zero = kind == Kind::kState;  // most optimizer state starts at zero
      const ChunkId chunk = store_->Create(kind, chunks.num_bytes(element_size),
                                           is_zero ? Content::kZero : Content::kUndefined);
      chunks.Add(chunk, kind, dtype_id, is_zero);
      place = chunks.Take(kind, dtype_id, index);
    }
    made.chunk = place->chunk;
    made.is_zero = place->is_zero;
    made.byte_offset = chunks.layout().extents[index].offset * element_size;
  }
  slot->chunk = made.chunk;
  slot->byte_offset = made.byte_offset;
  slot->num_bytes = num_bytes;
  slot->kind = kind;
  slot->group = group;
  slot->index = index;
  slot->name = name;
  auto storage = c10::make_intrusive<ManagedStorage>(slot.get(), c10::Device(c10::kCPU));
  slot->storage = c10::weak_intrusive_ptr<c10::StorageImpl>(storage);
  Bind(std::move(slot), storage.get());
  made.storage = c10::Storage(std::move(storage));
  return made;
}

void SlotRegistry::Bind(std::unique_ptr<Slot> slot, ManagedStorage* storage) {
  std::lock_guard lock(bindings_mutex_);
  Binding& binding = bindings_[slot->chunk];
  if (binding.data != nullptr) {
    storage->PointAt(binding.data + slot->byte_offset);
  } else {
    PointAtNothing(*slot, storage);
  }
  binding.slots.push_back(std::move(slot));
}

std::unique_ptr<Slot> SlotRegistry::Unbind(Slot* slot) {
  std::lock_guard lock(bindings_mutex_);
  std::vector<std::unique_ptr<Slot>>& slots = bindings_[slot->chunk].slots;
  const auto position = std::find_if(
      slots.begin(), slots.end(),
      [slot](const std::unique_ptr<Slot>& candidate) { return candidate.get() == slot; });
  PS_CHECK(position != slots.end(), "slot '", slot->name, "' is not bound");
  std::unique_ptr<Slot> unbound = std::move(*position);
  slots.erase(position);
  return unbound;
}

void SlotRegistry::FreeDeadSlots() {
  if (!has_dead_slots()) return;
  Slot* dead = TakeDeadSlots();
  try {
    while (dead != nullptr) {
      Slot* const next = dead->next_dead;
      if (store_->is_held(dead->chunk)) {  // its bytes are in use by address: another time
        PushDeadSlot(dead);
        dead = next;
        continue;
      }
      const std::unique_ptr<Slot> slot = Unbind(std::exchange(dead, next));
      Vacate(slot->group, slot->index, slot->chunk);
    }
  } catch (...) {
    while (dead != nullptr) PushDeadSlot(std::exchange(dead, dead->next_dead));
    throw;
  }
}

void SlotRegistry::Vacate(size_t group, size_t index, ChunkId chunk) {
  std::lock_guard lock(mutex_);
  ChunkGroup& chunks = groups_.at(group).value();
  if (!chunks.Vacate(chunk, index)) return;
  if (chunks.is_vacant()) {
    for (const ChunkId member : chunks.chunks()) {
      store_->Destroy(member);
      std::lock_guard bindings_lock(bindings_mutex_);
      bindings_.erase(member);
    }
    groups_.at(group).reset();
    free_groups_.push_back(group);
    return;
  }
  // What comes next in a state chunk most likely starts at zero; a gradient is written whole.
  const bool is_zero = chunks.kind(chunk) == Kind::kState;
  const Content content = is_zero ? Content::kZero : Content::kUndefined;
  if (store_->Discard(chunk, content)) chunks.Reset(chunk, is_zero);
}

void SlotRegistry::Rename(ManagedStorage* storage, const std::string& name) {
  std::lock_guard lock(bindings_mutex_);
  storage->slot()->name = name;
}

std::string SlotRegistry::NameOf(ManagedStorage* storage) {
  std::lock_guard lock(bindings_mutex_);
  const Slot* const slot = storage->slot();
  return slot == nullptr ? std::string() : slot->name;  // null: another thread has just stopped us
}

void SlotRegistry::MakePlain(ManagedStorage* storage) {
  Slot* const slot = storage->slot();
  c10::DataPtr data = c10::GetCPUAllocator()->allocate(storage->nbytes());
  std::unique_ptr<Slot> unbound;
  {
    const ChunkAccess access{.chunk = slot->chunk, .access = Access::kRead};
    const OpLease lease(store_, std::span(&access, 1), "unmanage");
    std::memcpy(data.get(), store_->data(slot->chunk) + slot->byte_offset, storage->nbytes());
    unbound = Unbind(slot);
    std::lock_guard lock(bindings_mutex_);  // others may ask for its name
    storage->MakePlain(std::move(data));
  }
  Vacate(unbound->group, unbound->index, unbound->chunk);
}

std::vector<c10::intrusive_ptr<c10::StorageImpl>> SlotRegistry::LiveStorages() {
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> storages;
  std::lock_guard lock(bindings_mutex_);
  for (const auto& [chunk, binding] : bindings_) {
    for (const std::unique_ptr<Slot>& slot : binding.slots) {
      if (auto storage = slot->storage.lock()) storages.push_back(std::move(storage));
    }
  }
  return storages;
}

void SlotRegistry::Attach(ChunkId chunk, std::byte* data) noexcept {
  std::lock_guard lock(bindings_mutex_);
  Binding& binding = bindings_[chunk];
  binding.data = data;
  for (const std::unique_ptr<Slot>& slot : binding.slots) {
    StorageOf(*slot)->PointAt(data + slot->byte_offset);
  }
}

void SlotRegistry::Detach(ChunkId chunk) noexcept {
  std::lock_guard lock(bindings_mutex_);
  Binding& binding = bindings_[chunk];
  binding.data = nullptr;
  for (const std::unique_ptr<Slot>& slot : binding.slots) {
    PointAtNothing(*slot, StorageOf(*slot));
  }
}

void SlotRegistry::PointAtNothing(const Slot& slot, ManagedStorage* storage) const {
  if (is_observed_) {
    storage->PointAt(nullptr);
  } else {
    storage->PointAtNothing(RawAccessMessage(slot));
  }
}

void SlotRegistry::SetObserved(bool is_observed) {
  std::lock_guard lock(bindings_mutex_);
  is_observed_ = is_observed;
  for (const auto& [chunk, binding] : bindings_) {
    if (binding.data != nullptr) continue;
    for (const std::unique_ptr<Slot>& slot : binding.slots) PointAtNothing(*slot, StorageOf(*slot));
  }
}

std::string SlotRegistry::Describe(ChunkId chunk) {
  std::lock_guard lock(bindings_mutex_);
  const auto binding = bindings_.find(chunk);
  if (binding == bindings_.end() || binding->second.slots.empty()) return StrCat("chunk ", chunk);
  std::string names;
  const auto& slots = binding->second.slots;
  for (size_t index = 0; index < std::min(slots.size(), kMaxNamedTensors); ++index) {
    names += StrCat(index == 0 ? "" : ", ", slots[index]->name);
  }
  if (slots.size() > kMaxNamedTensors)
    names += StrCat(" and ", slots.size() - kMaxNamedTensors, " more");
  return names;
}

}  // namespace patrickstar
