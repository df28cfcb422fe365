// SPDX-License-Identifier: Apache-2.0
#include "glue/guard.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "glue/access_set.h"
#include "glue/guard_kernel.h"
#include "glue/op_facts.h"
#include "glue/typed_guard.h"

namespace patrickstar {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::OperatorHandle;
using torch::jit::Stack;

// For ops that have no kernel of their own under the guard's keys.
void GuardFallback(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  GuardKernel kernel(op.schema());
  kernel(op, keys, stack);
}

struct KeyPair {
  DispatchKey guarded;
  DispatchKey cpu;
};

constexpr std::array kKeyPairs = {
    KeyPair{DispatchKey::PrivateUse2, DispatchKey::CPU},
    KeyPair{DispatchKey::SparsePrivateUse2, DispatchKey::SparseCPU},
    KeyPair{DispatchKey::SparseCsrPrivateUse2, DispatchKey::SparseCsrCPU},
    KeyPair{DispatchKey::QuantizedPrivateUse2, DispatchKey::QuantizedCPU},
    KeyPair{DispatchKey::NestedTensorPrivateUse2, DispatchKey::NestedTensorCPU},
};

// Composite ops that read data above the backend keys.
const std::set<std::string>& CompositeReaders() {
  static const std::set<std::string> readers = {
      "aten::tensor_split.tensor_indices_or_sections",
      "aten::ctc_loss.Tensor",
      "aten::ctc_loss.IntList",
      "aten::_pad_packed_sequence",
      "aten::max_pool1d",
  };
  return readers;
}

// Ops that touch data above the backend keys are guarded at the autograd key as well: some
// composites read it, and those with an `out` resize it there.
bool IsGuardedAbove(const OperatorHandle& op, const std::string& full_name) {
  if (CompositeReaders().count(full_name) != 0) return true;
  return op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) &&
         !op.hasKernelForDispatchKey(DispatchKey::CPU) && OpFacts(op.schema()).may_resize;
}

// Hears of new ops. It is called under the dispatcher's lock and before the op has kernels:
// registering there would hang, so it only counts.
class NewOpListener final : public c10::OpRegistrationListener {
 public:
  explicit NewOpListener(std::atomic<size_t>* num_ops) : num_ops_(*num_ops) {}
  void onOperatorRegistered(const OperatorHandle&) override { ++num_ops_; }
  void onOperatorDeregistered(const OperatorHandle&) override {}

 private:
  std::atomic<size_t>& num_ops_;
};

// Owns the registrations, which live as long as the process.
class Registrar {
 public:
  Registrar()
      : listening_(c10::Dispatcher::singleton().addRegistrationListener(
            std::make_unique<NewOpListener>(&num_ops_))) {}

  // Looks at every op again if new ones were registered since the last call.
  size_t RegisterNew() {
    std::lock_guard lock(mutex_);
    const size_t num_ops = num_ops_.load();
    if (num_ops == num_ops_seen_) return 0;
    num_ops_seen_ = num_ops;
    size_t num_registered = 0;
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
      const auto op = c10::Dispatcher::singleton().findOp(name);
      if (op && op->hasSchema()) num_registered += RegisterOp(*op, name);
    }
    return num_registered;
  }

 private:
  size_t RegisterOp(const OperatorHandle& op, const c10::OperatorName& name) {
    const std::string full_name = c10::toString(name);
    if (IsGuardedAbove(op, full_name)) {
      return Register(op, DispatchKey::AutogradPrivateUse2, full_name) +
             Register(op, DispatchKey::PrivateUse2, full_name);
    }
    const bool is_composite = op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd);
    const bool is_non_functional =
        op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional);
    size_t num_registered = 0;
    for (const KeyPair& keys : kKeyPairs) {
      const bool is_dense = keys.guarded == DispatchKey::PrivateUse2;
      if (is_composite || (is_non_functional && is_dense) || op.hasKernelForDispatchKey(keys.cpu)) {
        num_registered += Register(op, keys.guarded, full_name);
      }
    }
    return num_registered;
  }

  size_t Register(const OperatorHandle& op, DispatchKey key, const std::string& full_name) {
    if (op.hasKernelForDispatchKey(key)) return 0;
    std::optional<torch::CppFunction> kernel;
    if (key == DispatchKey::PrivateUse2) kernel = MakeTypedGuard(full_name);
    if (!kernel) {
      kernel = torch::CppFunction::makeFromBoxedFunctor(std::make_unique<GuardKernel>(op.schema()));
    }
    const size_t colons = full_name.find("::");
    Library(full_name.substr(0, colons), key)
        .impl(full_name.substr(colons + 2).c_str(), *std::move(kernel));
    return 1;
  }

  torch::Library& Library(const std::string& name_space, DispatchKey key) {
    std::unique_ptr<torch::Library>& library = libraries_[{name_space, key}];
    if (!library) {
      library = std::make_unique<torch::Library>(torch::Library::IMPL, name_space, key, __FILE__,
                                                 __LINE__);
    }
    return *library;
  }

  std::atomic<size_t> num_ops_{0};
  size_t num_ops_seen_ = 0;
  c10::RegistrationHandleRAII listening_;
  std::mutex mutex_;
  std::map<std::pair<std::string, DispatchKey>, std::unique_ptr<torch::Library>> libraries_;
};

}  // namespace

size_t InstallGuard() {
  static Registrar* const registrar = new Registrar();  // registrations outlive static destructors
  return registrar->RegisterNew();
}

void SkipReadLeases(bool is_skipped) { are_read_leases_skipped.store(is_skipped); }

TORCH_LIBRARY_IMPL(_, AutogradPrivateUse2, library) {
  library.fallback(torch::autograd::basicAutogradNotImplementedFallback());
}
TORCH_LIBRARY_IMPL(_, PrivateUse2, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&GuardFallback>());
}
TORCH_LIBRARY_IMPL(_, SparsePrivateUse2, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&GuardFallback>());
}
TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse2, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&GuardFallback>());
}
TORCH_LIBRARY_IMPL(_, QuantizedPrivateUse2, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&GuardFallback>());
}
TORCH_LIBRARY_IMPL(_, NestedTensorPrivateUse2, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&GuardFallback>());
}

}  // namespace patrickstar
