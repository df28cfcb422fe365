// SPDX-License-Identifier: Apache-2.0
//
// OsFile: a RawFile on a disk. The file never has a name (or loses it at once), so
// nothing is left to clean up after a crash or kill -9. It is opened with O_DIRECT,
// because the page cache would count against the memory the user wanted to save,
// and through the page cache only where the file system has no direct I/O.
// Owns the descriptor. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "patrickstar/io/raw_file.h"

namespace patrickstar {

// Opens a new, empty, nameless file in `directory`, which is created if it is missing.
// Throws: InvalidArgument when the folder can never do (a file, or memory such as tmpfs);
// IoError when the system refuses (read-only, not permitted, full).
std::unique_ptr<RawFile> OpenSpillFile(const std::string& directory);

// Bytes free for this user on the file system that holds `directory`, or would hold it.
// Throws: IoError.
int64_t FreeBytes(const std::string& directory);

class OsFile : public RawFile {
 public:
  // Whether the kernel makes the file nameless, or we unlink it after creation.
  enum class Naming : uint8_t { kUnnamed, kUnlinked };
  enum class Caching : uint8_t { kDirect, kBuffered };

  // One way of opening; null with `error_number` set where the system refuses it.
  static std::unique_ptr<OsFile> TryOpen(const std::string& directory, Naming naming,
                                         Caching caching, int* error_number);

  ~OsFile() override;
  OsFile(const OsFile&) = delete;
  OsFile& operator=(const OsFile&) = delete;

  IoCount Read(void* buffer, int64_t num_bytes, int64_t offset) override;
  IoCount Write(const void* buffer, int64_t num_bytes, int64_t offset) override;
  int Grow(int64_t num_bytes) override;
  int64_t alignment() const override { return alignment_; }
  const std::string& path() const override { return directory_; }
  int64_t FreeBytes() const override;
  void Close() override;
  void AbandonAfterFork() override;

 private:
  static constexpr int kClosed = -1;

  OsFile(std::string directory, int descriptor, int64_t alignment);
  int Reserve(int64_t begin, int64_t end);
  int WriteZeros(int64_t begin, int64_t end);

  const std::string directory_;
  std::atomic<int> descriptor_;
  const int64_t alignment_;
  std::mutex grow_mutex_;
  int64_t num_bytes_ = 0;  // Guarded by grow_mutex_.
};

}  // namespace patrickstar
