// SPDX-License-Identifier: Apache-2.0
#include "glue/engine.h"

#include <pthread.h>
#include <torch/csrc/python_headers.h>

#include <utility>

#include "glue/errors.h"
#include "patrickstar/base/error.h"
#include "patrickstar/base/text.h"
#include "patrickstar/io/os_file.h"

namespace patrickstar {
namespace {

std::unique_ptr<SpillFile> OpenSpill(const EngineOptions& options) {
  if (options.spill_dir.empty()) return nullptr;
  SpillFileOptions spill;
  spill.max_bytes = options.disk_bytes;
  spill.random_delays = options.is_delay_stressed;
  return std::make_unique<SpillFile>(OpenSpillFile(options.spill_dir), spill);
}

void AcquireGivingUpTheLandingZone(Engine* engine, std::span<const ChunkAccess> set, LeaseKind kind,
                                   std::string_view what) {
  const GilReleaseIfHeld without_gil;
  engine->landing_zone().Prepare();
  try {
    engine->store().Acquire(set, kind, what);
  } catch (const OutOfMemory&) {
    engine->landing_zone().GiveUp();
    engine->store().Acquire(set, kind, what);
  }
}

void PrepareFork() {
  if (Engine* const engine = Engine::Get()) engine->registry().PrepareFork();
}

void ResumeParent() {
  if (Engine* const engine = Engine::Get()) engine->registry().ResumeParent();
}

void ResumeChild() {
  if (Engine* const engine = Engine::Get()) engine->registry().ResumeChild();
}

}  // namespace

std::atomic<Engine*> Engine::current_{nullptr};

Engine::Engine(const EngineOptions& options)
    : options_(options),
      store_({.host_bytes = options.host_bytes, .stress = options.stress}, OpenSpill(options),
             &registry_, &clock_) {
  registry_.set_store(&store_);
}

void Engine::Start(const EngineOptions& options) {
  if (Get() != nullptr) throw Error("management is already on; call patrickstar.shutdown() first");
  static const int are_fork_handlers_set =
      pthread_atfork(&PrepareFork, &ResumeParent, &ResumeChild);
  if (are_fork_handlers_set != 0) throw Error("cannot register fork handlers: out of memory");
  current_.store(new Engine(options), std::memory_order_release);
}

void Engine::Stop() {
  Engine* const engine = Get();
  if (engine == nullptr) return;
  engine->is_stopping_.store(true);
  try {
    engine->MakeEverythingPlain();
  } catch (...) {
    engine->is_stopping_.store(false);
    throw;
  }
  engine->store().Shutdown();
  // Retired, not freed: another thread may be inside an op that has read the pointer. All
  // its payloads are gone; what is left is a few kilobytes of tables.
  current_.store(nullptr, std::memory_order_release);
}

void Engine::MakeEverythingPlain() {
  if (const int64_t num_holds = num_holds_.load(); num_holds != 0) {
    throw Error(StrCat("cannot shut down: ", num_holds,
                       " holders of addresses, in this thread or another: patrickstar.resident, "
                       "NumPy arrays, collectives under way; let them end first"));
  }
  landing_zone_.Release();
  registry_.FreeDeadSlots();
  for (const auto& storage : registry_.LiveStorages()) {
    if (ManagedStorage* const managed = ManagedStorageOf(storage.get())) {
      registry_.MakePlain(managed);
    }
  }
  registry_.FreeDeadSlots();
}

void Engine::AddHold(std::string_view what) {
  ++num_holds_;
  if (!is_stopping_.load()) return;
  RemoveHold();
  ThrowThroughTorch(Error(StrCat("cannot keep the bytes for ", what,
                                 " in memory: another thread is inside patrickstar.shutdown(); "
                                 "call it again when that has returned")));
}

void Engine::StopAtExit() {
  if (Engine* const engine = Get()) engine->store().Shutdown();
}

void AcquireWithoutGil(Engine* engine, std::span<const ChunkAccess> set, LeaseKind kind,
                       std::string_view what) {
  ThroughTorch([&] { AcquireGivingUpTheLandingZone(engine, set, kind, what); });
}

bool TryAcquireWithoutGil(Engine* engine, std::span<const ChunkAccess> set, LeaseKind kind,
                          std::string_view what) {
  return ThroughTorch([&] {
    try {
      AcquireGivingUpTheLandingZone(engine, set, kind, what);
    } catch (const OutOfMemory&) {
      return false;
    }
    return true;
  });
}

GilReleaseIfHeld::GilReleaseIfHeld()
    : state_(PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr) {}

GilReleaseIfHeld::~GilReleaseIfHeld() {
  if (state_ != nullptr) PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
}

}  // namespace patrickstar
