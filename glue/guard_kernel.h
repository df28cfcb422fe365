// SPDX-License-Identifier: Apache-2.0
//
// GuardKernel: the guard for one op, whatever its types: arguments and results are on
// torch's stack.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "glue/engine.h"
#include "glue/managed_storage.h"
#include "glue/op_facts.h"

namespace patrickstar {

// `keys` without the guard's: where the dispatcher goes on.
inline c10::DispatchKeySet BelowGuard(c10::DispatchKeySet keys) {
  return keys.remove_backend(c10::BackendComponent::PrivateUse2Bit);
}

// An op's lease, and the mark that this thread is inside a kernel.
class OpScope {
 public:
  OpScope(Engine* engine, std::span<const ChunkAccess> set, std::string_view name)
      : lease_(engine, set, name) {}

  // What a kernel allocates for itself it writes raw: it must get plain memory.
  static bool is_inside() { return num_on_thread_ != 0; }

 private:
  static inline thread_local int num_on_thread_ = 0;

  struct Mark {
    Mark() { ++num_on_thread_; }
    ~Mark() {
      if (--num_on_thread_ == 0) FreeDepartedSlots();
    }
    Mark(const Mark&) = delete;
    Mark& operator=(const Mark&) = delete;
  };

  const Mark mark_;  // outlives the lease
  const TorchLease lease_;
};

// Frees the slots whose storages died since the last op.
void FreeDeadSlots(Engine* engine);

class GuardKernel final : public c10::OperatorKernel {
 public:
  explicit GuardKernel(const c10::FunctionSchema& schema) : facts_(schema) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) const;

 private:
  void Run(Engine* engine, const c10::OperatorHandle& op, c10::DispatchKeySet keys,
           torch::jit::Stack* stack) const;
  void RunInParts(Engine* engine, const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack, size_t length) const;
  void Rebind(Engine* engine, const c10::OperatorHandle& op, c10::DispatchKeySet keys,
              torch::jit::Stack* stack) const;

  const OpFacts facts_;
};

}  // namespace patrickstar
