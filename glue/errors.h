// SPDX-License-Identifier: Apache-2.0
//
// Errors: from the C++ tree to the Python classes of the same names. Inside a kernel
// the exception must be a torch::PyTorchError, which torch's bindings and autograd
// carry to the caller; functions of our own module use a pybind11 translator.
#pragma once

#include <torch/csrc/python_headers.h>

#include <utility>

#include "patrickstar/base/error.h"

namespace patrickstar {

// Remembers the Python classes: an object with an attribute for each class of the tree.
// REQUIRES: the GIL.
void SetErrorClasses(PyObject* module);

// Registers the translator for functions of this module. REQUIRES: the GIL.
void RegisterErrorTranslator();

// Throws `error` so that torch turns it into its Python class.
[[noreturn]] void ThrowThroughTorch(const Error& error);

// Calls `body`, and throws what it throws from our tree through torch.
template <typename Body>
decltype(auto) ThroughTorch(Body&& body) {
  try {
    return std::forward<Body>(body)();
  } catch (const Error& error) {
    ThrowThroughTorch(error);
  }
}

}  // namespace patrickstar
