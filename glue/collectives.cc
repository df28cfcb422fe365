// SPDX-License-Identifier: Apache-2.0
#include "glue/collectives.h"

#include <torch/library.h>

#include <array>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "glue/engine.h"
#include "glue/guard_kernel.h"
#include "glue/hold.h"
#include "glue/managed_storage.h"
#include "glue/op_facts.h"

namespace patrickstar {
namespace {

using c10::IValue;
using torch::jit::Stack;

// The ops of c10d that take tensors.
constexpr std::array kCollectives = {
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "allreduce_",
    "allreduce_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "barrier",
    "broadcast_",
    "gather_",
    "monitored_barrier_",
    "recv_",
    "recv_any_source_",
    "reduce_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
    "scatter_",
    "send",
};

// Those of them that take lists of lists.
constexpr std::array kNestedCollectives = {
    "allgather_", "allgather_coalesced_", "gather_", "reduce_scatter_", "scatter_",
};

Access AccessOf(const std::string& op, const c10::Argument& argument) {
  return op == "c10d::send" || argument.name().starts_with("input") ? Access::kRead
                                                                    : Access::kWrite;
}

// A Work without a future, and the hold that it needs until it is done.
class HeldWork final : public c10d::Work {
 public:
  HeldWork(c10::intrusive_ptr<c10d::Work> work, std::shared_ptr<Hold> hold)
      : Work(-1, work->retrieveOpType()), hold_(std::move(hold)), work_(std::move(work)) {}

  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  int sourceRank() const override { return work_->sourceRank(); }
  std::vector<at::Tensor> result() override { return work_->result(); }
  void synchronize() override { work_->synchronize(); }
  void blockCurrentStream() override { work_->blockCurrentStream(); }
  float getDuration() const override { return work_->getDuration(); }
  uint64_t getSequencenumber() const override { return work_->getSequencenumber(); }
  void abort() override { work_->abort(); }

  bool wait(std::chrono::milliseconds timeout) override {
    const bool is_done = work_->wait(timeout);
    std::call_once(released_, [this] { hold_->Release(); });
    return is_done;
  }

 private:
  std::once_flag released_;
  std::shared_ptr<Hold> hold_;  // outlives the work, whose end cancels what is under way
  c10::intrusive_ptr<c10d::Work> work_;
};

c10::intrusive_ptr<c10::ivalue::Future> FutureOf(c10d::Work* work) {
  try {
    return work->getFuture();
  } catch (const c10::Error&) {
    return nullptr;
  }
}

std::optional<size_t> WorkIndex(const c10::OperatorHandle& op, const Stack& stack) {
  const auto& returns = op.schema().returns();
  for (size_t index = 0; index < returns.size(); ++index) {
    if (returns[index].type()->kind() == c10::TypeKind::ClassType) {
      return stack.size() - returns.size() + index;
    }
  }
  return std::nullopt;
}

// Ends the hold with the work that the op has left on the stack.
void HoldUntilDone(const c10::OperatorHandle& op, std::shared_ptr<Hold> hold, Stack* stack) {
  const std::optional<size_t> index = WorkIndex(op, *stack);
  if (!index) return;  // the op has waited
  const auto work = (*stack)[*index].toCustomClass<c10d::Work>();
  if (!work) return;
  if (const auto future = FutureOf(work.get())) {
    future->addCallback([hold](c10::ivalue::Future&) { hold->Release(); });
  } else {
    (*stack)[*index] = IValue(
        c10::intrusive_ptr<c10d::Work>(c10::make_intrusive<HeldWork>(work, std::move(hold))));
  }
}

void Register(const char* name, c10::DispatchKeySet below, torch::Library* library) {
  const auto op =
      c10::Dispatcher::singleton().findSchema({std::string("c10d::") + name, std::string()});
  if (!op) return;  // a torch without torch.distributed
  library->impl(name, torch::CppFunction::makeFromBoxedFunctor(
                          std::make_unique<CollectiveKernel>(op->schema(), below)));
}

}  // namespace

CollectiveKernel::CollectiveKernel(const c10::FunctionSchema& schema, c10::DispatchKeySet below)
    : name_(c10::toString(schema.operator_name())), below_(below) {
  for (const c10::Argument& argument : schema.arguments()) {
    accesses_.push_back(AccessOf(schema.name(), argument));
  }
}

void CollectiveKernel::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                                  Stack* stack) const {
  Engine* const engine = Engine::Get();
  std::vector<HeldStorage> storages;
  const size_t begin = stack->size() - accesses_.size();
  for (size_t index = 0; engine != nullptr && index < accesses_.size(); ++index) {
    ForEachTensor((*stack)[begin + index], [&](c10::TensorImpl* tensor) {
      if (ManagedStorageOf(tensor) == nullptr) return;
      storages.push_back({.storage = tensor->storage(), .access = accesses_[index]});
    });
  }
  if (storages.empty()) return op.redispatchBoxed(BelowGuard(keys & below_), stack);
  auto hold = std::make_shared<Hold>(engine, std::move(storages), name_);
  op.redispatchBoxed(BelowGuard(keys & below_), stack);
  HoldUntilDone(op, std::move(hold), stack);
}

TORCH_LIBRARY_IMPL(c10d, PrivateUse2, library) {
  for (const char* const name : kCollectives) {
    Register(name, c10::DispatchKeySet(c10::DispatchKeySet::FULL), &library);
  }
}

TORCH_LIBRARY_IMPL(c10d, BackendSelect, library) {
  const c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
  for (const char* const name : kNestedCollectives) Register(name, below, &library);
}

}  // namespace patrickstar
