// SPDX-License-Identifier: Apache-2.0
#include "glue/gradients.h"

#include <ATen/ops/clone.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <span>
#include <utility>

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

// The types that torch has norms and products of on a CPU.
bool IsNotable(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 ||
         dtype == at::kHalf;
}

bool IsOfGradient(const at::Tensor& tensor) {
  const ManagedStorage* const storage = ManagedStorageOf(tensor);
  return storage != nullptr && storage->slot()->kind == Kind::kGrad;
}

// Whether notes can be taken of the tensor: it is all of a gradient, and no view of another kind.
bool IsGradient(const at::Tensor& tensor) {
  return IsOfGradient(tensor) && FillsItsSlot(tensor) && IsNotable(tensor.scalar_type()) &&
         !tensor.is_neg();
}

// torch.set_flush_denormal is a mode of the thread.
bool IsFlushingDenormals() {
  volatile float tiny = std::numeric_limits<float>::denorm_min();
  return tiny * 2.0F == 0.0F;
}

// Whether a product may be put off: it is the same when it is taken on another thread later.
bool IsFactor(const at::Tensor& factor, const at::Tensor& tensor) {
  return factor.numel() == 1 && factor.dim() <= tensor.dim() &&
         factor.scalar_type() == tensor.scalar_type() && factor.layout() == at::kStrided &&
         factor.device().is_cpu() && factor.has_storage() && !factor.is_neg() &&
         !has_managed_key(factor.unsafeGetTensorImpl()) && !IsFlushingDenormals();
}

// torch does so in the operation on one tensor: for those of a list after the guard, for one
// alone it has been done.
void CountVersion(const at::Tensor& tensor) {
  constexpr auto kKey = c10::DispatchKey::ADInplaceOrView;
  if (tensor.key_set().has(kKey) && !c10::impl::tls_is_dispatch_key_excluded(kKey)) {
    tensor.unsafeGetTensorImpl()->bump_version();
  }
}

// Of one that was added to and is in memory still. A norm of what somebody may write by address
// would be out of date without notice.
void NoteNormIfAtHand(Engine* engine, const at::Tensor& gradient) {
  if (!engine->registry().notes().are_norms_wanted() || !IsGradient(gradient)) return;
  Slot* const slot = ManagedStorageOf(gradient)->slot();
  if (!engine->registry().is_attached(slot->chunk) || engine->store().is_held(slot->chunk)) return;
  const ChunkAccess access{.chunk = slot->chunk, .access = Access::kRead};
  const TorchLease lease(engine, std::span(&access, 1), "taking the norm of a gradient");
  std::byte* const data = engine->store().data(slot->chunk) + slot->byte_offset;
  engine->registry().notes().NoteNorm(slot, KnownNorm::Of(MakeRawTensor(data, gradient)));
}

}  // namespace

void TakeGradient(Engine* engine, const at::Tensor& parameter) {
  ManagedStorage* const storage = ManagedStorageOf(parameter);
  if (storage == nullptr || !FillsItsSlot(parameter)) return;
  const at::Tensor gradient = parameter.grad();
  if (gradient.defined() && ManagedStorageOf(gradient) != nullptr) {
    return NoteNormIfAtHand(engine, gradient);
  }
  if (IsKnownToPython(gradient)) return;
  if (!gradient.defined() || gradient.requires_grad() || !IsPlainDense(gradient) ||
      gradient.numel() != parameter.numel() || IsReadByReducer(parameter)) {
    return;
  }
  GradientNotes& notes = engine->registry().notes();
  std::optional<KnownNorm> norm;
  if (notes.are_norms_wanted() && IsNotable(gradient.scalar_type())) {
    norm = KnownNorm::Of(gradient);  // it is in cache now
  }
  engine->landing_zone().Release();
  MoveIntoGroup(engine, gradient, *storage->slot(), Kind::kGrad,
                engine->registry().NameOf(storage) + ".grad", [&](const at::Tensor& managed) {
                  if (norm) notes.NoteNorm(ManagedStorageOf(managed)->slot(), *std::move(norm));
                  parameter.mutable_grad() = managed;
                });
}

std::optional<at::Tensor> FindNorm(Engine* engine, const at::Tensor& tensor) {
  if (!IsGradient(tensor)) return std::nullopt;
  GradientNotes& notes = engine->registry().notes();
  notes.WantNorms();
  const std::optional<at::Tensor> norm = notes.FindNorm(ManagedStorageOf(tensor)->slot(), tensor);
  if (!norm) return std::nullopt;
  return at::clone(*norm);
}

bool PutOffFactor(Engine* engine, const at::Tensor& tensor, const at::Tensor& factor) {
  return IsOfGradient(tensor) && PutOffFactor(engine, at::TensorList(tensor), factor).empty();
}

std::vector<at::Tensor> PutOffFactor(Engine* engine, at::TensorList tensors,
                                     const at::Tensor& factor) {
  std::vector<at::Tensor> rest;
  at::Tensor copy;  // the caller may write to the factor afterwards
  for (const at::Tensor& tensor : tensors) {
    const bool is_able = IsGradient(tensor) && IsFactor(factor, tensor);
    if (is_able && !copy.defined()) copy = at::clone(factor).view(at::IntArrayRef());
    if (!is_able || !engine->registry().notes().NoteFactor(ManagedStorageOf(tensor)->slot(),
                                                           tensor.scalar_type(), copy)) {
      rest.push_back(tensor);
    } else {
      CountVersion(tensor);
    }
  }
  return rest;
}

}  // namespace patrickstar
