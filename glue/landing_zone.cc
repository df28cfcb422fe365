// SPDX-License-Identifier: Apache-2.0
#include "glue/landing_zone.h"

#include <malloc.h>

#include <algorithm>

#include "glue/heap.h"
#include "patrickstar/base/error.h"

namespace patrickstar {
namespace {

// Gradients of one parameter that may exist at once outside its chunk: the second use of
// a shared parameter makes its own while that of the first waits to be added.
constexpr int64_t kGradientsInFlight = 2;

// At most this part of the budget waits for gradients: the rest has to feed the ops.
constexpr int64_t kMaxShareOfBudget = 4;

// Bytes evicted between two trims of the heap: a trim costs page faults later, well below
// what moving as many bytes costs. Where nothing has to leave memory, nothing is trimmed.
constexpr int64_t kEvictedBytesPerTrim = int64_t{128} << 20;

}  // namespace

void LandingZone::Expect(int64_t num_bytes) {
  std::lock_guard lock(mutex_);
  largest_bytes_ = std::max(largest_bytes_, num_bytes);
}

bool LandingZone::IsTakingDue(int64_t* num_bytes) {
  const StoreStats stats = store_.stats();
  bool is_trim_due = false;
  bool is_first_eviction = false;
  {
    std::lock_guard lock(mutex_);
    is_trim_due = stats.counters.evicted_bytes - trimmed_at_bytes_ >= kEvictedBytesPerTrim;
    is_first_eviction = stats.counters.num_evictions != 0 && !is_spilling_;
    is_spilling_ = is_spilling_ || is_first_eviction;
    if (is_trim_due) trimmed_at_bytes_ = stats.counters.evicted_bytes;
    *num_bytes =
        std::min(kGradientsInFlight * largest_bytes_, stats.budget_bytes / kMaxShareOfBudget);
    const bool is_wanted = stats.counters.num_evictions != 0 && num_steps_ == 0 && !is_given_up_;
    if (!is_wanted || room_ || is_taking_ || *num_bytes == 0) *num_bytes = 0;
    is_taking_ = is_taking_ || *num_bytes != 0;
  }
  if (is_first_eviction) TuneHeap(HeapUse::kSpilling);
  if (is_trim_due) malloc_trim(0);
  return *num_bytes != 0;
}

void LandingZone::Prepare() {
  int64_t num_bytes = 0;
  if (!IsTakingDue(&num_bytes)) return;
  std::optional<OutsideBytes> room;
  try {
    room.emplace(store_.Reserve(num_bytes, "fresh gradients"));
  } catch (const Error&) {
    // The ops need it all; they report what really fails.
  }
  std::lock_guard lock(mutex_);
  is_given_up_ = is_given_up_ || !room;
  room_ = std::move(room);
  is_taking_ = false;
}

void LandingZone::Release() {
  std::optional<OutsideBytes> room;
  std::lock_guard lock(mutex_);
  room.swap(room_);
}

void LandingZone::GiveUp() {
  Release();
  std::lock_guard lock(mutex_);
  is_given_up_ = true;
}

void LandingZone::BeginStep() {
  ++num_steps_;
  Release();
}

}  // namespace patrickstar
