// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/io/async_file.h"

#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <deque>
#include <iomanip>
#include <ios>
#include <mutex>
#include <random>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "patrickstar/base/check.h"
#include "patrickstar/base/crc32c.h"
#include "patrickstar/base/error.h"
#include "patrickstar/base/text.h"

namespace patrickstar {
namespace {

// Reads that may overtake a waiting write before one write gets its turn.
constexpr int kMaxReadsInARow = 8;

// Attempts in a row without progress after which a request is given up.
constexpr int kMaxIdleAttempts = 100;

constexpr int kMaxRandomDelayUs = 300;

std::string Place(const RawFile& file, const IoRequest& request) {
  return StrCat(FormatBytes(request.num_bytes), " (", request.num_bytes, " bytes) at offset ",
                request.offset, " of the spill file in ", file.path());
}

std::string Advice(const RawFile& file, int error_number) {
  if (error_number == ENOSPC || error_number == EDQUOT) {
    return StrCat("free space in ", file.path(), " or name another spill_dir");
  }
  return "check the disk or name another spill_dir";
}

[[noreturn]] void ThrowIoError(const RawFile& file, const IoRequest& request, int64_t num_done,
                               const std::string& reason, int error_number) {
  const char* verb = request.op == IoRequest::Op::kRead ? "read" : "write";
  throw IoError(StrCat("cannot ", verb, " ", Place(file, request), ": ", reason, " after ",
                       num_done, " bytes; ", Advice(file, error_number)),
                error_number);
}

IoCount Attempt(RawFile& file, const IoRequest& request, int64_t num_done) {
  char* buffer = static_cast<char*>(request.buffer) + num_done;
  const int64_t num_bytes = request.num_bytes - num_done;
  const int64_t offset = request.offset + num_done;
  return request.op == IoRequest::Op::kRead ? file.Read(buffer, num_bytes, offset)
                                            : file.Write(buffer, num_bytes, offset);
}

// Repeats attempts until all bytes are moved.
void MoveAll(RawFile& file, const IoRequest& request) {
  int64_t num_done = 0;
  int num_idle = 0;
  while (num_done < request.num_bytes) {
    const IoCount count = Attempt(file, request, num_done);
    if (count.error_number == EINTR) continue;
    if (count.error_number != 0) {
      ThrowIoError(file, request, num_done, std::system_category().message(count.error_number),
                   count.error_number);
    }
    if (count.num_bytes == 0 && request.op == IoRequest::Op::kRead) {
      ThrowIoError(file, request, num_done, "the file ends", EIO);
    }
    // A short count may end between two aligned places; direct I/O goes on from the last one.
    const bool is_whole = count.num_bytes == request.num_bytes - num_done;
    const int64_t progress =
        is_whole ? count.num_bytes : count.num_bytes / file.alignment() * file.alignment();
    num_done += progress;
    num_idle = progress == 0 ? num_idle + 1 : 0;
    if (num_idle == kMaxIdleAttempts) {
      ThrowIoError(file, request, num_done, "the disk makes no progress", EIO);
    }
  }
}

std::string Hex(uint32_t value) {
  std::ostringstream out;
  out << "0x" << std::hex << std::setw(8) << std::setfill('0') << value;
  return out.str();
}

void CarryOut(RawFile& file, IoRequest& request) {
  const auto num_bytes = static_cast<size_t>(request.num_bytes);
  if (request.op == IoRequest::Op::kWrite) request.checksum = Crc32c(request.buffer, num_bytes);
  MoveAll(file, request);
  if (request.op == IoRequest::Op::kWrite) return;
  const uint32_t found = Crc32c(request.buffer, num_bytes);
  if (found != request.checksum) {
    throw CorruptData(StrCat("corrupt data in ", Place(file, request), ": expected checksum ",
                             Hex(request.checksum), ", got ", Hex(found),
                             "; check the disk or name another spill_dir"));
  }
}

void CompleteWithError(IoRequest request, const char* message) {
  request.done(request, std::make_exception_ptr(Error(message)));
}

// Signals of the process must reach the threads that wait for them, never an I/O thread: threads
// started while this object lives inherit its mask.
class SignalBlock {
 public:
  SignalBlock() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old_mask_);
  }
  ~SignalBlock() { pthread_sigmask(SIG_SETMASK, &old_mask_, nullptr); }
  SignalBlock(const SignalBlock&) = delete;
  SignalBlock& operator=(const SignalBlock&) = delete;

 private:
  sigset_t old_mask_;
};

}  // namespace

// All that a forked child must not touch, in one place that it can leave behind.
struct AsyncFile::State {
  State(std::unique_ptr<RawFile> raw_file, const AsyncFileOptions& async_options)
      : file(std::move(raw_file)), options(async_options) {}

  void Start();
  void Join();
  void Work(int thread_index) noexcept;
  bool PopLocked(IoRequest* request);
  static void Sleep(std::mt19937_64* random);

  std::unique_ptr<RawFile> file;
  const AsyncFileOptions options;
  std::mutex mutex;
  std::condition_variable changed;
  // Guarded by mutex:
  std::deque<IoRequest> reads;
  std::deque<IoRequest> writes;
  int num_reads_in_a_row = 0;
  bool is_shut_down = false;

  std::mutex join_mutex;
  std::vector<std::thread> threads;  // Guarded by join_mutex.
};

void AsyncFile::State::Start() {
  const SignalBlock block;
  std::lock_guard lock(join_mutex);
  for (int index = 0; index < options.num_threads; ++index) {
    try {
      threads.emplace_back([this, index] { Work(index); });
    } catch (const std::system_error& error) {
      if (index != 0) return;  // fewer threads do the same, more slowly
      throw IoError(StrCat("cannot start a thread for the spill file: ", error.code().message(),
                           "; raise the limits of the process (ulimit -u, ulimit -v)"),
                    error.code().value());
    }
  }
}

void AsyncFile::State::Join() {
  {
    std::lock_guard lock(mutex);
    is_shut_down = true;
    changed.notify_all();
  }
  std::lock_guard lock(join_mutex);
  for (std::thread& thread : threads) thread.join();
  threads.clear();
}

// noexcept: a `done` that throws is a bug that must not be lost.
void AsyncFile::State::Work(int thread_index) noexcept {
  std::mt19937_64 random(options.seed + static_cast<uint64_t>(thread_index));
  while (true) {
    IoRequest request;
    {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return !reads.empty() || !writes.empty() || is_shut_down; });
      if (!PopLocked(&request)) return;
    }
    if (options.random_delays) Sleep(&random);
    std::exception_ptr error;
    try {
      CarryOut(*file, request);
    } catch (...) {
      error = std::current_exception();
    }
    if (options.random_delays) Sleep(&random);
    request.done(request, std::move(error));
  }
}

bool AsyncFile::State::PopLocked(IoRequest* request) {
  const bool is_writes_turn = reads.empty() || num_reads_in_a_row >= kMaxReadsInARow;
  const bool is_write = !writes.empty() && is_writes_turn;
  std::deque<IoRequest>& queue = is_write ? writes : reads;
  if (queue.empty()) return false;
  *request = std::move(queue.front());
  queue.pop_front();
  num_reads_in_a_row = is_write || writes.empty() ? 0 : num_reads_in_a_row + 1;
  return true;
}

void AsyncFile::State::Sleep(std::mt19937_64* random) {
  std::uniform_int_distribution<int> delay_us(0, kMaxRandomDelayUs);
  std::this_thread::sleep_for(std::chrono::microseconds(delay_us(*random)));
}

AsyncFile::AsyncFile(std::unique_ptr<RawFile> file, const AsyncFileOptions& options)
    : state_(std::make_unique<State>(std::move(file), options)) {
  PS_CHECK(options.num_threads > 0, "got ", options.num_threads);
  try {
    state_->Start();
  } catch (...) {
    state_->Join();
    throw;
  }
}

AsyncFile::~AsyncFile() {
  if (is_abandoned()) {
    // Destroying a condition variable that lost threads seem to wait for would hang, so the
    // child leaves the state to its exit.
    static_cast<void>(state_.release());
    return;
  }
  Shutdown();
}

void AsyncFile::Submit(IoRequest request) {
  PS_CHECK(request.num_bytes > 0 && request.offset >= 0, "got ", request.num_bytes,
           " bytes at offset ", request.offset);
  PS_CHECK(request.done != nullptr);
  if (is_abandoned()) {
    CompleteWithError(std::move(request), kForkedMessage);
    return;
  }
  {
    std::lock_guard lock(state_->mutex);
    if (!state_->is_shut_down) {
      auto& queue = request.op == IoRequest::Op::kRead ? state_->reads : state_->writes;
      queue.push_back(std::move(request));
      state_->changed.notify_one();
      return;
    }
  }
  CompleteWithError(std::move(request),
                    "cannot use the spill file: it was shut down; call init() again");
}

void AsyncFile::Shutdown() {
  if (is_abandoned()) return;
  state_->Join();
  state_->file->Close();
}

void AsyncFile::AbandonAfterFork() {
  is_abandoned_.store(true, std::memory_order_relaxed);
  state_->file->AbandonAfterFork();
}

RawFile& AsyncFile::file() const { return *state_->file; }

}  // namespace patrickstar
