// SPDX-License-Identifier: Apache-2.0
#include "glue/guard.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "glue/engine.h"
#include "glue/errors.h"
#include "glue/managed_storage.h"
#include "glue/op_facts.h"
#include "glue/optimizers.h"

namespace patrickstar {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

std::atomic<bool> are_read_leases_skipped{false};

// The chunks of one op, each once, with the strongest access.
class AccessSet {
 public:
  void Add(ChunkId chunk, bool is_written) {
    const Access access = is_written ? Access::kWrite : Access::kRead;
    for (ChunkAccess& known : accesses_) {
      if (known.chunk != chunk) continue;
      if (is_written) known.access = access;
      return;
    }
    accesses_.push_back({.chunk = chunk, .access = access});
  }
  std::span<const ChunkAccess> accesses() const { return {accesses_.data(), accesses_.size()}; }
  bool empty() const { return accesses_.empty(); }

 private:
  c10::SmallVector<ChunkAccess, 8> accesses_;
};

void AddTensor(const c10::TensorImpl* tensor, bool is_written, AccessSet* set) {
  if (!has_managed_key(tensor)) return;
  ManagedStorage* const storage = ManagedStorageOf(tensor);
  if (storage == nullptr) return;
  if (!is_written && are_read_leases_skipped.load(std::memory_order_relaxed)) return;
  set->Add(storage->slot()->chunk, is_written);
}

void AddValue(const IValue& value, bool is_written, AccessSet* set) {
  if (value.isTensor()) {
    AddTensor(value.unsafeToTensorImpl(), is_written, set);
  } else if (value.isList()) {
    for (const IValue& element : value.toListRef()) {
      if (element.isTensor()) AddTensor(element.unsafeToTensorImpl(), is_written, set);
    }
  }
}

// A result over managed storage that lost the key gets a tensor that has it. (A result
// with the key over other storage is harmless: the guard finds nothing to lease.)
at::Tensor WithManagedKey(const at::Tensor& tensor) {
  if (!tensor.defined() || ManagedStorageOf(tensor) == nullptr ||
      has_managed_key(tensor.unsafeGetTensorImpl())) {
    return tensor;
  }
  return MakeManagedTensor(tensor.storage(), tensor.dtype(), tensor.sizes(), tensor.strides(),
                           tensor.storage_offset());
}

void FixResults(const OpFacts& facts, Stack* stack) {
  for (const size_t index : facts.tensor_returns) {
    IValue& value = (*stack)[stack->size() - facts.num_returns + index];
    if (value.isTensor()) {
      const c10::TensorImpl* const tensor = value.unsafeToTensorImpl();
      if (!has_managed_key(tensor) && ManagedStorageOf(tensor) != nullptr) {
        value = WithManagedKey(value.toTensor());
      }
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> results = value.toTensorList();
      for (size_t element = 0; element < results.size(); ++element) {
        const at::Tensor result = results.get(element);
        const at::Tensor fixed = WithManagedKey(result);
        if (!fixed.is_same(result)) results.set(element, fixed);
      }
    }
  }
}

// The length of an op's tensor lists; 0 when they differ (empty ones aside).
size_t ListLength(const OpFacts& facts, const Stack& stack) {
  const size_t begin = stack.size() - facts.num_arguments;
  size_t length = 0;
  for (const OpFacts::TensorArgument& argument : facts.tensors) {
    const IValue& value = stack[begin + argument.index];
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

class GuardKernel final : public c10::OperatorKernel {
 public:
  explicit GuardKernel(const c10::FunctionSchema& schema) : facts_(schema) {}

  void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) const {
    Engine* const engine = Engine::Get();
    if (engine == nullptr) return Redispatch(op, keys, stack);
    if (has_dead_slots()) {
      ThroughTorch([engine] {
        const GilReleaseIfHeld without_gil;  // may wait for a transfer
        engine->registry().FreeDeadSlots();
      });
    }
    if (facts_.like != LikeOp::kNone && AnswerLike(facts_.like, engine, stack)) return;
    if (!facts_.is_data_needed) {
      Redispatch(op, keys, stack);
      return FixResults(facts_, stack);
    }
    if (facts_.is_rebinding) return Rebind(engine, op, keys, stack);
    Run(engine, op, keys, stack);
    FixResults(facts_, stack);
  }

 private:
  static void Redispatch(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    op.redispatchBoxed(keys.remove_backend(c10::BackendComponent::PrivateUse2Bit), stack);
  }

  void Run(Engine* engine, const OperatorHandle& op, DispatchKeySet keys, Stack* stack) const {
    AccessSet set;
    const size_t begin = stack->size() - facts_.num_arguments;
    for (const OpFacts::TensorArgument& argument : facts_.tensors) {
      AddValue((*stack)[begin + argument.index], argument.is_written, &set);
    }
    if (set.empty()) return Redispatch(op, keys, stack);
    if (facts_.is_list_op && IsTooLarge(engine, set)) {
      const size_t length = ListLength(facts_, *stack);
      if (length > 1) return RunInParts(engine, op, keys, stack, length);
    }
    const TorchLease lease(engine, set.accesses(), facts_.name);
    Redispatch(op, keys, stack);
  }

  static bool IsTooLarge(Engine* engine, const AccessSet& set) {
    return !engine->store().CanHold(set.accesses());
  }

  // Halves the lists until each part fits. The ops that qualify work index by index, so the
  // results are those of the whole.
  void RunInParts(Engine* engine, const OperatorHandle& op, DispatchKeySet keys, Stack* stack,
                  size_t length) const {
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
  void Rebind(Engine* engine, const OperatorHandle& op, DispatchKeySet keys, Stack* stack) const {
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

  const OpFacts facts_;
};

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

// Composite ops that read data above the backend keys: guarded at the autograd key as well.
const std::set<std::string>& CompositeReaders() {
  static const std::set<std::string> readers = {"aten::tensor_split.tensor_indices_or_sections",
                                                "aten::ctc_loss.Tensor", "aten::ctc_loss.IntList",
                                                "aten::_pad_packed_sequence"};
  return readers;
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
    const std::string full_name =
        name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    if (CompositeReaders().count(full_name) != 0) {
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
    const size_t colons = full_name.find("::");
    Library(full_name.substr(0, colons), key)
        .impl(full_name.substr(colons + 2).c_str(),
              torch::CppFunction::makeFromBoxedFunctor(std::make_unique<GuardKernel>(op.schema())));
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
