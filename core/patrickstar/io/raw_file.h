// SPDX-License-Identifier: Apache-2.0
//
// RawFile: the seam between the engine and a disk. One object is one open file;
// each call is one attempt, which may be short or be interrupted, as with pread
// and pwrite. OsFile is the real one, FaultyFile the double that fails on demand.
// Thread-safe: every method may run on any number of threads at once.
#pragma once

#include <cstdint>
#include <string>

namespace patrickstar {

// What one attempt did: `num_bytes` moved, or an errno (0 without an error).
struct IoCount {
  int64_t num_bytes = 0;
  int error_number = 0;
};

class RawFile {
 public:
  virtual ~RawFile() = default;

  // Attempts to read `num_bytes` at `offset`; 0 bytes without an error is the end of the file.
  // REQUIRES: buffer, num_bytes and offset are multiples of alignment().
  virtual IoCount Read(void* buffer, int64_t num_bytes, int64_t offset) = 0;

  // Attempts to write `num_bytes` at `offset`.
  // REQUIRES: buffer, num_bytes and offset are multiples of alignment(); the range was grown.
  virtual IoCount Write(const void* buffer, int64_t num_bytes, int64_t offset) = 0;

  // Makes the file at least `num_bytes` long with disk space behind every byte. Returns 0 or an
  // errno; after an error the file is as long as before.
  virtual int Grow(int64_t num_bytes) = 0;

  // What buffers, sizes and offsets must be multiples of; 1 where anything goes.
  virtual int64_t alignment() const = 0;

  // The folder the file lies in, for messages (the file itself has no name).
  virtual const std::string& path() const = 0;

  // Bytes that the file system still has for this user.
  virtual int64_t FreeBytes() const = 0;

  // Closes the file for good, so that its disk space is free again. Idempotent. Grow() fails later.
  // REQUIRES: no Read or Write is going on or follows.
  virtual void Close() = 0;

  // Lets go of what a forked child inherited, so that the disk space ends with the parent. Takes
  // no lock. REQUIRES: no other thread is running in this process; the file is not used again,
  // not even destroyed.
  virtual void AbandonAfterFork() = 0;
};

}  // namespace patrickstar
