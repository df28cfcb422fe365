// SPDX-License-Identifier: Apache-2.0
//
// OpFacts: what the guard has to know of an op's schema, computed once when its kernel
// is registered: which arguments are tensors, which of them are written, whether the op
// reads data at all, and whether a list op may be run part by part.
#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <string>

namespace patrickstar {

// Allocations that a native optimizer makes for its state: answered with a managed tensor.
enum class LikeOp : uint8_t { kNone, kEmpty, kZeros, kOnes, kFull, kClone };

struct OpFacts {
  explicit OpFacts(const c10::FunctionSchema& schema);

  bool is_written(size_t argument) const { return ((written_arguments >> argument) & 1) != 0; }

  std::string name;                              // "aten::add.Tensor"
  c10::SmallVector<size_t, 6> tensor_arguments;  // also lists and optionals of tensors
  c10::SmallVector<size_t, 4> tensor_returns;
  uint64_t written_arguments = 0;  // a bit each
  size_t num_arguments = 0;
  size_t num_returns = 0;
  bool is_data_needed = true;  // false for pure views and for allocations like another tensor
  bool is_lazy_clone = false;  // shares memory until it is written
  bool is_rebinding = false;   // set_: gives one tensor another's storage
  bool may_resize = false;     // gives tensors that it writes memory of another size
  bool is_list_op = false;     // works index by index on lists of one length
  bool is_keeping = false;     // returns an object that keeps arguments, to be read raw later
  LikeOp like = LikeOp::kNone;
};

// Calls `visit` with each tensor of an argument: itself, or the elements of its lists.
template <typename Visit>
void ForEachTensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.unsafeToTensorImpl());
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) ForEachTensor(element, visit);
  }
}

}  // namespace patrickstar
