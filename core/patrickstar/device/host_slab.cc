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

// Pages move in units of this size, from and to multiples of it inside a slab: so a unit never
// lies across two earlier moves, which many kernels refuse, and huge pages stay whole.
constexpr int64_t kMoveBytes = kHugePageBytes;

bool MoveUnit(std::byte* from, std::byte* to) {
  if (mremap(from, kMoveBytes, kMoveBytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) != MAP_FAILED) {
    return true;
  }
  // A refused move may have unmapped its target: map it again, unless it is still there.
  mmap(to, kMoveBytes, PROT_READ | PROT_WRITE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  return false;
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
  if (num_bytes_ != 0) munmap(data_, static_cast<size_t>(num_bytes_));
}

HostSlab SlabPool::Allocate(int64_t num_bytes, bool is_zeroed) {
  const int64_t rounded = AlignUp(num_bytes, kPageAlignment);
  if (rounded == 0) return HostSlab();
  HostSlab slab;
  int64_t num_used_bytes = rounded;  // at its start, of pages that were in use before
  {
    std::lock_guard lock(mutex_);
    const auto same_size = std::find_if(freed_.rbegin(), freed_.rend(), [&](const HostSlab& slab) {
      return slab.num_bytes() == rounded;
    });
    if (same_size != freed_.rend()) {
      slab = std::move(*same_size);
      freed_.erase(std::next(same_size).base());
    } else {
      slab = Map(rounded);
      num_used_bytes = MovePagesTo(slab);
      CrowdOut(rounded - num_used_bytes);
      mapped_bytes_ += rounded - num_used_bytes;
      peak_mapped_bytes_ = std::max(peak_mapped_bytes_, mapped_bytes_);
    }
  }
  if (is_zeroed) std::memset(slab.data(), 0, static_cast<size_t>(num_used_bytes));
  return slab;
}

int64_t SlabPool::MovePagesTo(const HostSlab& fresh) {
  int64_t num_moved_bytes = 0;
  for (auto freed = freed_.begin(); freed != freed_.end();) {
    while (freed->num_bytes_ >= kMoveBytes && fresh.num_bytes() - num_moved_bytes >= kMoveBytes) {
      if (!MoveUnit(freed->data_, fresh.data() + num_moved_bytes)) return num_moved_bytes;
      num_moved_bytes += kMoveBytes;
      freed->data_ += kMoveBytes;
      freed->num_bytes_ -= kMoveBytes;
    }
    freed = freed->num_bytes_ == 0 ? freed_.erase(freed) : std::next(freed);
    if (fresh.num_bytes() - num_moved_bytes < kMoveBytes) break;
  }
  return num_moved_bytes;
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
  while (!freed_.empty() && mapped_bytes_ + outside_bytes_ + num_bytes > limit_bytes_) {
    mapped_bytes_ -= freed_.front().num_bytes();
    freed_.pop_front();
  }
}

void SlabPool::set_limit_bytes(int64_t limit_bytes) {
  std::lock_guard lock(mutex_);
  limit_bytes_ = limit_bytes;
  CrowdOut(0);
}

void SlabPool::AddOutside(int64_t num_bytes) {
  std::lock_guard lock(mutex_);
  outside_bytes_ += num_bytes;
  CrowdOut(0);
}

int64_t SlabPool::outside_bytes() const {
  std::lock_guard lock(mutex_);
  return outside_bytes_;
}

int64_t SlabPool::mapped_bytes() const {
  std::lock_guard lock(mutex_);
  return mapped_bytes_;
}

int64_t SlabPool::peak_mapped_bytes() const {
  std::lock_guard lock(mutex_);
  return peak_mapped_bytes_;
}

}  // namespace patrickstar
