// SPDX-License-Identifier: Apache-2.0
//
// Gradients: moving a fresh gradient into its parameter's chunk group, called by the
// post-accumulate hook of every managed parameter; and what the guard does about one without
// its bytes: answers its norm, puts a multiplication off.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "glue/engine.h"

namespace patrickstar {

// Replaces a plain dense gradient of `parameter` by a managed tensor with the same bytes,
// shape and strides. Leaves alone what is undefined, not strided, managed, part of a graph
// (create_graph), or known to Python: the user's own buffer, or one that a hook has seen. Always a
// copy: gradients of cat share one storage. Throws: OutOfMemory, IoError as torch::PyTorchError;
// the gradient is unchanged then. Its norm is noted where norms are wanted, also after a managed
// one was added to.
void TakeGradient(Engine* engine, const at::Tensor& parameter);

// The 2-norm of a managed gradient, a tensor of its own, if it is known.
std::optional<at::Tensor> FindNorm(Engine* engine, const at::Tensor& tensor);

// Puts off `tensor *= factor` when `tensor` is a gradient out of memory. False: multiply now.
bool PutOffFactor(Engine* engine, const at::Tensor& tensor, const at::Tensor& factor);

// The same for each of a list; returns those that are to be multiplied now.
std::vector<at::Tensor> PutOffFactor(Engine* engine, at::TensorList tensors,
                                     const at::Tensor& factor);

}  // namespace patrickstar
