// SPDX-License-Identifier: Apache-2.0
#include "glue/sparse_parts.h"

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/ops/clone.h>

#include "glue/managed_storage.h"

namespace patrickstar {
namespace {

// torch gives a tensor its keys when it is made, in its own constructors for sparse ones;
// the only other way to them is that of a derived class.
struct KeysOf : c10::TensorImpl {
  static constexpr c10::DispatchKeySet c10::TensorImpl::* kMember = &KeysOf::key_set_;
};

at::Tensor WithoutManaged(const at::Tensor& part) {
  return ManagedStorageOf(part) != nullptr ? at::clone(part) : part;
}

void CopyManagedParts(const at::Tensor& tensor) {
  auto* const sparse = static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
  const bool is_coalesced = sparse->coalesced();
  sparse->set_indices_and_values_unsafe(WithoutManaged(sparse->indices()),
                                        WithoutManaged(sparse->values()));
  sparse->set_coalesced(is_coalesced);
}

}  // namespace

c10::SmallVector<const c10::TensorImpl*, 3> SparsePartsOf(const c10::TensorImpl* tensor) {
  const c10::DispatchKeySet keys = tensor->key_set();
  if (keys.has_all(c10::sparse_ks)) {
    const auto* const sparse = static_cast<const at::SparseTensorImpl*>(tensor);
    return {sparse->indices().unsafeGetTensorImpl(), sparse->values().unsafeGetTensorImpl()};
  }
  if (keys.has_all(c10::sparse_csr_ks)) {
    const auto* const sparse = static_cast<const at::SparseCsrTensorImpl*>(tensor);
    return {sparse->compressed_indices().unsafeGetTensorImpl(),
            sparse->plain_indices().unsafeGetTensorImpl(), sparse->values().unsafeGetTensorImpl()};
  }
  return {};
}

void SettleUnusualResult(const at::Tensor& tensor) {
  if (tensor.is_sparse()) return CopyManagedParts(tensor);
  c10::DispatchKeySet& keys = tensor.unsafeGetTensorImpl()->*KeysOf::kMember;
  keys = keys | c10::DispatchKeySet(c10::BackendComponent::PrivateUse2Bit);
}

}  // namespace patrickstar
