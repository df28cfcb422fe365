// SPDX-License-Identifier: Apache-2.0
#include "glue/raw_reader.h"

#include <pybind11/pybind11.h>
#include <structmember.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstddef>

#include "glue/managed_storage.h"

namespace patrickstar {
namespace {

struct RawReader {
  PyObject_HEAD PyObject* original;
  PyObject* on_managed;
  PyObject* dict;  // name and docstring of the original
  vectorcallfunc vectorcall;
};

PyObject* Call(PyObject* self, PyObject* const* args, size_t num_args, PyObject* keywords) {
  const auto* const reader = reinterpret_cast<const RawReader*>(self);
  const bool is_managed = PyVectorcall_NARGS(num_args) > 0 && ManagedStorageIn(args[0]) != nullptr;
  return PyObject_Vectorcall(is_managed ? reader->on_managed : reader->original, args, num_args,
                             keywords);
}

PyObject* New(PyTypeObject* type, PyObject* args, PyObject* /*keywords*/) {
  PyObject* original = nullptr;
  PyObject* on_managed = nullptr;
  if (PyArg_ParseTuple(args, "OO:RawReader", &original, &on_managed) == 0) return nullptr;
  PyObject* const self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  auto* const reader = reinterpret_cast<RawReader*>(self);
  Py_INCREF(original);
  Py_INCREF(on_managed);
  reader->original = original;
  reader->on_managed = on_managed;
  reader->dict = PyDict_New();
  reader->vectorcall = &Call;
  return self;
}

int Traverse(PyObject* self, visitproc visit, void* arg) {
  const auto* const reader = reinterpret_cast<const RawReader*>(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(reader->original);
  Py_VISIT(reader->on_managed);
  Py_VISIT(reader->dict);
  return 0;
}

int Clear(PyObject* self) {
  auto* const reader = reinterpret_cast<RawReader*>(self);
  Py_CLEAR(reader->original);
  Py_CLEAR(reader->on_managed);
  Py_CLEAR(reader->dict);
  return 0;
}

void Dealloc(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  Clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// Of an instance: the method bound to it. (A call on an instance does not come here.)
PyObject* Bind(PyObject* self, PyObject* instance, PyObject* /*type*/) {
  if (instance == nullptr) return Py_NewRef(self);
  return PyMethod_New(self, instance);
}

template <typename Function>
void* Slot(Function* function) {
  return reinterpret_cast<void*>(function);
}

PyObject* MakeType() {
  static PyMemberDef members[] = {
      {"__dictoffset__", T_PYSSIZET, offsetof(RawReader, dict), READONLY, nullptr},
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(RawReader, vectorcall), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  static PyGetSetDef properties[] = {
      {"__dict__", &PyObject_GenericGetDict, &PyObject_GenericSetDict, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_new, Slot(&New)},
                                {Py_tp_call, Slot(&PyVectorcall_Call)},
                                {Py_tp_descr_get, Slot(&Bind)},
                                {Py_tp_traverse, Slot(&Traverse)},
                                {Py_tp_clear, Slot(&Clear)},
                                {Py_tp_dealloc, Slot(&Dealloc)},
                                {Py_tp_members, static_cast<void*>(members)},
                                {Py_tp_getset, static_cast<void*>(properties)},
                                {0, nullptr}};
  static PyType_Spec spec = {.name = "patrickstar._C.RawReader",
                             .basicsize = sizeof(RawReader),
                             .itemsize = 0,
                             .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC |
                                      Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
                             .slots = slots};
  return PyType_FromSpec(&spec);
}

}  // namespace

void RegisterRawReader(PyObject* module) {
  PyObject* const type = MakeType();
  if (type == nullptr || PyModule_AddObjectRef(module, "RawReader", type) != 0) {
    throw pybind11::error_already_set();
  }
  Py_DECREF(type);
}

ManagedStorage* ManagedStorageIn(PyObject* object) {
  if (THPVariable_Check(object)) {
    const at::Tensor& tensor = THPVariable_Unpack(object);
    return tensor.defined() ? ManagedStorageOf(tensor) : nullptr;
  }
  if (THPStorage_CheckExact(object)) {
    return ManagedStorageOf(THPStorage_Unpack(object).unsafeGetStorageImpl());
  }
  if (torch::isStorage(object)) {
    return ManagedStorageOf(torch::createStorage(object).unsafeGetStorageImpl());
  }
  return nullptr;
}

}  // namespace patrickstar
