// SPDX-License-Identifier: Apache-2.0
//
// AsyncFile: a pool of I/O threads over one RawFile. Owns the file, the threads and
// the queue. A request is carried out whole or fails: short I/O is finished,
// interrupted calls are repeated, written bytes are checksummed and bytes read are
// checked. Reads go before writes, each in order of arrival, but a steady stream of
// reads does not starve the writes.
// Thread-safe, except the destructor and AbandonAfterFork().
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>

#include "patrickstar/io/raw_file.h"

namespace patrickstar {

struct IoRequest {
  enum class Op : uint8_t { kRead, kWrite };

  Op op = Op::kRead;
  // Aligned to the file's alignment() and alive until `done` is called; only read by kWrite.
  void* buffer = nullptr;
  int64_t num_bytes = 0;
  int64_t offset = 0;
  // CRC-32C of the bytes: kRead compares with it, kWrite sets it.
  uint32_t checksum = 0;
  // Called exactly once, on an I/O thread, with null or the failure. Must not throw, and must not
  // shut down or destroy the file.
  std::function<void(IoRequest&, std::exception_ptr)> done;
};

struct AsyncFileOptions {
  int num_threads = 4;         // Requests that the disk sees at once.
  bool random_delays = false;  // Stress: sleep 0 to 300 us before and after each request.
  uint64_t seed = 0;           // Of the random delays.
};

class AsyncFile {
 public:
  // What every use after AbandonAfterFork() is refused with.
  static constexpr char kForkedMessage[] =
      "cannot use the spill file: this process was forked from the one that owns it; use managed "
      "tensors in the parent only";

  // Throws: std::system_error when the threads cannot be started.
  AsyncFile(std::unique_ptr<RawFile> file, const AsyncFileOptions& options);
  ~AsyncFile();  // Shutdown(), unless abandoned.
  AsyncFile(const AsyncFile&) = delete;
  AsyncFile& operator=(const AsyncFile&) = delete;

  // Queues a request. After Shutdown() or AbandonAfterFork() it is completed at once, on this
  // thread, with an Error. The failures given to `done`: IoError, CorruptData, Error.
  void Submit(IoRequest request);

  // Finishes what was submitted, joins the threads and closes the file. May be called again.
  void Shutdown();

  // For a forked child, where the threads do not exist and locks may be held for ever: closes the
  // child's descriptor, refuses later requests and makes the destructor leave everything alone.
  // REQUIRES: no other thread is running in this process.
  void AbandonAfterFork();

  bool is_abandoned() const { return is_abandoned_.load(std::memory_order_relaxed); }

  // REQUIRES: not abandoned.
  RawFile& file() const;

 private:
  struct State;

  std::unique_ptr<State> state_;
  std::atomic<bool> is_abandoned_{false};
};

}  // namespace patrickstar
