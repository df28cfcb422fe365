// SPDX-License-Identifier: Apache-2.0
//
// EvictionPolicy: which payloads leave a tier to make room. A pure function over
// identities, sizes, states and uses: it touches nothing, so it is tested without
// memory, disk or threads, and changed without touching the mechanism.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "patrickstar/base/types.h"

namespace patrickstar {

// A payload that may be evicted: resident, nobody leases it, nobody waits for it.
struct EvictionCandidate {
  ChunkId chunk = kNoChunk;
  int64_t num_bytes = 0;
  bool is_dirty = false;  // leaving costs a write
  uint64_t last_use = 0;  // grows with every lease
};

// Chooses victims of at least num_bytes together, least recently used first, clean
// before dirty on a tie; all candidates when they do not suffice. Larger than needed
// by less than the last victim.
std::vector<ChunkId> ChooseLeastRecentlyUsed(std::span<const EvictionCandidate> candidates,
                                             int64_t num_bytes);

// Chooses what to write back ahead of need: of the least recently used candidates that are
// together at most max_bytes, the dirty ones, in that order.
std::vector<ChunkId> ChooseToClean(std::span<const EvictionCandidate> candidates,
                                   int64_t max_bytes);

}  // namespace patrickstar
