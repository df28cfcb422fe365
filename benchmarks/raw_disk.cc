// SPDX-License-Identifier: Apache-2.0
#include "raw_disk.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <initializer_list>
#include <new>
#include <system_error>
#include <thread>

#include "patrickstar/base/error.h"
#include "patrickstar/base/text.h"
#include "patrickstar/base/types.h"

namespace patrickstar::benchmarks {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kLargestBlockBytes = 16 * kMiB;

[[noreturn]] void ThrowDiskError(const std::string& what, int error_number) {
  throw IoError(StrCat("cannot ", what, ": ", std::system_category().message(error_number),
                       "; name a folder on a disk with enough free space"),
                error_number);
}

// Page-aligned memory with every page touched, so that no figure contains page faults.
class Buffer {
 public:
  explicit Buffer(int64_t num_bytes) : num_bytes_(static_cast<size_t>(num_bytes)) {
    data_ = mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) throw std::bad_alloc();
    madvise(data_, num_bytes_, MADV_HUGEPAGE);  // direct I/O into small pages is half as fast
    std::memset(data_, 0x5a, num_bytes_);
  }
  ~Buffer() { munmap(data_, num_bytes_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void* data() const { return data_; }

 private:
  size_t num_bytes_;
  void* data_;
};

}  // namespace

RawDisk::RawDisk(const std::string& directory, int64_t file_bytes)
    : file_bytes_(AlignUp(file_bytes, kLargestBlockBytes)),
      descriptor_(open(directory.c_str(), O_TMPFILE | O_RDWR | O_DIRECT | O_CLOEXEC, 0600)) {
  if (descriptor_ < 0) ThrowDiskError(StrCat("open a file with O_DIRECT in ", directory), errno);
  int error_number = posix_fallocate(descriptor_, 0, file_bytes_);
  if (error_number == 0) {
    const Buffer buffer(kLargestBlockBytes);
    error_number = MoveShare(Direction::kWrite, kLargestBlockBytes, 1, 0, buffer.data());
  }
  if (error_number == 0) return;
  close(descriptor_);
  ThrowDiskError(StrCat("reserve ", FormatBytes(file_bytes_), " in ", directory), error_number);
}

RawDisk::~RawDisk() { close(descriptor_); }

RawDiskResult RawDisk::Measure(int64_t block_bytes, int num_threads) const {
  return {.block_bytes = block_bytes,
          .num_threads = num_threads,
          .write_bytes_per_s = MovePerSecond(Direction::kWrite, block_bytes, num_threads),
          .read_bytes_per_s = MovePerSecond(Direction::kRead, block_bytes, num_threads)};
}

std::vector<RawDiskResult> RawDisk::MeasureAll() const {
  std::vector<RawDiskResult> results;
  for (const int64_t block_bytes : {kMiB, 4 * kMiB, 16 * kMiB}) {
    for (const int num_threads : {1, 4, 16}) {
      results.push_back(Measure(block_bytes, num_threads));
    }
  }
  return results;
}

double RawDisk::MovePerSecond(Direction direction, int64_t block_bytes, int num_threads) const {
  const Buffer buffer(block_bytes * num_threads);
  std::vector<int> error_numbers(static_cast<size_t>(num_threads), 0);
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (int thread = 0; thread < num_threads; ++thread) {
    threads.emplace_back([&, thread] {
      error_numbers[static_cast<size_t>(thread)] =
          MoveShare(direction, block_bytes, num_threads, thread,
                    static_cast<char*>(buffer.data()) + thread * block_bytes);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  for (const int error_number : error_numbers) {
    if (error_number != 0) ThrowDiskError("move blocks with O_DIRECT", error_number);
  }
  return static_cast<double>(file_bytes_) / seconds.count();
}

// Every num_threads-th block, from number `thread` on. Returns 0 or an errno; a short count is
// EIO, because a figure with repaired I/O in it would not be a baseline.
int RawDisk::MoveShare(Direction direction, int64_t block_bytes, int num_threads, int thread,
                       void* buffer) const {
  for (int64_t start = thread * block_bytes; start < file_bytes_;
       start += num_threads * block_bytes) {
    const auto num_bytes = static_cast<size_t>(std::min(block_bytes, file_bytes_ - start));
    const ssize_t moved = direction == Direction::kWrite
                              ? pwrite(descriptor_, buffer, num_bytes, start)
                              : pread(descriptor_, buffer, num_bytes, start);
    if (moved < 0) return errno;
    if (moved != static_cast<ssize_t>(num_bytes)) return EIO;
  }
  return 0;
}

}  // namespace patrickstar::benchmarks
