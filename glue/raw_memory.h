// SPDX-License-Identifier: Apache-2.0
//
// RawMemory: the engine's own passes see chunk memory through tensors that the guard does
// not know: all of it under one op lease, or, when the budget cannot hold that, what goes
// by in the windows of a stream.
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

// What a window shows of one row of tensors, each flat in the order of memory.
struct RowPiece {
  size_t row = 0;
  std::vector<at::Tensor> tensors;
};

// Calls `pass` with piece after piece of the rows, several at a time; each row has tensors of one
// size and layout, managed ones in the chunk group that all rows share. False, and nothing was
// called, when that cannot be done. If the pass or the disk fails, managed tensors are as before.
// REQUIRES: as RunOnRawMemory. Throws: as RunOnRawMemory.
bool StreamRawMemory(Engine* engine, const std::vector<std::vector<at::Tensor>>& rows,
                     const std::vector<bool>& is_written,
                     const std::function<void(std::vector<RowPiece>)>& pass);

// The chunk group of a managed tensor that fills its slot; none for any other.
std::optional<size_t> GroupOf(const at::Tensor& tensor);

}  // namespace patrickstar
