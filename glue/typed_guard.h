// SPDX-License-Identifier: Apache-2.0
//
// Typed guards: the guard for the ops that are called most and do least, as kernels
// of the op's own types. Putting arguments on torch's stack and taking them off costs more
// than the lease; these never do. They lease and redispatch as GuardKernel does.
#pragma once

#include <torch/library.h>

#include <optional>
#include <string>

namespace patrickstar {

// The typed guard of an op ("aten::add.Tensor"); nothing for ops that have none.
std::optional<torch::CppFunction> MakeTypedGuard(const std::string& full_name);

}  // namespace patrickstar
