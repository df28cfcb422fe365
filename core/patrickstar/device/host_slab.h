// SPDX-License-Identifier: Apache-2.0
//
// HostSlab: one page-aligned mapping of host memory, unmapped when it dies.
// SlabPool: hands out slabs of exact size, keeps freed ones for the next request, and
// never has more bytes mapped than its limit. A request of another size gets the pages
// of freed slabs too, moved and not copied: a page fault may cost more than the read
// that fills the page.
//
// The pool does not decide who may have memory: callers hold a reservation of the
// budget first. Freed slabs count as mapped until they are reused or trimmed, so the
// resident set of the process never passes the limit either. The pool is
// thread-safe; its mutex is a leaf, held over mmap and munmap so that the limit is
// exact at every moment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>

namespace patrickstar {

class HostSlab {
 public:
  HostSlab() = default;
  HostSlab(std::byte* data, int64_t num_bytes) : data_(data), num_bytes_(num_bytes) {}
  HostSlab(HostSlab&& other) noexcept;
  HostSlab& operator=(HostSlab&& other) noexcept;
  HostSlab(const HostSlab&) = delete;
  HostSlab& operator=(const HostSlab&) = delete;
  ~HostSlab();

  std::byte* data() const { return data_; }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  friend class SlabPool;
  std::byte* data_ = nullptr;
  int64_t num_bytes_ = 0;
};

class SlabPool {
 public:
  explicit SlabPool(int64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // Returns a slab of num_bytes rounded up to whole pages. The bytes are arbitrary
  // unless is_zeroed.
  // Throws: OutOfMemory when the operating system refuses the mapping.
  HostSlab Allocate(int64_t num_bytes, bool is_zeroed);

  // Takes a slab back. It stays mapped until reused, trimmed, or crowded out.
  void Free(HostSlab slab);

  // Unmaps every freed slab.
  void Trim();

  // Later allocations keep within the new limit.
  void set_limit_bytes(int64_t limit_bytes);

  // Bytes of the limit that are mapped elsewhere: the pool keeps within the rest.
  void AddOutside(int64_t num_bytes);

  // Held across fork(), so that the child finds the pool whole.
  void PrepareFork() { mutex_.lock(); }
  void ResumeAfterFork() { mutex_.unlock(); }

  int64_t outside_bytes() const;
  int64_t mapped_bytes() const;
  int64_t peak_mapped_bytes() const;

 private:
  // Moves pages of freed slabs, oldest first, under the start of a slab that has none yet.
  // Returns the bytes moved. REQUIRES: mutex_ held.
  int64_t MovePagesTo(const HostSlab& fresh);

  // Unmaps freed slabs, oldest first, until num_bytes more fit. REQUIRES: mutex_ held.
  void CrowdOut(int64_t num_bytes);

  mutable std::mutex mutex_;
  int64_t limit_bytes_;
  int64_t outside_bytes_ = 0;
  int64_t mapped_bytes_ = 0;
  int64_t peak_mapped_bytes_ = 0;
  std::deque<HostSlab> freed_;
};

}  // namespace patrickstar
