// SPDX-License-Identifier: Apache-2.0
//
// What the tests of io and of the layers above it share: page-aligned memory, and
// the outcome of one asynchronous operation.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

#include "patrickstar/base/check.h"
#include "patrickstar/base/types.h"

namespace patrickstar {

// Bytes in page-aligned memory that is rounded up to pages, as a payload's are.
class PageBuffer {
 public:
  // Random content; every seed gives other bytes.
  PageBuffer(int64_t num_bytes, uint32_t seed)
      : pages_(static_cast<size_t>(AlignUp(num_bytes, kPageAlignment) / kPageAlignment)),
        num_bytes_(num_bytes) {
    std::mt19937 random(seed);
    for (int64_t at = 0; at < num_bytes; at += 61) data()[at] = static_cast<char>(random());
  }

  char* data() { return pages_.data()->bytes; }
  int64_t num_bytes() const { return num_bytes_; }
  bool operator==(const PageBuffer& other) const {
    return num_bytes_ == other.num_bytes_ &&
           std::memcmp(pages_.data(), other.pages_.data(), static_cast<size_t>(num_bytes_)) == 0;
  }

 private:
  struct alignas(kPageAlignment) Page {
    char bytes[kPageAlignment];
  };

  std::vector<Page> pages_;
  int64_t num_bytes_;
};

// Set once by a `done` callback, awaited by the test; copies are the same outcome. Unlike a
// promise it leaves no reference to the exception on the I/O thread, which the thread sanitizer,
// blind to the counter inside exception_ptr, would call a race.
class Outcome {
 public:
  void Set(std::exception_ptr error) const {
    std::lock_guard lock(state_->mutex);
    PS_CHECK(!state_->is_set, "an operation ended twice");
    state_->is_set = true;
    state_->error = std::move(error);
    state_->set.notify_all();
  }

  // Waits for the end and throws the failure, if there is one (the first time).
  void Wait() const {
    std::unique_lock lock(state_->mutex);
    state_->set.wait(lock, [this] { return state_->is_set; });
    const std::exception_ptr error = std::exchange(state_->error, nullptr);
    lock.unlock();
    if (error != nullptr) std::rethrow_exception(error);
  }

  bool is_set() const {
    std::lock_guard lock(state_->mutex);
    return state_->is_set;
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable set;
    bool is_set = false;
    std::exception_ptr error;
  };

  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace patrickstar
