// SPDX-License-Identifier: Apache-2.0
//
// Gradients: moving a fresh gradient into its parameter's chunk group. Called by the
// post-accumulate hook of every managed parameter.
#pragma once

#include <ATen/core/Tensor.h>

#include "glue/engine.h"

namespace patrickstar {

// Replaces a plain dense gradient of `parameter` by a managed tensor with the same bytes,
// shape and strides. Leaves alone what is undefined, not strided, managed, part of a graph
// (create_graph), or known to Python: the user's own buffer, or one that a hook has seen. Always a
// copy: gradients of cat share one storage. Throws: OutOfMemory, IoError as torch::PyTorchError;
// the gradient is unchanged then.
void TakeGradient(Engine* engine, const at::Tensor& parameter);

}  // namespace patrickstar
