// SPDX-License-Identifier: Apache-2.0
#include "glue/gradients.h"

#include "glue/adoption.h"
#include "glue/managed_storage.h"

namespace patrickstar {
namespace {

// What autograd has just made has no Python object yet. One that has was given by the
// user, or seen by a hook that may have kept it: it must stay the tensor it is.
bool IsKnownToPython(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj() != nullptr;
}

}  // namespace

void TakeGradient(Engine* engine, const at::Tensor& parameter) {
  ManagedStorage* const storage = ManagedStorageOf(parameter);
  if (storage == nullptr || !FillsItsSlot(parameter)) return;
  const at::Tensor gradient = parameter.grad();
  if (IsKnownToPython(gradient)) return;
  if (!gradient.defined() || gradient.requires_grad() || !IsPlainDense(gradient) ||
      gradient.numel() != parameter.numel()) {
    return;
  }
  engine->landing_zone().Release();
  MoveIntoGroup(engine, gradient, *storage->slot(), Kind::kGrad,
                engine->registry().NameOf(storage) + ".grad",
                [&](const at::Tensor& managed) { parameter.mutable_grad() = managed; });
}

}  // namespace patrickstar
