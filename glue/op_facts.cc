// SPDX-License-Identifier: Apache-2.0
#include "glue/op_facts.h"

#include <ATen/core/jit_type.h>

#include <algorithm>
#include <array>
#include <string_view>

namespace patrickstar {
namespace {

using namespace std::string_view_literals;

// Allocations whose result depends on the argument's metadata alone.
constexpr std::array kAllocations = {
    "aten::empty_like"sv, "aten::zeros_like"sv, "aten::ones_like"sv,    "aten::full_like"sv,
    "aten::rand_like"sv,  "aten::randn_like"sv, "aten::randint_like"sv, "aten::new_empty"sv,
    "aten::new_zeros"sv,  "aten::new_ones"sv,   "aten::new_full"sv,     "aten::new_empty_strided"sv,
};

bool MayHoldTensors(const c10::TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
    case c10::TypeKind::AnyType:
      return true;
    case c10::TypeKind::OptionalType:
    case c10::TypeKind::ListType:
      return MayHoldTensors(type->containedType(0));
    default:
      return false;
  }
}

bool IsTensorList(const c10::TypePtr& type) {
  return type->kind() == c10::TypeKind::ListType && MayHoldTensors(type);
}

// Running statistics are written also by ops whose schema does not say so.
bool IsWritten(const c10::Argument& argument) {
  const bool is_marked = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  return is_marked || argument.name() == "running_mean" || argument.name() == "running_var";
}

// A view of its only tensor. One with a second tensor reads that: where to split, say.
bool IsPureView(const c10::FunctionSchema& schema) {
  const auto is_alias = [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  };
  const auto holds_tensors = [](const c10::Argument& argument) {
    return MayHoldTensors(argument.type());
  };
  return schema.name().starts_with("aten::") && !schema.returns().empty() &&
         std::count_if(schema.arguments().begin(), schema.arguments().end(), holds_tensors) == 1 &&
         std::none_of(schema.arguments().begin(), schema.arguments().end(), &IsWritten) &&
         std::all_of(schema.returns().begin(), schema.returns().end(), is_alias);
}

bool MayResize(const c10::FunctionSchema& schema) {
  const auto is_out = [](const c10::Argument& argument) { return argument.is_out(); };
  return schema.name().starts_with("aten::resize") ||
         schema.name().starts_with("aten::_resize_output") ||
         std::any_of(schema.arguments().begin(), schema.arguments().end(), is_out);
}

LikeOp LikeOpOf(const std::string& name, const std::string& overload) {
  if (!overload.empty()) return LikeOp::kNone;
  if (name == "aten::empty_like") return LikeOp::kEmpty;
  if (name == "aten::zeros_like") return LikeOp::kZeros;
  if (name == "aten::ones_like") return LikeOp::kOnes;
  if (name == "aten::full_like") return LikeOp::kFull;
  if (name == "aten::clone") return LikeOp::kClone;
  return LikeOp::kNone;
}

// Packed weights of quantized layers and the like. (The work that collectives return is of
// the kind too; they have a guard of their own.)
bool IsKeeping(const c10::FunctionSchema& schema) {
  const auto& returns = schema.returns();
  return std::any_of(returns.begin(), returns.end(), [](const c10::Argument& result) {
    return result.type()->kind() == c10::TypeKind::ClassType;
  });
}

bool IsListOp(const c10::FunctionSchema& schema) {
  const std::string& name = schema.name();
  const bool is_known = name.starts_with("aten::_foreach_") || name.starts_with("aten::_fused_") ||
                        name.starts_with("aten::_amp_foreach_");
  const auto& arguments = schema.arguments();
  return is_known && std::any_of(arguments.begin(), arguments.end(), [](const auto& argument) {
           return IsTensorList(argument.type());
         });
}

}  // namespace

OpFacts::OpFacts(const c10::FunctionSchema& schema)
    : name(c10::toString(schema.operator_name())),
      num_arguments(schema.arguments().size()),
      num_returns(schema.returns().size()),
      is_lazy_clone(schema.name() == "aten::_lazy_clone"),
      is_rebinding(schema.name() == "aten::set_"),
      may_resize(MayResize(schema)),
      is_list_op(IsListOp(schema)),
      is_keeping(IsKeeping(schema)),
      like(LikeOpOf(schema.name(), schema.overload_name())) {
  for (size_t index = 0; index < num_arguments; ++index) {
    const c10::Argument& argument = schema.arguments()[index];
    if (!MayHoldTensors(argument.type())) continue;
    tensor_arguments.push_back(index);
    if (IsWritten(argument)) written_arguments |= uint64_t{1} << index;
  }
  for (size_t index = 0; index < num_returns; ++index) {
    if (MayHoldTensors(schema.returns()[index].type())) tensor_returns.push_back(index);
  }
  const bool is_allocation =
      std::find(kAllocations.begin(), kAllocations.end(), schema.name()) != kAllocations.end();
  is_data_needed = !is_allocation && !IsPureView(schema);
}

}  // namespace patrickstar
