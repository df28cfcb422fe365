// SPDX-License-Identifier: Apache-2.0
#include "glue/managed_storage.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/TensorImpl.h>

#include <utility>

#include "glue/errors.h"
#include "patrickstar/base/text.h"

namespace patrickstar {
namespace {

// Marks managed storages. It allocates for those that a kernel resizes, see LeaveIfResized.
class ManagedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    if (ResizeScope::is_inside()) return c10::GetCPUAllocator()->allocate(num_bytes);
    // From Python, untyped_storage().resize_() names the tensor before it comes here.
    ThrowThroughTorch(
        Unsupported(StrCat("cannot give the storage of a managed tensor ",
                           FormatBytes(static_cast<int64_t>(num_bytes)),
                           ": only an operator may resize it; use tensor.resize_(), or resize a "
                           "tensor.detach().clone()")));
  }
  void copy_data(void*, const void*, std::size_t) const override {
    TORCH_CHECK(false, "a managed tensor cannot be copied by its allocator; clone it");
  }
};

constinit ManagedAllocator managed_allocator;

void NoDelete(void*) {}

c10::DataPtr Borrow(void* data, c10::Device device) {
  return c10::DataPtr(data, data, &NoDelete, device);
}

// Linked by next_dead; their chunks may still be leased.
thread_local Slot* departed_slots = nullptr;

}  // namespace

c10::Allocator* const kManagedAllocator = &managed_allocator;

ManagedStorage::ManagedStorage(Slot* slot, c10::Device device)
    : StorageImpl(use_byte_size_t(), slot->num_bytes, Borrow(nullptr, device), &managed_allocator,
                  /*resizable=*/true),
      slot_(slot) {}

ManagedStorage::~ManagedStorage() {
  if (slot_ != nullptr) PushDeadSlot(std::exchange(slot_, nullptr));
}

void ManagedStorage::release_resources() {
  if (slot_ != nullptr) {
    PushDeadSlot(std::exchange(slot_, nullptr));  // the pointer stays: the registry may write it
  } else {
    StorageImpl::release_resources();
  }
}

void ManagedStorage::PointAt(void* data) {
  if (has_left()) return;
  clear_data_ptr_access_error_msg_();
  set_data_ptr_noswap(Borrow(data, device()));
}

void ManagedStorage::PointAtNothing(const std::string& message) {
  if (has_left()) return;
  set_data_ptr_noswap(Borrow(nullptr, device()));
  release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

bool ManagedStorage::has_left() const { return allocator() != &managed_allocator; }

void ManagedStorage::LeaveIfResized() {
  if (slot_ == nullptr || static_cast<int64_t>(nbytes()) == slot_->num_bytes) return;
  set_allocator(c10::GetCPUAllocator());
  slot_->next_dead = departed_slots;
  departed_slots = std::exchange(slot_, nullptr);
}

void ManagedStorage::MakePlain(c10::DataPtr data) {
  slot_ = nullptr;
  clear_data_ptr_access_error_msg_();
  set_data_ptr_noswap(std::move(data));
  set_allocator(c10::GetCPUAllocator());
  set_resizable(true);
}

at::Tensor MakeManagedTensor(c10::Storage storage, caffe2::TypeMeta dtype, at::IntArrayRef sizes,
                             at::IntArrayRef strides, int64_t storage_offset) {
  // The constructor derives autograd and autocast keys from the highest backend bit, which
  // has no autocast key: the CPU's is added by hand, so that an op whose arguments are all
  // managed still autocasts.
  const c10::DispatchKeySet keys = c10::DispatchKeySet(c10::DispatchKey::CPU) |
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse2) |
                                   c10::DispatchKeySet(c10::DispatchKey::AutocastCPU);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, storage_offset);
  return tensor;
}

at::Tensor FlatView(const c10::Storage& storage, caffe2::TypeMeta dtype) {
  const auto num_elements = static_cast<int64_t>(storage.nbytes() / dtype.itemsize());
  return MakeManagedTensor(storage, dtype, {num_elements}, {1}, 0);
}

at::Tensor MakeRawTensor(void* data, const at::Tensor& like) {
  return at::from_blob(data, like.sizes(), like.strides(),
                       at::TensorOptions().dtype(like.dtype()).device(c10::kCPU));
}

void PushDeadSlot(Slot* slot) {
  slot->next_dead = dead_slots.load(std::memory_order_relaxed);
  while (!dead_slots.compare_exchange_weak(slot->next_dead, slot, std::memory_order_release,
                                           std::memory_order_relaxed)) {
  }
}

void FreeDepartedSlots() {
  while (departed_slots != nullptr) {
    Slot* const slot = departed_slots;
    departed_slots = slot->next_dead;
    PushDeadSlot(slot);
  }
}

Slot* TakeDeadSlots() { return dead_slots.exchange(nullptr, std::memory_order_acquire); }

}  // namespace patrickstar
