// SPDX-License-Identifier: Apache-2.0
//
// patrickstar._C: one register function for each noun. Types and docstrings for users
// are in Python; _C.pyi lists what is here.
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <vector>

#include "glue/adoption.h"
#include "glue/engine.h"
#include "glue/errors.h"
#include "glue/fused_steps.h"
#include "glue/gradients.h"
#include "glue/guard.h"
#include "glue/heap.h"
#include "glue/hold.h"
#include "glue/managed_storage.h"
#include "glue/optimizers.h"
#include "glue/raw_memory.h"
#include "glue/raw_reader.h"
#include "patrickstar/base/error.h"

namespace py = pybind11;

namespace patrickstar {
namespace {

Engine* Running() {
  Engine* const engine = Engine::Get();
  if (engine == nullptr) throw Error("management is off; call patrickstar.init() first");
  return engine;
}

void TuneMalloc(bool is_building) {
  Engine* const engine = Engine::Get();
  const bool is_spilling = engine != nullptr && engine->store().stats().counters.num_evictions != 0;
  TuneHeap(is_building ? HeapUse::kBuilding
                       : (is_spilling ? HeapUse::kSpilling : HeapUse::kResident));
}

py::dict StatsAsDict() {
  const StoreStats stats = Running()->store().stats();
  py::dict result;
  result["host_budget_bytes"] = stats.budget_bytes;
  result["host_resident_bytes"] = stats.resident_bytes;
  result["host_peak_bytes"] = stats.peak_bytes;
  result["managed_bytes"] = stats.managed_bytes;
  result["disk_budget_bytes"] = Running()->options().disk_bytes;
  result["disk_used_bytes"] = stats.disk_used_bytes;
  result["fetched_bytes"] = stats.counters.fetched_bytes;
  result["evicted_bytes"] = stats.counters.evicted_bytes;
  result["spilled_bytes"] = stats.disk_written_bytes;
  result["read_bytes"] = stats.disk_read_bytes;
  result["num_chunks"] = stats.num_chunks;
  result["num_fetches"] = stats.counters.num_fetches;
  result["num_evictions"] = stats.counters.num_evictions;
  result["num_leases"] = stats.num_held_leases;
  result["held_bytes"] = stats.held_bytes;
  result["num_op_leases"] = stats.counters.num_op_leases;
  result["stall_seconds"] = stats.counters.stall_seconds;
  result["mapped_bytes"] = stats.mapped_bytes;
  result["mapped_peak_bytes"] = stats.peak_mapped_bytes;
  return result;
}

// Adds what a tensor or storage object has in managed memory.
void AddHeld(PyObject* object, Access access, std::vector<HeldStorage>* storages) {
  if (ManagedStorage* const storage = ManagedStorageIn(object)) {
    storages->push_back(
        {.storage = c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage)),
         .access = access});
  }
}

std::unique_ptr<Hold> MakeHold(const py::iterable& objects, bool is_written,
                               const std::string& what) {
  Engine* const engine = Engine::Get();  // null: another thread has just stopped it
  std::vector<HeldStorage> storages;
  for (const py::handle& object : objects) {
    AddHeld(object.ptr(), is_written ? Access::kWrite : Access::kRead, &storages);
  }
  return std::make_unique<Hold>(engine, std::move(storages), what);
}

// A hold on what a compiled graph takes, for writing at the indexes in `written`; none when
// nothing of it is managed.
std::unique_ptr<Hold> HoldInputs(const py::sequence& inputs, const py::handle& written,
                                 const py::handle& what) {
  Engine* const engine = Engine::Get();
  std::vector<HeldStorage> storages;
  for (size_t index = 0; engine != nullptr && index < inputs.size(); ++index) {
    const py::object input = inputs[index];
    if (ManagedStorageIn(input.ptr()) == nullptr) continue;
    AddHeld(input.ptr(), written.contains(index) ? Access::kWrite : Access::kRead, &storages);
  }
  if (storages.empty()) return nullptr;
  return std::make_unique<Hold>(engine, std::move(storages), py::cast<std::string>(what));
}

void RegisterEngine(py::module_& module) {
  module.def("set_error_classes", [](const py::object& owner) { SetErrorClasses(owner.ptr()); });
  module.def("install_guard", &InstallGuard);
  module.def("skip_read_leases", &SkipReadLeases);
  module.def(
      "set_observed",
      [](bool is_observed) {
        if (Engine* const engine = Engine::Get()) engine->registry().SetObserved(is_observed);
      },
      py::call_guard<py::gil_scoped_release>());
  module.def("tune_malloc", &TuneMalloc, py::arg("is_building"));
  module.def(
      "start",
      [](int64_t host_bytes, int64_t chunk_bytes, const std::string& spill_dir, int64_t disk_bytes,
         bool evict, bool poison, bool delay) {
        Engine::Start({.host_bytes = host_bytes,
                       .chunk_bytes = chunk_bytes,
                       .spill_dir = spill_dir,
                       .disk_bytes = disk_bytes,
                       .stress = {.evict = evict, .poison = poison},
                       .is_delay_stressed = delay});
      },
      py::kw_only(), py::arg("host_bytes"), py::arg("chunk_bytes"), py::arg("spill_dir"),
      py::arg("disk_bytes"), py::arg("evict"), py::arg("poison"), py::arg("delay"));
  module.def("stop", &Engine::Stop, py::call_guard<py::gil_scoped_release>());
  module.def("stop_at_exit", &Engine::StopAtExit, py::call_guard<py::gil_scoped_release>());
  module.def("is_running", [] { return Engine::Get() != nullptr; });
  module.def("stats", &StatsAsDict);
  module.def("held_bytes", [] { return Running()->store().held_bytes(); });
  module.def("host_bytes", [] { return Running()->store().host_bytes(); });
  module.def(
      "free_dead_slots", [] { Running()->registry().FreeDeadSlots(); },
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "evict_all", [] { Running()->store().EvictAll(); }, py::call_guard<py::gil_scoped_release>());
  module.def(
      "set_host_bytes", [](int64_t num_bytes) { Running()->store().set_host_bytes(num_bytes); },
      py::call_guard<py::gil_scoped_release>());
  module.def("throw_pending_failure", [] { Running()->store().ThrowPendingFailure(); });
}

void RegisterHolds(py::module_& module) {
  py::class_<Hold>(module, "Hold")
      .def(py::init(&MakeHold), py::arg("tensors_or_storages"), py::kw_only(),
           py::arg("is_written"), py::arg("what"))
      .def("release", &Hold::Release)
      .def("__enter__", [](const py::object& self) { return self; })
      .def("__exit__", [](Hold& self, const py::args&) { self.Release(); });
  module.def("hold_inputs", &HoldInputs, py::arg("inputs"), py::arg("written"), py::arg("what"));
  py::class_<OutsideBytes>(module, "Reservation").def("release", &OutsideBytes::Release);
  module.def(
      "reserve",
      [](int64_t num_bytes) { return Running()->store().Reserve(num_bytes, "building a model"); },
      py::call_guard<py::gil_scoped_release>());
  RegisterRawReader(module.ptr());
  module.def("flat_view", [](const py::handle& storage, at::ScalarType dtype) {
    return FlatView(torch::createStorage(storage.ptr()), c10::scalarTypeToTypeMeta(dtype));
  });
}

void RegisterAdoption(py::module_& module) {
  py::enum_<Adoption>(module, "Adoption")
      .value("DONE", Adoption::kDone)
      .value("ALREADY", Adoption::kAlready)
      .value("ALIASED", Adoption::kAliased)
      .value("OVERLAPPING", Adoption::kOverlapping)
      .value("LEFT_ALONE", Adoption::kLeftAlone);
  module.def("adopt",
             [](const std::vector<at::Tensor>& tensors, const std::vector<std::string>& names) {
               return Adopt(Running(), tensors, names);
             });
  module.def("unmanage", [](const at::Tensor& tensor) {
    if (Engine* const engine = Engine::Get()) Unmanage(engine, tensor);
  });
  module.def(
      "unmanage_storage",
      [](const py::handle& storage, const std::string& what) {
        if (ManagedStorage* const managed = ManagedStorageIn(storage.ptr())) {
          UnmanageStorage(Running(), managed, what);
        }
      },
      py::arg("storage"), py::arg("what"));
  module.def("is_managed", [](const py::handle& tensor_or_storage) {
    return ManagedStorageIn(tensor_or_storage.ptr()) != nullptr;
  });
  module.def("name_of", [](const py::handle& tensor_or_storage) {
    ManagedStorage* const storage = ManagedStorageIn(tensor_or_storage.ptr());
    return storage == nullptr ? std::string() : Running()->registry().NameOf(storage);
  });
  module.def("rename", [](const at::Tensor& tensor, const std::string& name) {
    if (ManagedStorage* const storage = ManagedStorageOf(tensor)) {
      Running()->registry().Rename(storage, name);
    }
  });
}

void RegisterOptimizers(py::module_& module) {
  module.def(
      "begin_native_step",
      [](py::object frame) {
        BeginNativeStep(std::move(frame));
        Running()->landing_zone().BeginStep();
      },
      py::arg("frame"));
  module.def("end_native_step", [] {
    EndNativeStep();
    Running()->landing_zone().EndStep();
  });
  module.def(
      "run_on_raw_memory",
      [](const std::vector<at::Tensor>& tensors, const std::vector<bool>& is_written,
         const std::string& what, const py::function& run) {
        return RunOnRawMemory(Running(), tensors, is_written, what,
                              [&run](std::vector<at::Tensor> raw) { run(std::move(raw)); });
      },
      py::arg("tensors"), py::arg("is_written"), py::arg("what"), py::arg("run"));
  module.def(
      "stream_raw_memory",
      [](const std::vector<std::vector<at::Tensor>>& rows, const std::vector<bool>& is_written,
         const py::function& run) {
        return StreamRawMemory(Running(), rows, is_written, [&run](std::vector<RowPiece> pieces) {
          const py::gil_scoped_acquire gil;
          py::list list;
          for (RowPiece& piece : pieces) {
            list.append(py::make_tuple(piece.row, std::move(piece.tensors)));
          }
          pieces.clear();
          run(std::move(list));
        });
      },
      py::arg("rows"), py::arg("is_written"), py::arg("run"));
  module.def("group_of", &GroupOf);
  module.def("adopt_state", [](const at::Tensor& parameter, const at::Tensor& state) {
    return AdoptState(Running(), parameter, state);
  });
}

void RegisterGradients(py::module_& module) {
  // Management may be off while a hook is still registered.
  module.def("take_gradient", [](const at::Tensor& parameter) {
    if (Engine* const engine = Engine::Get()) TakeGradient(engine, parameter);
  });
}

}  // namespace
}  // namespace patrickstar

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  patrickstar::RegisterErrorTranslator();
  patrickstar::RegisterEngine(module);
  patrickstar::RegisterHolds(module);
  patrickstar::RegisterAdoption(module);
  patrickstar::RegisterOptimizers(module);
  patrickstar::RegisterFusedSteps(module);
  patrickstar::RegisterGradients(module);
}
