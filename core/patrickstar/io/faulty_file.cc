// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/io/faulty_file.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

namespace patrickstar {

FaultyFile::FaultyFile(FaultyFileOptions options)
    : options_(std::move(options)), random_(options_.seed) {}

void FaultyFile::FailNthCall(int64_t nth, int error_number) {
  std::lock_guard lock(mutex_);
  failed_calls_[num_reads_ + num_writes_ + nth] = error_number;
}

void FaultyFile::FailRange(int64_t begin, int64_t end, int error_number) {
  std::lock_guard lock(mutex_);
  failed_ranges_.push_back({.begin = begin, .end = end, .error_number = error_number});
}

void FaultyFile::FlipBitOnRead(int64_t offset, int bit) {
  std::lock_guard lock(mutex_);
  flipped_.emplace(offset, bit);
}

void FaultyFile::SetFreeBytes(int64_t num_bytes) {
  std::lock_guard lock(mutex_);
  free_bytes_ = num_bytes;
}

void FaultyFile::SetWritesFull(bool is_full) {
  std::lock_guard lock(mutex_);
  is_full_ = is_full;
}

void FaultyFile::Pause() {
  std::lock_guard lock(mutex_);
  is_paused_ = true;
}

void FaultyFile::Resume() {
  std::lock_guard lock(mutex_);
  is_paused_ = false;
  pause_changed_.notify_all();
}

void FaultyFile::WaitForPaused(int num_calls) {
  std::unique_lock lock(mutex_);
  pause_changed_.wait(lock, [&] { return num_paused_ >= num_calls; });
}

void FaultyFile::Heal() {
  std::lock_guard lock(mutex_);
  failed_calls_.clear();
  failed_ranges_.clear();
  flipped_.clear();
  is_full_ = false;
}

int64_t FaultyFile::num_reads() const {
  std::lock_guard lock(mutex_);
  return num_reads_;
}

int64_t FaultyFile::num_writes() const {
  std::lock_guard lock(mutex_);
  return num_writes_;
}

int64_t FaultyFile::num_bytes() const {
  std::lock_guard lock(mutex_);
  return static_cast<int64_t>(bytes_.size());
}

IoCount FaultyFile::Read(void* buffer, int64_t num_bytes, int64_t offset) {
  WaitAndDelay();
  std::lock_guard lock(mutex_);
  ++num_reads_;
  const int error_number = ErrorLocked(buffer, num_bytes, offset);
  if (error_number != 0) return {.num_bytes = 0, .error_number = error_number};
  const int64_t available = static_cast<int64_t>(bytes_.size()) - offset;
  const int64_t count = std::min(CountLocked(num_bytes), std::max<int64_t>(available, 0));
  if (count == 0) return {};
  auto* target = static_cast<char*>(buffer);
  std::memcpy(target, bytes_.data() + offset, static_cast<size_t>(count));
  const auto last = flipped_.lower_bound(offset + count);
  for (auto flip = flipped_.lower_bound(offset); flip != last; ++flip) {
    char& byte = target[flip->first - offset];
    byte = static_cast<char>(byte ^ (1 << flip->second));
  }
  return {.num_bytes = count, .error_number = 0};
}

IoCount FaultyFile::Write(const void* buffer, int64_t num_bytes, int64_t offset) {
  WaitAndDelay();
  std::lock_guard lock(mutex_);
  ++num_writes_;
  int error_number = ErrorLocked(buffer, num_bytes, offset);
  if (error_number == 0 && is_full_) error_number = ENOSPC;
  if (error_number == 0 && offset + num_bytes > static_cast<int64_t>(bytes_.size())) {
    error_number = EFBIG;
  }
  if (error_number != 0) return {.num_bytes = 0, .error_number = error_number};
  const int64_t count = CountLocked(num_bytes);
  std::memcpy(bytes_.data() + offset, buffer, static_cast<size_t>(count));
  return {.num_bytes = count, .error_number = 0};
}

int FaultyFile::Grow(int64_t num_bytes) {
  std::lock_guard lock(mutex_);
  const int64_t added = num_bytes - static_cast<int64_t>(bytes_.size());
  if (added <= 0) return 0;
  if (added > free_bytes_) return ENOSPC;
  free_bytes_ -= free_bytes_ == INT64_MAX ? 0 : added;
  bytes_.resize(static_cast<size_t>(num_bytes));
  return 0;
}

int64_t FaultyFile::FreeBytes() const {
  std::lock_guard lock(mutex_);
  return free_bytes_;
}

void FaultyFile::WaitAndDelay() {
  std::unique_lock lock(mutex_);
  ++num_paused_;
  pause_changed_.notify_all();
  pause_changed_.wait(lock, [this] { return !is_paused_; });
  --num_paused_;
  if (options_.max_delay_us == 0) return;
  std::uniform_int_distribution<int> delay_us(0, options_.max_delay_us);
  const std::chrono::microseconds delay(delay_us(random_));
  lock.unlock();
  std::this_thread::sleep_for(delay);
}

int FaultyFile::ErrorLocked(const void* buffer, int64_t num_bytes, int64_t offset) {
  const auto failed_call = failed_calls_.find(num_reads_ + num_writes_);
  if (failed_call != failed_calls_.end()) return failed_call->second;
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(buffer));
  if ((address | num_bytes | offset) % options_.alignment != 0) return EINVAL;
  for (const FailedRange& range : failed_ranges_) {
    if (offset < range.end && range.begin < offset + num_bytes) return range.error_number;
  }
  return HappensLocked(options_.interrupt_probability) ? EINTR : 0;
}

int64_t FaultyFile::CountLocked(int64_t num_bytes) {
  if (!HappensLocked(options_.short_probability)) return num_bytes;
  return std::uniform_int_distribution<int64_t>(1, num_bytes)(random_);
}

bool FaultyFile::HappensLocked(double probability) {
  return std::bernoulli_distribution(probability)(random_);
}

}  // namespace patrickstar
