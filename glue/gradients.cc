// SPDX-License-Identifier: Apache-2.0
#include "glue/gradients.h"

#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "glue/adoption.h"
#include "glue/managed_storage.h"

namespace patrickstar {
namespace {

// What autograd has just made has no Python object yet. One that has was given by the
// user, or seen by a hook that may have kept it: it must stay the tensor it is.
bool IsKnownToPython(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj() != nullptr;
}

// DistributedDataParallel reads the gradient right after us, and asks in C++ whether its
// storage is that of a bucket, which an evicted one refuses to say.
bool IsReadByReducer(const at::Tensor& parameter) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  if (!accumulator) return false;
  const auto& hooks = accumulator->post_hooks();
  return std::any_of(hooks.begin(), hooks.end(), [](const auto& hook) {
    return dynamic_cast<const torch::autograd::utils::LambdaPostHook*>(hook.get()) != nullptr;
  });
}

}  // namespace

void TakeGradient(Engine* engine, const at::Tensor& parameter) {
  ManagedStorage* const storage = ManagedStorageOf(parameter);
  if (storage == nullptr || !FillsItsSlot(parameter)) return;
  const at::Tensor gradient = parameter.grad();
  if (IsKnownToPython(gradient)) return;
  if (!gradient.defined() || gradient.requires_grad() || !IsPlainDense(gradient) ||
      gradient.numel() != parameter.numel() || IsReadByReducer(parameter)) {
    return;
  }
  engine->landing_zone().Release();
  MoveIntoGroup(engine, gradient, *storage->slot(), Kind::kGrad,
                engine->registry().NameOf(storage) + ".grad",
                [&](const at::Tensor& managed) { parameter.mutable_grad() = managed; });
}

}  // namespace patrickstar
