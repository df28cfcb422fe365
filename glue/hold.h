// SPDX-License-Identifier: Apache-2.0
//
// Hold: a held lease on the chunks of some storages, for access that no op brackets: raw
// readers, compiled graphs, collectives. While it lives their bytes stay where they are,
// and count as part of every operation's own set.
#pragma once

#include <c10/core/Storage.h>

#include <string_view>
#include <vector>

#include "glue/access_set.h"
#include "glue/engine.h"

namespace patrickstar {

struct HeldStorage {
  c10::Storage storage;
  Access access = Access::kRead;
};

class Hold {
 public:
  // Keeps the managed storages among these alive; `what` says in messages who needs them.
  // Throws: OutOfMemory, IoError, CorruptData as torch::PyTorchError.
  Hold(Engine* engine, std::vector<HeldStorage> storages, std::string_view what);
  ~Hold() { Release(); }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

  // Idempotent. Called by one thread at a time, whichever it is.
  void Release();

 private:
  Engine* engine_;
  std::vector<HeldStorage> storages_;
  AccessSet set_;
};

}  // namespace patrickstar
