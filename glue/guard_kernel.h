// SPDX-License-Identifier: Apache-2.0
//
// GuardKernel: the guard for one op, whatever its types: arguments and results are on
// torch's stack.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <span>
#include <string_view>
#include <utility>

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
      : mark_(set), lease_(engine, set, name) {}

  // What a kernel allocates for itself it writes raw: it must get plain memory.
  static bool is_inside() { return innermost_ != nullptr; }

  // Whether the op around this one leases all of `set`: kernels call ops on their arguments.
  static bool IsCovered(std::span<const ChunkAccess> set) {
    return innermost_ != nullptr && innermost_->Covers(set);
  }

 private:
  class Mark {
   public:
    explicit Mark(std::span<const ChunkAccess> set)
        : set_(set), outer_(std::exchange(innermost_, this)) {}
    ~Mark() {
      innermost_ = outer_;
      if (outer_ == nullptr) FreeDepartedSlots();
    }
    Mark(const Mark&) = delete;
    Mark& operator=(const Mark&) = delete;

    bool Covers(std::span<const ChunkAccess> set) const {
      for (const ChunkAccess& access : set) {
        if (!Leases(access)) return false;
      }
      return true;
    }

   private:
    bool Leases(const ChunkAccess& access) const {
      for (const ChunkAccess& leased : set_) {
        if (leased.chunk == access.chunk) {
          return leased.access == Access::kWrite || access.access == Access::kRead;
        }
      }
      return false;
    }

    const std::span<const ChunkAccess> set_;
    const Mark* const outer_;
  };

  static inline thread_local const Mark* innermost_ = nullptr;

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
