// SPDX-License-Identifier: Apache-2.0
#include "glue/landing_zone.h"

#include <malloc.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "patrickstar/base/error.h"

namespace patrickstar {
namespace {

// Gradients of one parameter that may exist at once outside its chunk: the second use of
// a shared parameter makes its own while that of the first waits to be added.
constexpr int64_t kGradientsInFlight = 2;

// At most this part of the budget waits for gradients: the rest has to feed the ops.
constexpr int64_t kMaxShareOfBudget = 4;

// Gradients that land between two trims of the heap: a trim costs page faults later, well
// below what fetching as many bytes costs.
constexpr int64_t kLandedBytesPerTrim = int64_t{64} << 20;

bool IsInsideBackward() { return torch::autograd::get_current_graph_task_id() >= 0; }

}  // namespace

void LandingZone::Expect(int64_t num_bytes) {
  std::lock_guard lock(mutex_);
  largest_bytes_ = std::max(largest_bytes_, num_bytes);
}

void LandingZone::Prepare() {
  if (!IsInsideBackward()) return Release();
  int64_t num_bytes = 0;
  {
    std::lock_guard lock(mutex_);
    if (room_ || is_taking_) return;
    num_bytes = std::min(kGradientsInFlight * largest_bytes_,
                         store_.stats().budget_bytes / kMaxShareOfBudget);
    if (num_bytes == 0) return;
    is_taking_ = true;
  }
  std::optional<OutsideBytes> room;
  try {
    room.emplace(store_.Reserve(num_bytes, "fresh gradients"));
  } catch (const Error&) {
    // The ops need it all; they report what really fails.
  }
  if (room) {
    torch::autograd::Engine::get_default_engine().queue_callback([this] {
      Release();
      malloc_trim(0);
    });
    malloc_trim(0);
  }
  std::lock_guard lock(mutex_);
  room_ = std::move(room);
  is_taking_ = false;
}

void LandingZone::Land(int64_t num_bytes) {
  bool is_trim_due = false;
  {
    std::lock_guard lock(mutex_);
    landed_bytes_ = room_ ? landed_bytes_ + num_bytes : 0;
    is_trim_due = landed_bytes_ >= kLandedBytesPerTrim;
    if (is_trim_due) landed_bytes_ = 0;
  }
  Release();
  if (is_trim_due) malloc_trim(0);
}

void LandingZone::Release() {
  std::optional<OutsideBytes> room;
  std::lock_guard lock(mutex_);
  room.swap(room_);
}

}  // namespace patrickstar
