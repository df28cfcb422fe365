// SPDX-License-Identifier: Apache-2.0
//
// OpFacts: what the guard has to know of an op's schema, computed once when its kernel
// is registered: which arguments are tensors, which of them are written, whether the op
// reads data at all, and whether a list op may be run part by part.
#pragma once

#include <ATen/core/function_schema.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <string>

namespace patrickstar {

// Allocations that a native optimizer makes for its state: answered with a managed tensor.
enum class LikeOp : uint8_t { kNone, kEmpty, kZeros, kOnes, kFull, kClone };

struct OpFacts {
  struct TensorArgument {
    size_t index = 0;  // from the first argument
    bool is_written = false;
  };

  explicit OpFacts(const c10::FunctionSchema& schema);

  std::string name;                             // "aten::add.Tensor"
  c10::SmallVector<TensorArgument, 6> tensors;  // also lists and optionals of tensors
  c10::SmallVector<size_t, 4> tensor_returns;
  size_t num_arguments = 0;
  size_t num_returns = 0;
  bool is_data_needed = true;  // false for pure views and for allocations like another tensor
  bool is_rebinding = false;   // set_: gives one tensor another's storage
  bool is_list_op = false;     // works index by index on lists of one length
  LikeOp like = LikeOp::kNone;
};

}  // namespace patrickstar
