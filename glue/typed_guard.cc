// SPDX-License-Identifier: Apache-2.0
#include "glue/typed_guard.h"

#include <ATen/core/IListRef.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_foreach_add_ops.h>
#include <ATen/ops/_foreach_addcdiv_ops.h>
#include <ATen/ops/_foreach_addcmul_ops.h>
#include <ATen/ops/_foreach_div_ops.h>
#include <ATen/ops/_foreach_lerp_ops.h>
#include <ATen/ops/_foreach_mul_ops.h>
#include <ATen/ops/_foreach_sqrt_ops.h>
#include <ATen/ops/_unsafe_view_ops.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addcdiv_ops.h>
#include <ATen/ops/addcmul_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/alias_ops.h>
#include <ATen/ops/as_strided_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/cat_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/detach_ops.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/embedding_ops.h>
#include <ATen/ops/expand_ops.h>
#include <ATen/ops/lerp_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/native_layer_norm_ops.h>
#include <ATen/ops/permute_ops.h>
#include <ATen/ops/select_ops.h>
#include <ATen/ops/slice_ops.h>
#include <ATen/ops/split_ops.h>
#include <ATen/ops/sqrt_ops.h>
#include <ATen/ops/sub_ops.h>
#include <ATen/ops/t_ops.h>
#include <ATen/ops/transpose_ops.h>
#include <ATen/ops/unsqueeze_ops.h>
#include <ATen/ops/view_ops.h>

#include <memory>
#include <type_traits>
#include <unordered_map>

#include "glue/access_set.h"
#include "glue/engine.h"
#include "glue/guard_kernel.h"
#include "glue/op_facts.h"

namespace patrickstar {
namespace {

namespace ops = at::_ops;

void AddArgument(const at::Tensor& tensor, bool is_written, AccessSet* set) {
  if (tensor.defined()) set->Add(tensor.unsafeGetTensorImpl(), is_written);
}
void AddArgument(const std::optional<at::Tensor>& tensor, bool is_written, AccessSet* set) {
  if (tensor) AddArgument(*tensor, is_written, set);
}
void AddArgument(at::TensorList tensors, bool is_written, AccessSet* set) {
  for (const at::Tensor& tensor : tensors) AddArgument(tensor, is_written, set);
}
void AddArgument(const at::ITensorListRef& tensors, bool is_written, AccessSet* set) {
  for (const at::Tensor& tensor : tensors) AddArgument(tensor, is_written, set);
}

template <typename T>
constexpr bool kHoldsTensors =
    std::is_same_v<T, at::Tensor> || std::is_same_v<T, std::optional<at::Tensor>> ||
    std::is_same_v<T, at::TensorList> || std::is_same_v<T, at::ITensorListRef>;

// Of one op of torch's C++ interface.
template <typename Op, typename Schema = typename Op::schema>
class TypedGuard;

template <typename Op, typename Result, typename... Arguments>
class TypedGuard<Op, Result(Arguments...)> {
 public:
  static Result Call(c10::DispatchKeySet keys, Arguments... arguments) {
    Engine* const engine = Engine::Get();
    if (engine == nullptr) return Op::redispatch(BelowGuard(keys), arguments...);
    if (has_dead_slots()) FreeDeadSlots(engine);
    static const OpFacts facts(Handle().schema());
    // Results of these views have their argument's keys.
    if (!facts.is_data_needed) return Op::redispatch(BelowGuard(keys), arguments...);
    AccessSet set;
    size_t index = 0;
    (AddIfTensor(arguments, facts.is_written(index++), &set), ...);
    if (set.empty() || OpScope::IsCovered(set.accesses())) {
      return Op::redispatch(BelowGuard(keys), arguments...);
    }
    if constexpr (kIsListOp) {
      if (!engine->store().CanHold(set.accesses())) return CallInParts(keys, arguments...);
    }
    const OpScope scope(engine, set.accesses(), facts.name);
    return Op::redispatch(BelowGuard(keys), arguments...);
  }

 private:
  static constexpr bool kIsListOp = (std::is_same_v<Arguments, at::TensorList> || ...);

  static const c10::OperatorHandle& Handle() {
    static const c10::OperatorHandle handle =
        c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
    return handle;
  }

  template <typename Argument>
  static void AddIfTensor(const Argument& argument, bool is_written, AccessSet* set) {
    if constexpr (kHoldsTensors<Argument>) AddArgument(argument, is_written, set);
  }

  // Lists larger than the budget are for the kernel that can halve them.
  static Result CallInParts(c10::DispatchKeySet keys, Arguments... arguments) {
    static const c10::BoxedKernel kernel =
        c10::BoxedKernel::makeFromFunctor(std::make_unique<GuardKernel>(Handle().schema()));
    return c10::impl::BoxedKernelWrapper<Result(Arguments...)>::call(kernel, Handle(), keys,
                                                                     arguments...);
  }
};

using Maker = torch::CppFunction (*)();

template <typename Op>
torch::CppFunction Make() {
  return torch::CppFunction(TORCH_FN(&TypedGuard<Op>::Call));
}

template <typename... Op>
std::unordered_map<std::string, Maker> MakersOf() {
  return {{c10::toString(c10::OperatorName(Op::name, Op::overload_name)), &Make<Op>}...};
}

}  // namespace

std::optional<torch::CppFunction> MakeTypedGuard(const std::string& full_name) {
  static const auto* const makers = new std::unordered_map<std::string, Maker>(
      MakersOf<
          // views
          ops::alias, ops::as_strided, ops::detach, ops::expand, ops::permute, ops::select_int,
          ops::slice_Tensor, ops::split_Tensor, ops::t, ops::transpose_int, ops::unsqueeze,
          ops::view, ops::_unsafe_view,
          // layers
          ops::addmm, ops::bmm, ops::cat, ops::embedding, ops::mm, ops::native_layer_norm,
          // elementwise
          ops::add_Tensor, ops::add_Scalar, ops::div_Tensor, ops::mul_Tensor, ops::mul_Scalar,
          ops::sqrt, ops::sub_Tensor,
          // of optimizers
          ops::add__Tensor, ops::add__Scalar, ops::addcdiv_, ops::addcmul_, ops::copy_,
          ops::div__Scalar, ops::div__Tensor, ops::lerp__Scalar, ops::mul__Scalar, ops::mul__Tensor,
          ops::_foreach_add__List, ops::_foreach_add__Scalar, ops::_foreach_add__Tensor,
          ops::_foreach_addcdiv__Scalar, ops::_foreach_addcdiv__ScalarList,
          ops::_foreach_addcmul__Scalar, ops::_foreach_div__ScalarList, ops::_foreach_lerp__Scalar,
          ops::_foreach_mul__Scalar, ops::_foreach_mul__Tensor, ops::_foreach_sqrt>());
  const auto found = makers->find(full_name);
  if (found == makers->end()) return std::nullopt;
  return found->second();
}

}  // namespace patrickstar
