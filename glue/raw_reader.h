// SPDX-License-Identifier: Apache-2.0
//
// RawReader: the Python type of a patched method. Calls the original, unless the first
// argument is a managed tensor or storage: then it calls the function that knows what to
// do. It is a method descriptor with a vectorcall, so that on all other tensors a call
// costs one test more.
#pragma once

#include <torch/csrc/python_headers.h>

namespace patrickstar {

// Adds the type to the module: RawReader(original, on_managed). REQUIRES: the GIL.
void RegisterRawReader(PyObject* module);

// The managed storage of a tensor or of a storage object; null for everything else.
class ManagedStorage;
ManagedStorage* ManagedStorageIn(PyObject* object);

}  // namespace patrickstar
