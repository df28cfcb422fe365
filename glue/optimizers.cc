// SPDX-License-Identifier: Apache-2.0
#include "glue/optimizers.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/fill.h>

#include <cstring>
#include <vector>

#include "glue/adoption.h"
#include "glue/errors.h"
#include "glue/managed_storage.h"

namespace patrickstar {
namespace {

namespace py = pybind11;

using c10::IValue;
using torch::jit::Stack;

// The Python frames of the steps that run on this thread, innermost last. Never freed: a
// thread may end without the GIL.
std::vector<py::object>& NativeSteps() {
  thread_local auto* const native_steps = new std::vector<py::object>();
  return *native_steps;
}

bool IsOnTheStack(const py::object& frame) {
  PyFrameObject* const innermost = PyEval_GetFrame();  // borrowed
  auto current = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(innermost));
  while (current) {
    if (current.is(frame)) return true;
    PyFrameObject* const next = PyFrame_GetBack(reinterpret_cast<PyFrameObject*>(current.ptr()));
    current = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(next));
  }
  return false;
}

// Whether a step runs on this thread. One that threw never ended: nobody told us, but its
// frame is gone from the stack.
bool IsInsideNativeStep() {
  std::vector<py::object>& native_steps = NativeSteps();
  if (native_steps.empty()) return false;
  const py::gil_scoped_acquire gil;
  while (!native_steps.empty() && !IsOnTheStack(native_steps.back())) native_steps.pop_back();
  return !native_steps.empty();
}

size_t NumArguments(LikeOp like) {
  if (like == LikeOp::kClone) return 2;
  return like == LikeOp::kFull ? 7 : 6;
}

bool AreOptionsThoseOf(const at::Tensor& like, LikeOp op, const Stack& stack) {
  const size_t last = stack.size() - 1;
  if (!stack[last].isNone()) {
    const auto format = stack[last].toMemoryFormat();
    const bool is_same = format == at::MemoryFormat::Preserve || like.is_contiguous(format);
    if (!is_same) return false;
  }
  if (op == LikeOp::kClone) return true;
  const IValue& pin_memory = stack[last - 1];
  const IValue& device = stack[last - 2];
  const IValue& layout = stack[last - 3];
  const IValue& dtype = stack[last - 4];
  return (pin_memory.isNone() || !pin_memory.toBool()) &&
         (device.isNone() || device.toDevice() == like.device()) &&
         (layout.isNone() || layout.toLayout() == at::kStrided) &&
         (dtype.isNone() || dtype.toScalarType() == like.scalar_type());
}

// A constant of the size of a trainable parameter, made outside a step: some optimizers
// make their state in the constructor, and hand-written ones before the loop.
bool IsStateOfAFutureStep(LikeOp like, const at::Tensor& self) {
  const bool is_constant = like == LikeOp::kZeros || like == LikeOp::kOnes || like == LikeOp::kFull;
  return is_constant && self.requires_grad() && self.is_leaf();
}

}  // namespace

void BeginNativeStep(py::object frame) { NativeSteps().push_back(std::move(frame)); }

void EndNativeStep() {
  if (!NativeSteps().empty()) NativeSteps().pop_back();
}

bool AnswerLike(LikeOp like, Engine* engine, Stack* stack) {
  const size_t num_arguments = NumArguments(like);
  const at::Tensor self = (*stack)[stack->size() - num_arguments].toTensor();
  ManagedStorage* const storage = ManagedStorageOf(self);
  if (storage == nullptr || !FillsItsSlot(self) || !AreOptionsThoseOf(self, like, *stack)) {
    return false;
  }
  // Copies are state when they are of a gradient; a copy of a parameter may be a snapshot. One of a
  // negative or conjugate view has other bytes.
  if (like == LikeOp::kClone &&
      (storage->slot()->kind != Kind::kGrad || self.is_neg() || self.is_conj())) {
    return false;
  }
  if (!IsStateOfAFutureStep(like, self) && !IsInsideNativeStep()) return false;
  const at::Scalar fill_value = like == LikeOp::kFull
                                    ? (*stack)[stack->size() - num_arguments + 1].toScalar()
                                    : at::Scalar(1);
  const Slot& slot = *storage->slot();
  const NewStorage made = ThroughTorch([&] {
    const GilReleaseIfHeld without_gil;
    return engine->registry().MakeStorage(slot.group, slot.index, Kind::kState, self.scalar_type(),
                                          slot.num_bytes, engine->registry().NameOf(storage));
  });
  const at::Tensor result =
      MakeManagedTensor(made.storage, self.dtype(), self.sizes(), self.strides(), 0);
  const bool is_written = like != LikeOp::kEmpty && !(like == LikeOp::kZeros && made.is_zero);
  if (is_written) {
    std::vector<ChunkAccess> set = {{.chunk = made.chunk, .access = Access::kWrite}};
    if (like == LikeOp::kClone) set.push_back({.chunk = slot.chunk, .access = Access::kRead});
    const TorchLease lease(engine, set, "the state of an optimizer");
    std::byte* const data = engine->store().data(made.chunk) + made.byte_offset;
    const auto num_bytes = static_cast<size_t>(slot.num_bytes);
    if (like == LikeOp::kClone) {
      std::memcpy(data, engine->store().data(slot.chunk) + slot.byte_offset, num_bytes);
    } else if (like == LikeOp::kZeros) {
      std::memset(data, 0, num_bytes);
    } else {
      const at::NoGradGuard no_grad;
      MakeRawTensor(data, self).fill_(fill_value);
    }
  }
  torch::jit::drop(*stack, num_arguments);
  stack->emplace_back(result);
  return true;
}

bool AdoptState(Engine* engine, const at::Tensor& parameter, const at::Tensor& state) {
  ManagedStorage* const storage = ManagedStorageOf(parameter);
  if (storage == nullptr || !FillsItsSlot(parameter) || state.is_same(parameter)) return false;
  if (state.sizes() != parameter.sizes() || !IsPlainDense(state) || !OwnsItsStorage(state)) {
    return false;
  }
  MoveIntoGroup(engine, state, *storage->slot(), Kind::kState, engine->registry().NameOf(storage),
                [&](const at::Tensor& managed) {
                  const at::NoGradGuard no_grad;
                  state.set_data(managed);
                });
  return true;
}

}  // namespace patrickstar
