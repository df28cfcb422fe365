// SPDX-License-Identifier: Apache-2.0
//
// Crc32c: the Castagnoli checksum (RFC 3720) that proves that bytes read back
// from a disk are the bytes that were written. The SSE4.2 instruction is used
// where the processor has it; tables give the same value everywhere else.
// Thread-safe: both functions are pure.
#pragma once

#include <cstddef>
#include <cstdint>

namespace patrickstar {

// The CRC-32C of `num_bytes` bytes at `data`, by the fastest way this processor has.
uint32_t Crc32c(const void* data, size_t num_bytes);

// The same value by tables alone: the reference that Crc32c is tested against.
uint32_t Crc32cPortable(const void* data, size_t num_bytes);

}  // namespace patrickstar
