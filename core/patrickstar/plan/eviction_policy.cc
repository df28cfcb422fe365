// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/plan/eviction_policy.h"

#include <algorithm>
#include <tuple>

namespace patrickstar {
namespace {

std::vector<EvictionCandidate> InOrderOfUse(std::span<const EvictionCandidate> candidates) {
  std::vector<EvictionCandidate> order(candidates.begin(), candidates.end());
  std::sort(order.begin(), order.end(),
            [](const EvictionCandidate& left, const EvictionCandidate& right) {
              return std::tie(left.last_use, left.is_dirty, left.chunk) <
                     std::tie(right.last_use, right.is_dirty, right.chunk);
            });
  return order;
}

}  // namespace

std::vector<ChunkId> ChooseLeastRecentlyUsed(std::span<const EvictionCandidate> candidates,
                                             int64_t num_bytes) {
  std::vector<ChunkId> victims;
  int64_t freed_bytes = 0;
  for (const EvictionCandidate& candidate : InOrderOfUse(candidates)) {
    if (freed_bytes >= num_bytes) break;
    victims.push_back(candidate.chunk);
    freed_bytes += candidate.num_bytes;
  }
  return victims;
}

std::vector<ChunkId> ChooseToClean(std::span<const EvictionCandidate> candidates,
                                   int64_t max_bytes) {
  std::vector<ChunkId> chosen;
  int64_t num_bytes = 0;
  for (const EvictionCandidate& candidate : InOrderOfUse(candidates)) {
    num_bytes += candidate.num_bytes;
    if (num_bytes > max_bytes) break;
    if (candidate.is_dirty) chosen.push_back(candidate.chunk);
  }
  return chosen;
}

}  // namespace patrickstar
