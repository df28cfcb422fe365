// SPDX-License-Identifier: Apache-2.0
//
// Binder: how the store tells its owner that the bytes of a chunk are at an address,
// or nowhere. The glue points torch storages; tests record calls.
#pragma once

#include <cstddef>
#include <string>

#include "patrickstar/base/types.h"

namespace patrickstar {

class Binder {
 public:
  virtual ~Binder() = default;

  // Called under the store's mutex: may only write pointers and take leaf locks.
  virtual void Attach(ChunkId chunk, std::byte* data) noexcept = 0;
  virtual void Detach(ChunkId chunk) noexcept = 0;

  // The names of the tensors in a chunk, for messages. Called without the mutex.
  virtual std::string Describe(ChunkId chunk) = 0;
};

}  // namespace patrickstar
