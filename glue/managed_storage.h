// SPDX-License-Identifier: Apache-2.0
//
// ManagedStorage: a StorageImpl over chunk memory. Each managed tensor has one of its
// own: offset 0, exact size. Slot: its place in a chunk.
//
// A managed storage is recognised by its allocator, which no fetch changes; its data
// pointer may be read under a lease only. The registry holds a weak reference, so the
// object outlives its last user and its pointer may be written until the slot is freed.
// When the last user lets go, on any thread, the slot is pushed on a lock-free list and
// nothing else happens. A kernel that gives the storage memory of another size (a growing
// resize_, an `out=` of another shape) makes it an ordinary one: it leaves its slot.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/StorageImpl.h>

#include <atomic>
#include <string>

#include "patrickstar/base/types.h"

namespace patrickstar {

class ManagedStorage;

struct Slot {
  ChunkId chunk = kNoChunk;
  int64_t byte_offset = 0;
  int64_t num_bytes = 0;
  Kind kind = Kind::kParam;
  size_t group = 0;  // of the registry
  size_t index = 0;  // of the extent in the group
  std::string name;  // for messages; guarded by the registry
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  Slot* next_dead = nullptr;

  Slot() : storage(c10::intrusive_ptr<c10::StorageImpl>()) {}
};

class ManagedStorage final : public c10::StorageImpl {
 public:
  ManagedStorage(Slot* slot, c10::Device device);
  ~ManagedStorage() override;
  ManagedStorage(const ManagedStorage&) = delete;
  ManagedStorage& operator=(const ManagedStorage&) = delete;

  // The last user let go while the registry still knows the storage.
  void release_resources() override;

  Slot* slot() const { return slot_; }

  // Points the storage at `data`, or at nothing with `message` for who reads it raw.
  // Called by the registry only.
  void PointAt(void* data);
  void PointAtNothing(const std::string& message);

  // Makes the storage an ordinary one if a kernel has given it memory of another size. Its
  // slot is free once FreeDepartedSlots is called on this thread.
  // REQUIRES: the caller leases its chunk.
  void LeaveIfResized();

  // Turns the storage into an ordinary one that owns `data`. Called by the registry only.
  void MakePlain(c10::DataPtr data);

 private:
  // Its slot may know it a little longer than it knows its slot.
  bool has_left() const;

  Slot* slot_;
};

// While one lives on a thread, kernels there may give managed storages other memory.
// Whoever makes one calls LeaveIfResized on those that it may have been.
class ResizeScope {
 public:
  ResizeScope() { ++num_on_thread_; }
  ~ResizeScope() { --num_on_thread_; }
  ResizeScope(const ResizeScope&) = delete;
  ResizeScope& operator=(const ResizeScope&) = delete;

  static bool is_inside() { return num_on_thread_ != 0; }

 private:
  static inline thread_local int num_on_thread_ = 0;
};

// The allocator of every managed storage, and of no other.
extern c10::Allocator* const kManagedAllocator;

// Null when the storage or tensor is not managed. Never touches the data pointer.
inline ManagedStorage* ManagedStorageOf(c10::StorageImpl* storage) {
  if (storage == nullptr || storage->allocator() != kManagedAllocator) return nullptr;
  return static_cast<ManagedStorage*>(storage);
}
inline ManagedStorage* ManagedStorageOf(const c10::TensorImpl* tensor) {
  if (!tensor->has_storage()) return nullptr;
  return ManagedStorageOf(tensor->unsafe_storage().unsafeGetStorageImpl());
}
inline ManagedStorage* ManagedStorageOf(const at::Tensor& tensor) {
  return ManagedStorageOf(tensor.unsafeGetTensorImpl());
}

// True for tensors that the dispatcher sends to the guard.
inline bool has_managed_key(const c10::TensorImpl* tensor) {
  return tensor->key_set().has_backend(c10::BackendComponent::PrivateUse2Bit);
}

// A tensor over the storage that the dispatcher sends to the guard.
at::Tensor MakeManagedTensor(c10::Storage storage, caffe2::TypeMeta dtype, at::IntArrayRef sizes,
                             at::IntArrayRef strides, int64_t storage_offset);

// A one-dimensional managed tensor over all of a managed storage.
at::Tensor FlatView(const c10::Storage& storage, caffe2::TypeMeta dtype);

// A tensor over memory, which the guard does not see. For use under a lease.
at::Tensor MakeRawTensor(void* data, const at::Tensor& like);

// For slots that storages have left on this thread, when it leases nothing any more.
void FreeDepartedSlots();

// Puts a slot on the list of those whose storages died. Lock-free.
void PushDeadSlot(Slot* slot);

// Slots whose storages died, newest first, linked by next_dead; the list is empty then.
Slot* TakeDeadSlots();
inline std::atomic<Slot*> dead_slots{nullptr};
inline bool has_dead_slots() { return dead_slots.load(std::memory_order_relaxed) != nullptr; }

}  // namespace patrickstar
