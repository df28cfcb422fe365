// SPDX-License-Identifier: Apache-2.0
//
// FaultyFile: a RawFile in memory that fails on demand, for the tests of
// everything that stands on a disk. Faults are random (seeded) or scripted, and
// scripted ones can be set and healed while other threads do I/O. Like a file
// with O_DIRECT it refuses what is not aligned, and it refuses what was not grown.
// Thread-safe. A test keeps a plain pointer to it while a SpillFile owns it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "patrickstar/io/raw_file.h"

namespace patrickstar {

struct FaultyFileOptions {
  uint64_t seed = 1;
  double short_probability = 0.0;      // Chance that a call moves only a part.
  double interrupt_probability = 0.0;  // Chance that a call fails with EINTR.
  int max_delay_us = 0;                // Each call sleeps up to this long.
  int64_t alignment = 4096;            // As RawFile::alignment().
  std::string path = "/faulty";
};

class FaultyFile : public RawFile {
 public:
  explicit FaultyFile(FaultyFileOptions options = {});

  // The `nth` read or write from now on (1 is the next) fails with `error_number`, once.
  void FailNthCall(int64_t nth, int error_number);

  // Reads and writes that touch [begin, end) fail with `error_number` until Heal().
  void FailRange(int64_t begin, int64_t end, int error_number);

  // Reads give the byte at `offset` with `bit` (0..7) flipped until Heal().
  void FlipBitOnRead(int64_t offset, int bit);

  // From now on growing fails with ENOSPC when it needs more than `num_bytes`.
  void SetFreeBytes(int64_t num_bytes);

  // While on, writes fail with ENOSPC (a file system that does not keep reservations).
  void SetWritesFull(bool is_full);

  // Reads and writes wait inside the file between Pause() and Resume().
  void Pause();
  void Resume();

  // Returns once `num_calls` calls wait for Resume().
  void WaitForPaused(int num_calls);

  // Forgets FailNthCall, FailRange, FlipBitOnRead and SetWritesFull.
  void Heal();

  // Calls so far, failed ones included, and the bytes reserved.
  int64_t num_reads() const;
  int64_t num_writes() const;
  int64_t num_bytes() const;

  IoCount Read(void* buffer, int64_t num_bytes, int64_t offset) override;
  IoCount Write(const void* buffer, int64_t num_bytes, int64_t offset) override;
  int Grow(int64_t num_bytes) override;
  int64_t alignment() const override { return options_.alignment; }
  const std::string& path() const override { return options_.path; }
  int64_t FreeBytes() const override;
  void Close() override {}
  void AbandonAfterFork() override {}

 private:
  struct FailedRange {
    int64_t begin;
    int64_t end;
    int error_number;
  };

  void WaitAndDelay();
  int ErrorLocked(const void* buffer, int64_t num_bytes, int64_t offset);
  int64_t CountLocked(int64_t num_bytes);
  bool HappensLocked(double probability);

  const FaultyFileOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable pause_changed_;
  // Guarded by mutex_:
  std::mt19937_64 random_;
  std::vector<char> bytes_;
  std::vector<FailedRange> failed_ranges_;
  std::map<int64_t, int> failed_calls_;  // By number of the call.
  std::multimap<int64_t, int> flipped_;  // Offset to bit.
  int64_t free_bytes_ = INT64_MAX;
  int64_t num_reads_ = 0;
  int64_t num_writes_ = 0;
  bool is_full_ = false;
  bool is_paused_ = false;
  int num_paused_ = 0;
};

}  // namespace patrickstar
