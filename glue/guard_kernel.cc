// SPDX-License-Identifier: Apache-2.0
#include "glue/guard_kernel.h"

#include <ATen/ops/clone.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "glue/access_set.h"
#include "glue/errors.h"
#include "glue/managed_storage.h"
#include "glue/optimizers.h"
#include "glue/sparse_parts.h"

namespace patrickstar {
namespace {

using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

bool HasManagedPart(const c10::TensorImpl* tensor) {
  const auto parts = SparsePartsOf(tensor);
  return std::any_of(parts.begin(), parts.end(),
                     [](const auto* part) { return ManagedStorageOf(part) != nullptr; });
}

// A result over managed storage that lost the key. (One with the key over other storage is
// harmless: the guard finds nothing to lease.)
bool IsKeyLost(const c10::TensorImpl* tensor) {
  if (has_managed_key(tensor)) return false;
  return tensor->has_storage() ? ManagedStorageOf(tensor) != nullptr : HasManagedPart(tensor);
}

at::Tensor WithManagedKey(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || tensor.is_nested()) {
    SettleUnusualResult(tensor);
    return tensor;
  }
  return MakeManagedTensor(tensor.storage(), tensor.dtype(), tensor.sizes(), tensor.strides(),
                           tensor.storage_offset());
}

// Lets an op resize what it writes; what it has resized is ordinary afterwards.
class ResizableArguments {
 public:
  ResizableArguments(const OpFacts& facts, const Stack& stack) {
    const size_t begin = stack.size() - facts.num_arguments;
    for (const size_t index : facts.tensor_arguments) {
      if (!facts.is_written(index)) continue;
      ForEachTensor(stack[begin + index], [this](c10::TensorImpl* tensor) {
        if (ManagedStorageOf(tensor) != nullptr) storages_.push_back(tensor->storage());
      });
    }
  }
  ~ResizableArguments() {
    for (const c10::Storage& storage : storages_) {
      ManagedStorage* const managed = ManagedStorageOf(storage.unsafeGetStorageImpl());
      if (managed != nullptr) managed->LeaveIfResized();
    }
  }
  ResizableArguments(const ResizableArguments&) = delete;
  ResizableArguments& operator=(const ResizableArguments&) = delete;

 private:
  const ResizeScope scope_;
  c10::SmallVector<c10::Storage, 2> storages_;
};

void FixResults(const OpFacts& facts, Stack* stack) {
  for (const size_t index : facts.tensor_returns) {
    IValue& value = (*stack)[stack->size() - facts.num_returns + index];
    if (value.isTensor()) {
      if (IsKeyLost(value.unsafeToTensorImpl())) value = WithManagedKey(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> results = value.toTensorList();
      for (size_t element = 0; element < results.size(); ++element) {
        const at::Tensor result = results.get(element);
        if (IsKeyLost(result.unsafeGetTensorImpl())) results.set(element, WithManagedKey(result));
      }
    }
  }
}

// The length of an op's tensor lists; 0 when they differ (empty ones aside).
size_t ListLength(const OpFacts& facts, const Stack& stack) {
  const size_t begin = stack.size() - facts.num_arguments;
  size_t length = 0;
  for (const size_t index : facts.tensor_arguments) {
    const IValue& value = stack[begin + index];
    if (!value.isTensorList()) continue;
    const size_t size = value.toTensorList().size();
    if (size == 0 || size == length) continue;
    if (length != 0) return 0;
    length = size;
  }
  return length;
}

IValue PartOf(const IValue& value, size_t length, size_t from, size_t to) {
  if (!value.isList() || value.toListRef().size() != length) return value;
  c10::List<IValue> whole = value.toList();
  c10::impl::GenericList part(whole.elementType());
  for (size_t index = from; index < to; ++index) part.push_back(whole.get(index));
  return part;
}

void Redispatch(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  op.redispatchBoxed(BelowGuard(keys), stack);
}

IValue CopyOfManaged(const IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return has_managed_key(tensor.unsafeGetTensorImpl()) ? IValue(at::clone(tensor)) : value;
  }
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> copies;
  for (const IValue& element : value.toListRef()) {
    copies.push_back(CopyOfManaged(element).toTensor());
  }
  return copies;
}

// What an object keeps must not move: it gets memory of its own.
void CallOnCopies(const OpFacts& facts, const OperatorHandle& op, Stack* stack) {
  const size_t begin = stack->size() - facts.num_arguments;
  for (const size_t index : facts.tensor_arguments) {
    (*stack)[begin + index] = CopyOfManaged((*stack)[begin + index]);
  }
  op.callBoxed(stack);
}

}  // namespace

void FreeDeadSlots(Engine* engine) {
  ThroughTorch([engine] {
    const GilReleaseIfHeld without_gil;  // may wait for a transfer
    engine->registry().FreeDeadSlots();
  });
}

void GuardKernel::operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) const {
  Engine* const engine = Engine::Get();
  if (engine == nullptr) return Redispatch(op, keys, stack);
  if (has_dead_slots()) FreeDeadSlots(engine);
  if (facts_.like != LikeOp::kNone && !OpScope::is_inside() &&
      AnswerLike(facts_.like, engine, stack)) {
    return;
  }
  if (!facts_.is_data_needed) {
    Redispatch(op, keys, stack);
    return FixResults(facts_, stack);
  }
  if (facts_.is_lazy_clone) {  // memory that moves cannot be shared
    stack->back() = at::clone(stack->back().toTensor());
    return;
  }
  if (facts_.is_rebinding) return Rebind(engine, op, keys, stack);
  if (facts_.is_keeping) return CallOnCopies(facts_, op, stack);
  Run(engine, op, keys, stack);
  FixResults(facts_, stack);
}

void GuardKernel::Run(Engine* engine, const OperatorHandle& op, DispatchKeySet keys,
                      Stack* stack) const {
  AccessSet set;
  const size_t begin = stack->size() - facts_.num_arguments;
  for (const size_t index : facts_.tensor_arguments) {
    ForEachTensor((*stack)[begin + index], [&](const c10::TensorImpl* tensor) {
      set.Add(tensor, facts_.is_written(index));
    });
  }
  if (set.empty()) return Redispatch(op, keys, stack);
  if (!facts_.may_resize && OpScope::IsCovered(set.accesses())) return Redispatch(op, keys, stack);
  if (facts_.is_list_op && !engine->store().CanHold(set.accesses())) {
    const size_t length = ListLength(facts_, *stack);
    if (length > 1) return RunInParts(engine, op, keys, stack, length);
  }
  const OpScope scope(engine, set.accesses(), facts_.name);
  if (!facts_.may_resize) return Redispatch(op, keys, stack);
  const ResizableArguments resizable(facts_, *stack);
  Redispatch(op, keys, stack);
}

// Halves the lists until each part fits. The ops that qualify work index by index, so the
// results are those of the whole.
void GuardKernel::RunInParts(Engine* engine, const OperatorHandle& op, DispatchKeySet keys,
                             Stack* stack, size_t length) const {
  const std::vector<IValue> arguments = torch::jit::pop(*stack, facts_.num_arguments);
  std::vector<IValue> results;
  const std::array<size_t, 3> bounds = {0, length / 2, length};
  for (size_t part = 0; part + 1 < bounds.size(); ++part) {
    for (const IValue& argument : arguments) {
      stack->push_back(PartOf(argument, length, bounds[part], bounds[part + 1]));
    }
    Run(engine, op, keys, stack);
    const std::vector<IValue> part_results = torch::jit::pop(*stack, facts_.num_returns);
    if (part == 0) {
      results = part_results;
      continue;
    }
    for (size_t index = 0; index < results.size(); ++index) {
      if (!results[index].isTensorList()) continue;
      c10::List<at::Tensor> joined = results[index].toTensorList();
      joined.append(part_results[index].toTensorList());
    }
  }
  for (IValue& result : results) stack->push_back(std::move(result));
}

// set_ moves no data: a tensor takes another's storage. Between a managed and an ordinary
// one the key has to follow, so it takes the whole identity of the source, as `.data =` does.
void GuardKernel::Rebind(Engine* engine, const OperatorHandle& op, DispatchKeySet keys,
                         Stack* stack) const {
  const size_t begin = stack->size() - facts_.num_arguments;
  const bool has_source = facts_.num_arguments == 2 && (*stack)[begin + 1].isTensor();
  if (!has_source) return Run(engine, op, keys, stack);
  const at::Tensor self = (*stack)[begin].toTensor();
  const at::Tensor source = (*stack)[begin + 1].toTensor();
  TORCH_CHECK(self.dtype() == source.dtype(), "set_: expected a source of dtype ", self.dtype(),
              ", got ", source.dtype());
  self.unsafeGetTensorImpl()->shallow_copy_from(source.getIntrusivePtr());
  torch::jit::drop(*stack, facts_.num_arguments);
  stack->emplace_back(self);
}

}  // namespace patrickstar
