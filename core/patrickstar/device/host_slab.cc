// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/device/host_slab.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "patrickstar/base/error.h"
#include "patrickstar/base/text.h"
#include "patrickstar/base/types.h"

namespace patrickstar {
namespace {

// From this size on, huge pages are worth asking for: fewer faults while a slab fills.
constexpr int64_t kHugePageBytes = int64_t{2} << 20;

HostSlab Map(int64_t num_bytes) {
  void* data = mmap(nullptr, static_cast<size_t>(num_bytes), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    throw OutOfMemory(StrCat("cannot map ", FormatBytes(num_bytes),
                             " of host memory: ", std::strerror(errno),
                             "; lower host_memory or raise the limit of the process (ulimit -v)"));
  }
  if (num_bytes >= kHugePageBytes) {
    madvise(data, static_cast<size_t>(num_bytes), MADV_HUGEPAGE);  // advice: may be refused
  }
  return HostSlab(static_cast<std::byte*>(data), num_bytes);
}

}  // namespace

HostSlab::HostSlab(HostSlab&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), num_bytes_(std::exchange(other.num_bytes_, 0)) {}

HostSlab& HostSlab::operator=(HostSlab&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(num_bytes_, other.num_bytes_);
  return *this;
}

HostSlab::~HostSlab() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(num_bytes_));
}

HostSlab SlabPool::Allocate(int64_t num_bytes, bool is_zeroed) {
  const int64_t rounded = AlignUp(num_bytes, kPageAlignment);
  if (rounded == 0) return HostSlab();
  HostSlab reused;
  {
    std::lock_guard lock(mutex_);
    const auto same_size = std::find_if(freed_.rbegin(), freed_.rend(), [&](const HostSlab& slab) {
      return slab.num_bytes() == rounded;
    });
    if (same_size == freed_.rend()) {
      CrowdOut(rounded);
      HostSlab fresh = Map(rounded);
      mapped_bytes_ += rounded;
      peak_mapped_bytes_ = std::max(peak_mapped_bytes_, mapped_bytes_);
      return fresh;
    }
    reused = std::move(*same_size);
    freed_.erase(std::next(same_size).base());
  }
  if (is_zeroed) std::memset(reused.data(), 0, static_cast<size_t>(rounded));
  return reused;
}

void SlabPool::Free(HostSlab slab) {
  if (slab.data() == nullptr) return;
  std::lock_guard lock(mutex_);
  freed_.push_back(std::move(slab));
  CrowdOut(0);  // the limit may have been lowered
}

void SlabPool::Trim() {
  std::lock_guard lock(mutex_);
  while (!freed_.empty()) {
    mapped_bytes_ -= freed_.back().num_bytes();
    freed_.pop_back();
  }
}

void SlabPool::CrowdOut(int64_t num_bytes) {
  while (!freed_.empty() && mapped_bytes_ + num_bytes > limit_bytes_) {
    mapped_bytes_ -= freed_.front().num_bytes();
    freed_.pop_front();
  }
}

void SlabPool::set_limit_bytes(int64_t limit_bytes) {
  std::lock_guard lock(mutex_);
  limit_bytes_ = limit_bytes;
  CrowdOut(0);
}

int64_t SlabPool::mapped_bytes() const {
  std::lock_guard lock(mutex_);
  return mapped_bytes_;
}

int64_t SlabPool::peak_mapped_bytes() const {
  std::lock_guard lock(mutex_);
  return peak_mapped_bytes_;
}

void SlabPool::reset_peak() {
  std::lock_guard lock(mutex_);
  peak_mapped_bytes_ = mapped_bytes_;
}

}  // namespace patrickstar
