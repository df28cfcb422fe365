// SPDX-License-Identifier: Apache-2.0
#include "glue/landing_zone.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "patrickstar/base/error.h"

namespace patrickstar {
namespace {

// At most this part of the budget waits for gradients: the rest has to feed the ops.
constexpr int64_t kMaxShareOfBudget = 4;

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
    num_bytes = std::min(largest_bytes_, store_.stats().budget_bytes / kMaxShareOfBudget);
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
    torch::autograd::Engine::get_default_engine().queue_callback([this] { Release(); });
  }
  std::lock_guard lock(mutex_);
  room_ = std::move(room);
  is_taking_ = false;
}

void LandingZone::Release() {
  std::optional<OutsideBytes> room;
  std::lock_guard lock(mutex_);
  room.swap(room_);
}

}  // namespace patrickstar
