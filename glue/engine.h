// SPDX-License-Identifier: Apache-2.0
//
// Engine: the one chunk store and slot registry of this process while management is on,
// and the leases that torch code takes from it. Started and stopped by the Python
// session. Stopping retires the engine for good; a new start makes a new one.
//
// Thread-safe. Leases release the GIL while they wait.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "glue/landing_zone.h"
#include "glue/slot_registry.h"
#include "patrickstar/base/clock.h"
#include "patrickstar/chunk/chunk_store.h"

namespace patrickstar {

struct EngineOptions {
  int64_t host_bytes = 0;
  int64_t chunk_bytes = 0;  // of a chunk of the widest usual element, fp32
  std::string spill_dir;    // empty: no disk tier
  int64_t disk_bytes = 0;
  StressOptions stress;
  bool is_delay_stressed = false;
};

class Engine {
 public:
  explicit Engine(const EngineOptions& options);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // The running engine, or null.
  static Engine* Get() { return current_.load(std::memory_order_acquire); }

  // Throws: Error when one is running, and what opening the spill file throws.
  static void Start(const EngineOptions& options);

  // Turns every managed tensor into an ordinary one and retires the engine.
  // REQUIRES: no thread is inside an op on a managed tensor.
  // Throws: OutOfMemory when memory cannot take them, Error while a Hold lives; then it goes
  // on running.
  static void Stop();

  // At exit of the process: ends threads and transfers, copies nothing.
  static void StopAtExit();

  ChunkStore& store() { return store_; }
  SlotRegistry& registry() { return registry_; }
  LandingZone& landing_zone() { return landing_zone_; }
  const EngineOptions& options() const { return options_; }

  // For Hold: one more lives, and the engine does not stop before RemoveHold.
  // Throws: Error, as torch::PyTorchError, when it is stopping already.
  void AddHold(std::string_view what);
  void RemoveHold() { --num_holds_; }

 private:
  void MakeEverythingPlain();

  static std::atomic<Engine*> current_;

  const EngineOptions options_;
  SteadyClock clock_;
  SlotRegistry registry_;
  ChunkStore store_;
  LandingZone landing_zone_{&store_};

  // Each side writes its own before it reads the other's, so that one of them gives way.
  std::atomic<int64_t> num_holds_{0};
  std::atomic<bool> is_stopping_{false};
};

// Takes leases for the calling thread, which may hold the GIL.
// Throws: what ChunkStore::Acquire throws, as torch::PyTorchError.
void AcquireWithoutGil(Engine* engine, std::span<const ChunkAccess> set, LeaseKind kind,
                       std::string_view what);

// The same, but false when the budget cannot hold the set at once: nothing is leased then.
bool TryAcquireWithoutGil(Engine* engine, std::span<const ChunkAccess> set, LeaseKind kind,
                          std::string_view what);

// An op lease for as long as it lives. `set` must outlive it.
class TorchLease {
 public:
  TorchLease(Engine* engine, std::span<const ChunkAccess> set, std::string_view what)
      : engine_(*engine), set_(set) {
    if (!engine_.store().TryAcquire(set_, LeaseKind::kOp)) {
      AcquireWithoutGil(engine, set_, LeaseKind::kOp, what);
    }
  }
  ~TorchLease() { engine_.store().Release(set_, LeaseKind::kOp); }
  TorchLease(const TorchLease&) = delete;
  TorchLease& operator=(const TorchLease&) = delete;

 private:
  Engine& engine_;
  std::span<const ChunkAccess> set_;
};

// Releases the GIL while it lives if this thread holds it.
class GilReleaseIfHeld {
 public:
  GilReleaseIfHeld();
  ~GilReleaseIfHeld();
  GilReleaseIfHeld(const GilReleaseIfHeld&) = delete;
  GilReleaseIfHeld& operator=(const GilReleaseIfHeld&) = delete;

 private:
  void* state_;
};

}  // namespace patrickstar
