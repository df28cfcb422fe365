// SPDX-License-Identifier: Apache-2.0
//
// ChunkStream: a pass over chunks of one layout that memory cannot hold at once. Ranges
// of them go by in windows: read from disk, worked on, written to new places on disk,
// which take the place of the old ones together when the last range is done. Whatever
// fails before that changes nothing.
//
// The windows are reserved in the budget before anything else is touched. While the pass
// runs the chunks have no payload, and whoever wants one waits for its end: the pass
// itself waits for I/O only.
//
// Used by one thread, which leases none of the chunks.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <span>
#include <vector>

#include "patrickstar/chunk/acquirer.h"

namespace patrickstar {

struct StreamedChunk {
  ChunkId chunk = kNoChunk;
  int64_t element_size = 0;
  Access access = Access::kRead;
};

class ChunkStream {
 public:
  // Called for each range in order, with the address of its first element in each chunk.
  using Work = std::function<void(int64_t first_element, int64_t num_elements,
                                  std::span<std::byte* const> windows)>;

  ChunkStream(StoreState* state, PayloadMover* mover, Acquirer* acquirer,
              std::vector<StreamedChunk> chunks);
  ~ChunkStream();
  ChunkStream(const ChunkStream&) = delete;
  ChunkStream& operator=(const ChunkStream&) = delete;

  // Passes over all elements. False, and nothing was called or changed, when there is no disk
  // tier, somebody leases one of the chunks, or memory or disk lack room for the pass.
  // Throws: IoError, CorruptData, and what `work` throws; the chunks are as before then.
  bool Run(const Work& work);

 private:
  struct Member {
    StreamedChunk streamed;
    int64_t num_bytes = 0;
    SpillSlot old_slot = {};  // of the bytes, if they are on disk
    SpillSlot new_slot = {};  // of what is written
  };
  // Memory for one range of every chunk, and the I/O that goes on in it.
  struct WindowSet {
    std::vector<Payload> payloads;
    std::vector<std::byte*> data;
    int num_pending = 0;         // guarded by mutex_
    std::exception_ptr failure;  // guarded by mutex_
  };

  void ReserveWindows();
  bool Begin();
  bool EvictMembers(std::unique_lock<std::mutex>& lock);
  void AllocateNewSlots();
  void StartRead(int64_t range);
  void StartWrite(int64_t range);
  SpillFile::Done Pend(WindowSet* set);
  void Wait(WindowSet* set);
  void WaitForAll() noexcept;
  void PassOver(const Work& work);
  void Commit();
  void FreeSlots() noexcept;

  int64_t FirstOf(int64_t range) const { return range * range_elements_; }
  int64_t CountOf(int64_t range) const;
  WindowSet& SetOf(int64_t range) { return sets_[static_cast<size_t>(range) % sets_.size()]; }

  StoreState& state_;
  PayloadMover& mover_;
  Acquirer& acquirer_;
  std::vector<Member> members_;
  int64_t num_elements_ = 0;
  int64_t range_elements_ = 0;
  bool is_begun_ = false;      // the chunks are ours
  bool is_committed_ = false;  // new slots and old ones have changed places
  std::vector<WindowSet> sets_;

  std::mutex mutex_;  // a leaf
  std::condition_variable io_ended_;
};

}  // namespace patrickstar
