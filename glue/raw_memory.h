// SPDX-License-Identifier: Apache-2.0
//
// RawMemory: the engine's own passes see chunk memory through tensors that the guard does
// not know, under one op lease for all of them. A pass takes what it likes of it, in any
// order and in ranges, and pays for no lease of its own.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "glue/engine.h"

namespace patrickstar {

// Calls `pass` with one tensor for each of `tensors`: over the memory of a managed one, and
// the tensor itself when it is ordinary. What `is_written` says is dirty afterwards. False,
// and nothing was called, when the budget cannot hold them at once.
// REQUIRES: managed ones fill their slots; the pass keeps no tensor that it was given.
// Throws: IoError, CorruptData as torch::PyTorchError, and what the pass throws.
bool RunOnRawMemory(Engine* engine, const std::vector<at::Tensor>& tensors,
                    const std::vector<bool>& is_written, const std::string& what,
                    const std::function<void(std::vector<at::Tensor>)>& pass);

// The chunk group of a managed tensor that fills its slot; none for any other.
std::optional<size_t> GroupOf(const at::Tensor& tensor);

}  // namespace patrickstar
