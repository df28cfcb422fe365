// SPDX-License-Identifier: Apache-2.0
//
// Types: the small enums and identities that every layer names. Nothing here
// owns anything.
#pragma once

#include <cstdint>

namespace patrickstar {

// Index of a chunk in the table. Never reused while the engine runs.
using ChunkId = uint32_t;
inline constexpr ChunkId kNoChunk = UINT32_MAX;

// What the bytes of a chunk are. Chunks of different kinds never mix.
enum class Kind : uint8_t { kParam, kComputeCopy, kGrad, kState };

// What an access does to the bytes.
enum class Access : uint8_t { kRead, kWrite };

// Alignment of every tensor inside a chunk: BLAS kernels see the alignment that
// torch's own allocator gives, so the bits of their results are the same.
inline constexpr int64_t kTensorAlignment = 64;

// Alignment of payloads and disk slots: a multiple of the page size and of the
// logical block size of every disk we know.
inline constexpr int64_t kPageAlignment = 4096;

constexpr int64_t AlignUp(int64_t value, int64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

}  // namespace patrickstar
