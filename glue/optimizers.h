// SPDX-License-Identifier: Apache-2.0
//
// Optimizers: what the engine does for an optimizer that runs its own code. A native
// optimizer allocates all its state before its first update, so while a step runs on
// this thread, allocations like a managed tensor are answered with managed tensors: in
// the chunk group of the tensor they are like, without bytes while known zero. Outside a
// step, so are constants like a trainable parameter: state made in a constructor.
#pragma once

#include <ATen/core/stack.h>
#include <pybind11/pybind11.h>

#include "glue/engine.h"
#include "glue/op_facts.h"

namespace patrickstar {

// Brackets a native step on this thread. Steps may be nested. `frame` is the Python frame
// that runs the step: when it has left the stack without an EndNativeStep, because the
// step threw, the step has ended all the same. REQUIRES: the GIL.
void BeginNativeStep(pybind11::object frame);
void EndNativeStep();

// Replaces the op's arguments by a managed result and returns true. False when the op is
// not one to answer; the stack is unchanged then.
bool AnswerLike(LikeOp like, Engine* engine, torch::jit::Stack* stack);

// Moves plain optimizer state of `parameter`'s size into the parameter's chunk group, in
// place. False when it is left alone: managed already, another size, shared, not dense.
bool AdoptState(Engine* engine, const at::Tensor& parameter, const at::Tensor& state);

}  // namespace patrickstar
