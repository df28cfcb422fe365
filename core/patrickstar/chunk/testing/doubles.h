// SPDX-License-Identifier: Apache-2.0
//
// The doubles that tests of the chunk store share. FakeBinder stands for the owner of
// the storages: it knows what is attached and counts calls that make no sense.
// AlertClock is a clock that moves only when told to, and that tells when a caller
// began to wait: the store looks at its clock then, with its mutex held. Both are
// thread-safe.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <map>
#include <mutex>
#include <string>

#include "patrickstar/base/clock.h"
#include "patrickstar/base/text.h"
#include "patrickstar/chunk/binder.h"

namespace patrickstar {

class FakeBinder final : public Binder {
 public:
  void Attach(ChunkId chunk, std::byte* data) noexcept override {
    std::lock_guard lock(mutex_);
    if (data == nullptr || !attached_.emplace(chunk, data).second) ++num_faults_;
  }
  void Detach(ChunkId chunk) noexcept override {
    std::lock_guard lock(mutex_);
    if (attached_.erase(chunk) == 0) ++num_faults_;
    ++num_detaches_[chunk];
  }
  std::string Describe(ChunkId chunk) override { return StrCat("weight", chunk); }

  // Null when the chunk is not attached.
  std::byte* data(ChunkId chunk) const {
    std::lock_guard lock(mutex_);
    const auto found = attached_.find(chunk);
    return found == attached_.end() ? nullptr : found->second;
  }
  bool is_attached(ChunkId chunk) const { return data(chunk) != nullptr; }
  int num_detaches(ChunkId chunk) const {
    std::lock_guard lock(mutex_);
    const auto found = num_detaches_.find(chunk);
    return found == num_detaches_.end() ? 0 : found->second;
  }
  // Attached twice, attached at nothing, or detached without having been attached.
  int num_faults() const {
    std::lock_guard lock(mutex_);
    return num_faults_;
  }

 private:
  mutable std::mutex mutex_;
  std::map<ChunkId, std::byte*> attached_;
  std::map<ChunkId, int> num_detaches_;
  int num_faults_ = 0;
};

class AlertClock final : public Clock {
 public:
  double NowSeconds() const override {
    std::lock_guard lock(mutex_);
    ++num_looks_;
    looked_.notify_all();
    return now_;
  }
  void Advance(double seconds) {
    std::lock_guard lock(mutex_);
    now_ += seconds;
  }
  int num_looks() const {
    std::lock_guard lock(mutex_);
    return num_looks_;
  }
  void WaitForLooks(int num_looks) const {
    std::unique_lock lock(mutex_);
    looked_.wait(lock, [&] { return num_looks_ >= num_looks; });
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable looked_;
  mutable int num_looks_ = 0;
  double now_ = 0.0;
};

}  // namespace patrickstar
