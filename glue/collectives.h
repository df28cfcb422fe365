// SPDX-License-Identifier: Apache-2.0
//
// CollectiveKernel: the guard for ops of torch.distributed (c10d::). Such an op returns
// before it is done: another thread reads and writes its tensors until the Work that it
// returned completes. So their chunks are held, not leased for the op, and the hold ends
// with the Work: by a callback of its future, or, where the backend gives none (send and
// receive), when the caller has waited for it or dropped it.
//
// The dispatcher does not look into lists of lists for keys. Ops that have one are caught
// at a key that every call has, BackendSelect, which they do not use.
//
// The schemas do not say what is written; all arguments count as written whose name does
// not say that they are input. Any thread may be inside it; holds end on the backend's.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>
#include <vector>

#include "patrickstar/base/types.h"

namespace patrickstar {

class CollectiveKernel final : public c10::OperatorKernel {
 public:
  // `below`: the keys that the dispatcher goes on with, as far as the call has them.
  CollectiveKernel(const c10::FunctionSchema& schema, c10::DispatchKeySet below);

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) const;

 private:
  const std::string name_;
  const c10::DispatchKeySet below_;
  std::vector<Access> accesses_;  // by argument
};

}  // namespace patrickstar
