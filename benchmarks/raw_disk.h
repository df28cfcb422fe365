// SPDX-License-Identifier: Apache-2.0
//
// RawDisk: what the disk gives to plain loops of pwrite and pread with O_DIRECT, on
// a preallocated nameless file. It is the baseline that every benchmark with a disk
// measures in the same run, because disks change by the hour. It shares no code with
// the engine that it judges.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace patrickstar::benchmarks {

struct RawDiskResult {
  int64_t block_bytes = 0;
  int num_threads = 0;
  double write_bytes_per_s = 0.0;
  double read_bytes_per_s = 0.0;
};

class RawDisk {
 public:
  // Creates a file of `file_bytes` (rounded up to 16 MiB) in `directory` and writes it once, so
  // that no later figure contains the first use of the space. Throws: IoError.
  RawDisk(const std::string& directory, int64_t file_bytes);
  ~RawDisk();
  RawDisk(const RawDisk&) = delete;
  RawDisk& operator=(const RawDisk&) = delete;

  // Writes the whole file and then reads it, `num_threads` blocks at a time. Throws: IoError.
  RawDiskResult Measure(int64_t block_bytes, int num_threads) const;

  // Blocks of 1, 4 and 16 MiB with 1, 4 and 16 threads.
  std::vector<RawDiskResult> MeasureAll() const;

  int64_t file_bytes() const { return file_bytes_; }

 private:
  enum class Direction : uint8_t { kWrite, kRead };

  double MovePerSecond(Direction direction, int64_t block_bytes, int num_threads) const;
  int MoveShare(Direction direction, int64_t block_bytes, int num_threads, int thread,
                void* buffer) const;

  int64_t file_bytes_;
  int descriptor_;
};

}  // namespace patrickstar::benchmarks
