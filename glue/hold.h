// SPDX-License-Identifier: Apache-2.0
//
// Hold: a held lease on the chunks of some storages, for access that no op brackets: raw
// readers, compiled graphs, collectives. While it lives their bytes stay where they are,
// and count as part of every operation's own set; and the engine does not stop.
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
  // Nothing is held when `engine` is null: all of them are ordinary then.
  // Throws: OutOfMemory, IoError, CorruptData, Error when management is being shut down, as
  // torch::PyTorchError.
  Hold(Engine* engine, std::vector<HeldStorage> storages, std::string_view what);
  ~Hold() { Release(); }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

  // Idempotent. Any thread may call it; it waits without the GIL. Threads that call it at
  // once hold the GIL.
  void Release();

 private:
  Engine* engine_;  // null: holds nothing (any more)
  std::vector<HeldStorage> storages_;
  AccessSet set_;
};

}  // namespace patrickstar
