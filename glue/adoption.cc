// SPDX-License-Identifier: Apache-2.0
#include "glue/adoption.h"

#include <ATen/MapAllocator.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "glue/errors.h"
#include "patrickstar/base/text.h"
#include "patrickstar/layout/chunk_group.h"

namespace patrickstar {
namespace {

// Tensors over one storage, to be adopted together.
struct Candidate {
  std::vector<size_t> tensors;  // indexes into the caller's list
  const std::byte* data = nullptr;
  int64_t num_bytes = 0;
  bool is_whole_storage = false;  // else the one tensor's own bytes
};

// torch keeps the descriptor of memory that it shares; that of a mapped file is closed.
bool IsSharedBetweenProcesses(const c10::StorageImpl& storage) {
  const at::MapAllocator* const map = at::MapAllocator::fromDataPtr(storage.data_ptr());
  return map != nullptr && map->fd() != -1;
}

// Whether `num_tensors` tensors are all that use a storage. Its Python wrapper, once made,
// counts as a user for good; it is one only while somebody else refers to it.
// REQUIRES: the GIL.
bool AreAllUsers(c10::StorageImpl& storage, size_t num_tensors) {
  const c10::impl::PyObjectSlot* const wrapper = storage.pyobj_slot();
  const bool has_wrapper = wrapper->load_pyobj() != nullptr;
  if (has_wrapper && !wrapper->has_unique_reference()) return false;
  return c10::raw::intrusive_ptr::use_count(&storage) == num_tensors + (has_wrapper ? 1 : 0);
}

bool IsPlain(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.has_storage()) return false;
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  const c10::DispatchKeySet keys = impl->key_set();
  const bool is_of_another_system =
      keys.has_any(c10::python_ks) || keys.has(c10::DispatchKey::Functionalize) ||
      keys.has(c10::DispatchKey::FuncTorchBatched) || keys.has(c10::DispatchKey::Negative) ||
      keys.has(c10::DispatchKey::Conjugate) || keys.has(c10::DispatchKey::ZeroTensor);
  return tensor.device().is_cpu() && !is_of_another_system && !tensor.is_quantized() &&
         !tensor.is_inference() && tensor.numel() > 0 && ManagedStorageOf(tensor) == nullptr &&
         tensor.storage().data() != nullptr;
}

Adoption Judge(const at::Tensor& tensor) {
  if (tensor.defined() && tensor.has_storage() && ManagedStorageOf(tensor) != nullptr) {
    return Adoption::kAlready;
  }
  if (!IsPlain(tensor)) return Adoption::kLeftAlone;
  if (IsSharedBetweenProcesses(*tensor.storage().unsafeGetStorageImpl())) {
    return Adoption::kLeftAlone;
  }
  return Adoption::kDone;
}

// Judges the tensors over one storage together, and says which bytes move.
Adoption JudgeTogether(const std::vector<at::Tensor>& tensors, Candidate* candidate) {
  const at::Tensor& first = tensors[candidate->tensors.front()];
  if (!AreAllUsers(*first.storage().unsafeGetStorageImpl(), candidate->tensors.size())) {
    return Adoption::kAliased;
  }
  if (candidate->tensors.size() == 1) {
    if (!first.is_non_overlapping_and_dense()) return Adoption::kOverlapping;
    candidate->data = static_cast<const std::byte*>(first.const_data_ptr());
    candidate->num_bytes = static_cast<int64_t>(first.nbytes());
    return Adoption::kDone;
  }
  for (const size_t index : candidate->tensors) {
    if (tensors[index].dtype() != first.dtype()) return Adoption::kOverlapping;
  }
  candidate->is_whole_storage = true;
  candidate->data = static_cast<const std::byte*>(first.storage().data());
  candidate->num_bytes = static_cast<int64_t>(first.storage().nbytes());
  return Adoption::kDone;
}

void AdoptGroup(Engine* engine, const std::vector<at::Tensor>& tensors,
                const std::vector<std::string>& names, const std::vector<const Candidate*>& members,
                GroupLayout layout) {
  const at::ScalarType dtype = tensors[members.front()->tensors.front()].scalar_type();
  std::vector<NewStorage> made;
  {
    const GilReleaseIfHeld without_gil;
    const size_t group = engine->registry().AddGroup(std::move(layout));
    for (size_t index = 0; index < members.size(); ++index) {
      made.push_back(engine->registry().MakeStorage(group, index, Kind::kParam, dtype,
                                                    members[index]->num_bytes,
                                                    names[members[index]->tensors.front()]));
    }
  }
  const ChunkAccess access{.chunk = made.front().chunk, .access = Access::kWrite};
  const TorchLease lease(engine, std::span(&access, 1), "adopting parameters");
  const c10::InferenceMode ordinary_tensors(false);  // a parameter outlives the caller's mode
  std::byte* const data = engine->store().data(access.chunk);
  const at::NoGradGuard no_grad;
  for (size_t index = 0; index < members.size(); ++index) {
    const Candidate& member = *members[index];
    std::memcpy(data + made[index].byte_offset, member.data, static_cast<size_t>(member.num_bytes));
    for (const size_t tensor_index : member.tensors) {
      const at::Tensor& tensor = tensors[tensor_index];
      const int64_t offset = member.is_whole_storage ? tensor.storage_offset() : 0;
      tensor.set_data(MakeManagedTensor(made[index].storage, tensor.dtype(), tensor.sizes(),
                                        tensor.strides(), offset));
    }
  }
}

void AdoptCandidates(Engine* engine, const std::vector<at::Tensor>& tensors,
                     const std::vector<std::string>& names,
                     const std::vector<Candidate>& candidates) {
  std::map<at::ScalarType, std::vector<const Candidate*>> by_dtype;
  for (const Candidate& candidate : candidates) {
    by_dtype[tensors[candidate.tensors.front()].scalar_type()].push_back(&candidate);
  }
  const auto capacity = engine->options().chunk_bytes / static_cast<int64_t>(sizeof(float));
  for (const auto& [dtype, members] : by_dtype) {
    const auto element_size = static_cast<int64_t>(c10::elementSize(dtype));
    std::vector<int64_t> counts;
    for (const Candidate* const member : members) {
      counts.push_back((member->num_bytes + element_size - 1) / element_size);
    }
    for (GroupLayout& layout : PackTensors(counts, capacity)) {
      std::vector<const Candidate*> packed;
      for (const size_t index : layout.tensors) packed.push_back(members[index]);
      AdoptGroup(engine, tensors, names, packed, std::move(layout));
    }
  }
}

}  // namespace

std::vector<Adoption> Adopt(Engine* engine, const std::vector<at::Tensor>& tensors,
                            const std::vector<std::string>& names) {
  std::vector<Adoption> answers;
  std::map<c10::StorageImpl*, Candidate> by_storage;
  std::vector<c10::StorageImpl*> order;
  for (size_t index = 0; index < tensors.size(); ++index) {
    answers.push_back(Judge(tensors[index]));
    if (answers.back() != Adoption::kDone) continue;
    c10::StorageImpl* const storage = tensors[index].storage().unsafeGetStorageImpl();
    Candidate& candidate = by_storage[storage];
    if (candidate.tensors.empty()) order.push_back(storage);
    const bool is_known =
        std::any_of(candidate.tensors.begin(), candidate.tensors.end(),
                    [&](size_t known) { return tensors[known].is_same(tensors[index]); });
    if (!is_known) candidate.tensors.push_back(index);
  }
  std::vector<Candidate> accepted;
  for (c10::StorageImpl* const storage : order) {
    Candidate& candidate = by_storage[storage];
    const Adoption answer = JudgeTogether(tensors, &candidate);
    for (const size_t index : candidate.tensors) answers[index] = answer;
    if (answer == Adoption::kDone) accepted.push_back(std::move(candidate));
  }
  ThroughTorch([&] { AdoptCandidates(engine, tensors, names, accepted); });
  for (const Candidate& candidate : accepted) {
    if (tensors[candidate.tensors.front()].requires_grad()) {
      engine->landing_zone().Expect(candidate.num_bytes);
    }
  }
  return answers;
}

void UnmanageStorage(Engine* engine, ManagedStorage* storage, std::string_view what) {
  if (engine->store().is_held(storage->slot()->chunk)) {
    ThrowThroughTorch(Unsupported(
        StrCat("cannot ", what, " '", engine->registry().NameOf(storage),
               "': its address is in use, or that of a neighbour in its chunk, by "
               "patrickstar.resident, a NumPy array or data_ptr(); leave the `with` block, drop "
               "the array or take a step first")));
  }
  ThroughTorch([&] {
    const GilReleaseIfHeld without_gil;
    engine->registry().MakePlain(storage);
  });
}

void Unmanage(Engine* engine, const at::Tensor& tensor) {
  if (ManagedStorage* const storage = ManagedStorageOf(tensor)) {
    UnmanageStorage(engine, storage, "unmanage");
  }
  if (!has_managed_key(tensor.unsafeGetTensorImpl())) return;
  auto plain = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  plain.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                     tensor.storage_offset());
  const at::NoGradGuard no_grad;
  tensor.set_data(plain);
}

bool IsPlainDense(const at::Tensor& tensor) {
  return IsPlain(tensor) && tensor.is_non_overlapping_and_dense();
}

bool OwnsItsStorage(const at::Tensor& tensor) {
  return AreAllUsers(*tensor.storage().unsafeGetStorageImpl(), 1);
}

bool FillsItsSlot(const at::Tensor& tensor) {
  const ManagedStorage* const storage = ManagedStorageOf(tensor);
  return storage != nullptr &&
         storage->slot()->num_bytes == static_cast<int64_t>(tensor.nbytes()) &&
         tensor.is_non_overlapping_and_dense();
}

void MoveIntoGroup(Engine* engine, const at::Tensor& source, const Slot& neighbour, Kind kind,
                   const std::string& name, const std::function<void(const at::Tensor&)>& publish) {
  const auto num_bytes = static_cast<int64_t>(source.nbytes());
  const NewStorage made = ThroughTorch([&] {
    const GilReleaseIfHeld without_gil;
    return engine->registry().MakeStorage(neighbour.group, neighbour.index, kind,
                                          source.scalar_type(), num_bytes, name);
  });
  const ChunkAccess access{.chunk = made.chunk, .access = Access::kWrite};
  const TorchLease lease(engine, std::span(&access, 1), "keeping a gradient or optimizer state");
  const c10::InferenceMode ordinary_tensors(false);
  std::memcpy(engine->store().data(made.chunk) + made.byte_offset, source.const_data_ptr(),
              static_cast<size_t>(num_bytes));
  publish(MakeManagedTensor(made.storage, source.dtype(), source.sizes(), source.strides(), 0));
}

}  // namespace patrickstar
