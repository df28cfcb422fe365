// SPDX-License-Identifier: Apache-2.0
//
// Hold: a held lease on the chunks of some tensors, for raw access. While it lives their
// bytes stay where they are, and count as part of every operation's own set.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "glue/engine.h"
#include "glue/managed_storage.h"

namespace patrickstar {

class Hold {
 public:
  // Keeps the tensors alive. Takes leases for writing: who reads raw may also write.
  // Throws: OutOfMemory, IoError, CorruptData as torch::PyTorchError.
  Hold(Engine* engine, std::vector<at::Tensor> tensors);
  ~Hold() { Release(); }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

  // Idempotent.
  void Release();

 private:
  Engine* engine_;
  std::vector<at::Tensor> tensors_;
  std::vector<ChunkAccess> set_;
};

// Whether a held lease keeps the bytes of a storage where they are.
bool IsHeld(Engine* engine, const ManagedStorage& storage);

}  // namespace patrickstar
