// SPDX-License-Identifier: Apache-2.0
//
// SpillFile: the disk tier's memory. Hands out slots of one file and moves whole
// payloads between a slot and memory on its I/O threads, in blocks of 1 MiB, each
// with a CRC-32C that stays in memory and is checked on every read. The file grows
// by exactly what is missing and never beyond max_bytes.
// Owns the file, the threads, the slots and their checksums. Thread-safe, except the
// destructor and AbandonAfterFork(). No lock is held over I/O or a callback.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "patrickstar/io/async_file.h"
#include "patrickstar/io/free_extents.h"
#include "patrickstar/io/raw_file.h"

namespace patrickstar {

struct SpillFileOptions {
  int64_t max_bytes = INT64_MAX;  // The file is never longer than this.
  int num_threads = 16;           // Blocks that the disk sees at once.
  bool random_delays = false;     // Stress: random sleeps around every block.
  uint64_t seed = 0;              // Of the random delays.
};

// A place in the file, of whole pages.
struct SpillSlot {
  int64_t offset = -1;
  int64_t num_bytes = 0;
  bool is_valid() const { return offset >= 0; }
};

class SpillFile {
 public:
  // Bytes under one checksum, and of one request to the disk.
  static constexpr int64_t kBlockBytes = int64_t{1} << 20;

  // Called exactly once when a whole payload has been moved or has failed, on an I/O thread (on
  // the caller's when the file was shut down or abandoned). Must not throw, shut down or destroy.
  using Done = std::function<void(std::exception_ptr)>;

  SpillFile(std::unique_ptr<RawFile> file, const SpillFileOptions& options);
  ~SpillFile();
  SpillFile(const SpillFile&) = delete;
  SpillFile& operator=(const SpillFile&) = delete;

  // A slot of `num_bytes` rounded up to pages: the smallest hole that is large enough, else new
  // space at the end. REQUIRES: num_bytes > 0.
  // Throws: OutOfMemory when max_bytes would be passed; IoError when the file system has no room
  // (error_number ENOSPC) or fails. The file stays usable, and a later call may succeed.
  SpillSlot Allocate(int64_t num_bytes);

  // Gives a slot back. REQUIRES: no Read or Write of it is going on.
  void Free(const SpillSlot& slot);

  // Writes `num_bytes` from `data` to the start of the slot. After a failure the slot holds
  // nothing until it is written again.
  // REQUIRES: `data` is aligned to pages and readable up to the next multiple of a page, unchanged
  // until `done`; no other Read or Write of the slot is going on.
  void Write(const SpillSlot& slot, const void* data, int64_t num_bytes, Done done);

  // Reads back what the last Write wrote. Several reads of one slot may go on at once.
  // REQUIRES: `data` is aligned to pages and writable up to the next multiple of a page;
  // `num_bytes` is what was written; no Write of the slot is going on.
  void Read(const SpillSlot& slot, void* data, int64_t num_bytes, Done done);

  // Read of a part: `num_bytes` at `offset` of what was written.
  // REQUIRES: as Read; `offset` is a multiple of kBlockBytes, and the part ends with a block or
  // with the payload.
  void ReadPart(const SpillSlot& slot, int64_t offset, void* data, int64_t num_bytes, Done done);

  // A Write of `num_bytes` that comes in parts, each of them once, in any order, between the two
  // calls. The slot holds nothing before EndParts, and nothing after it when that is given 0
  // bytes: the write is given up.
  // REQUIRES: as Write and ReadPart; no part is under way at EndParts, and all were written.
  void BeginParts(const SpillSlot& slot, int64_t num_bytes);
  void WritePart(const SpillSlot& slot, int64_t offset, const void* data, int64_t num_bytes,
                 Done done);
  void EndParts(const SpillSlot& slot, int64_t num_bytes);

  // Finishes what was submitted, joins the threads and gives the disk space back; later calls of
  // Read and Write fail.
  void Shutdown();

  // For a forked child: closes its descriptor; Read, Write and Allocate fail at once with an
  // Error, Free does nothing, the destructor waits for nobody.
  // REQUIRES: no other thread is running in this process.
  void AbandonAfterFork();

  // Bytes moved to and from the disk so far, whole pages, blocks that failed not counted.
  int64_t bytes_read() const { return bytes_read_.load(std::memory_order_relaxed); }
  int64_t bytes_written() const { return bytes_written_.load(std::memory_order_relaxed); }

  // Bytes in slots, and bytes of the file (slots and holes).
  int64_t allocated_bytes() const;
  int64_t file_bytes() const;

 private:
  struct Slot {
    int64_t num_bytes = 0;
    int64_t written_bytes = 0;        // Of the last whole write; 0 when there is none.
    std::vector<uint32_t> checksums;  // One a block of the last write.
    int num_reads = 0;                // Going on.
    bool is_being_written = false;
  };

  // One read or write of a payload or a part of it, shared by the requests of its blocks.
  struct Batch {
    IoRequest::Op op;
    bool is_part = false;
    int64_t offset = 0;  // In the payload.
    int64_t num_bytes = 0;
    Done done;
    int64_t slot_offset = 0;
    int64_t num_pending_blocks = 0;  // Guarded by mutex_, as is error.
    std::exception_ptr error = nullptr;
  };

  SpillSlot TryAllocate(int64_t num_bytes);
  void GrowFor(int64_t num_bytes);
  [[noreturn]] void ThrowGrowFailed(int64_t missing_bytes, int error_number);
  Slot& FindLocked(const SpillSlot& slot);
  void Submit(const SpillSlot& slot, Batch batch, void* data);
  void BeginLocked(const Batch& batch, Slot* record);
  static void BeginWriteLocked(int64_t slot_offset, int64_t num_bytes, Slot* record);
  void FinishBlock(Batch& batch, size_t block, const IoRequest& request, std::exception_ptr error);
  void EndLocked(const Batch& batch);

  const SpillFileOptions options_;
  const std::string path_;
  std::mutex grow_mutex_;  // Taken before mutex_, held while the file grows.
  mutable std::mutex mutex_;
  // Guarded by mutex_:
  std::unordered_map<int64_t, Slot> slots_;  // By offset.
  FreeExtents holes_;
  int64_t file_bytes_ = 0;

  std::atomic<int64_t> bytes_read_{0};
  std::atomic<int64_t> bytes_written_{0};
  AsyncFile async_file_;  // Last: its threads use all of the above.
};

}  // namespace patrickstar
