// SPDX-License-Identifier: Apache-2.0
#include "glue/errors.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <array>
#include <string>

namespace patrickstar {
namespace {

enum ErrorClass : size_t {
  kError,
  kInvalidArgument,
  kOutOfMemory,
  kIoError,
  kCorruptData,
  kUnsupported,
  kTimeout,
  kNumErrorClasses,
};

// Borrowed for the life of the process: patrickstar.errors keeps the classes.
std::array<PyObject*, kNumErrorClasses> error_classes{};

ErrorClass ClassOf(const Error& error) {
  if (dynamic_cast<const InvalidArgument*>(&error) != nullptr) return kInvalidArgument;
  if (dynamic_cast<const OutOfMemory*>(&error) != nullptr) return kOutOfMemory;
  if (dynamic_cast<const IoError*>(&error) != nullptr) return kIoError;
  if (dynamic_cast<const CorruptData*>(&error) != nullptr) return kCorruptData;
  if (dynamic_cast<const Unsupported*>(&error) != nullptr) return kUnsupported;
  if (dynamic_cast<const Timeout*>(&error) != nullptr) return kTimeout;
  return kError;
}

PyObject* PythonClassOf(const Error& error) {
  PyObject* const python_class = error_classes[ClassOf(error)];
  return python_class != nullptr ? python_class : PyExc_RuntimeError;
}

struct KernelError final : torch::PyTorchError {
  KernelError(const std::string& message, PyObject* type)
      : torch::PyTorchError(message), python_class(type) {}
  PyObject* python_type() override { return python_class; }

  PyObject* python_class;
};

}  // namespace

void SetErrorClasses(PyObject* module) {
  constexpr std::array<const char*, kNumErrorClasses> kNames = {
      "Error",       "InvalidArgument", "OutOfMemory", "IoError",
      "CorruptData", "Unsupported",     "Timeout"};
  for (size_t index = 0; index < kNames.size(); ++index) {
    PyObject* const python_class = PyObject_GetAttrString(module, kNames[index]);
    if (python_class == nullptr) throw pybind11::error_already_set();
    error_classes[index] = python_class;
  }
}

void RegisterErrorTranslator() {
  pybind11::register_local_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const IoError& error) {
      const auto arguments = pybind11::make_tuple(error.what(), error.error_number());
      PyErr_SetObject(PythonClassOf(error), arguments.ptr());
    } catch (const Error& error) {
      PyErr_SetString(PythonClassOf(error), error.what());
    } catch (torch::PyTorchError& error) {
      PyErr_SetString(error.python_type(), error.what());
    }
  });
}

void ThrowThroughTorch(const Error& error) {
  throw KernelError(error.what(), PythonClassOf(error));
}

}  // namespace patrickstar
