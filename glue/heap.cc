// SPDX-License-Identifier: Apache-2.0
#include "glue/heap.h"

#include <malloc.h>

namespace patrickstar {
namespace {

constexpr int kMaxMappings = 65536;  // glibc's default
constexpr int kBuildingThreshold = 128 << 10;
constexpr int kSpillingMmapThreshold = 32 << 20;  // the largest that glibc takes
constexpr int kSpillingTrimThreshold = 2 * kSpillingMmapThreshold;
// Plain PyTorch keeps its gradients' buffers on the heap; ours are in chunks, and activations
// need that room to find their pages again.
constexpr int kResidentTrimThreshold = 512 << 20;

}  // namespace

void TuneHeap(HeapUse use) {
  switch (use) {
    case HeapUse::kBuilding:
      mallopt(M_MMAP_MAX, kMaxMappings);
      mallopt(M_MMAP_THRESHOLD, kBuildingThreshold);
      mallopt(M_TRIM_THRESHOLD, kBuildingThreshold);
      break;
    case HeapUse::kResident:
      mallopt(M_MMAP_MAX, 0);
      mallopt(M_TRIM_THRESHOLD, kResidentTrimThreshold);
      return;
    case HeapUse::kSpilling:
      mallopt(M_MMAP_MAX, kMaxMappings);
      mallopt(M_MMAP_THRESHOLD, kSpillingMmapThreshold);
      mallopt(M_TRIM_THRESHOLD, kSpillingTrimThreshold);
      break;
  }
  malloc_trim(0);
}

}  // namespace patrickstar
