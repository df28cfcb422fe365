// SPDX-License-Identifier: Apache-2.0
//
// SlotRegistry: which storage lies where. It owns the slots and the chunk groups, makes
// managed storages, frees the slots of dead ones, and points storages at payloads for
// the store (it is the store's Binder).
//
// Thread-safe. Its mutex comes before the store's; the bindings (slots and address of
// each chunk) have a leaf mutex of their own, because the store calls Attach and Detach
// under its own. Neither is held over Python or a tensor's destructor.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "glue/managed_storage.h"
#include "patrickstar/chunk/chunk_store.h"
#include "patrickstar/layout/chunk_group.h"

namespace patrickstar {

// A fresh managed storage and what is known of its bytes.
struct NewStorage {
  c10::Storage storage;
  ChunkId chunk = kNoChunk;
  int64_t byte_offset = 0;
  bool is_zero = false;  // else the bytes are arbitrary
};

class SlotRegistry final : public Binder {
 public:
  // The store must outlive the last call of anything but the destructor.
  void set_store(ChunkStore* store) { store_ = store; }

  // A new group; its chunks come into being with their first storage.
  size_t AddGroup(GroupLayout layout);

  // A storage over a vacant place of a chunk of that kind in the group; a new chunk when
  // every one is taken there.
  // Throws: OutOfMemory, IoError.
  NewStorage MakeStorage(size_t group, size_t index, Kind kind, at::ScalarType dtype,
                         int64_t num_bytes, const std::string& name);

  // Frees the slots of storages that died; chunks without a live one lose their bytes,
  // groups without one their chunks.
  void FreeDeadSlots();

  void Rename(ManagedStorage* storage, const std::string& name);
  std::string NameOf(ManagedStorage* storage);

  // Makes a managed storage ordinary, with a copy of its bytes: all tensors over it follow.
  // Throws: OutOfMemory, IoError; then it is managed as before.
  void MakePlain(ManagedStorage* storage);

  // Storages that are alive, each held so that it stays alive.
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> LiveStorages();

  // While somebody observes ops (a profiler), a storage without bytes answers a raw read
  // with null: observers ask for every argument's address before the guard has seen it.
  // Else it answers with an error.
  void SetObserved(bool is_observed);

  // fork(): both mutexes are held across it, with the store's between them.
  void PrepareFork() {
    mutex_.lock();
    store_->PrepareFork();
    bindings_mutex_.lock();
  }
  void ResumeParent() {
    bindings_mutex_.unlock();
    store_->ResumeParent();
    mutex_.unlock();
  }
  void ResumeChild() {
    bindings_mutex_.unlock();
    store_->ResumeChild();
    mutex_.unlock();
  }

  void Attach(ChunkId chunk, std::byte* data) noexcept override;
  void Detach(ChunkId chunk) noexcept override;
  std::string Describe(ChunkId chunk) override;

 private:
  struct Binding {
    std::vector<std::unique_ptr<Slot>> slots;
    std::byte* data = nullptr;  // as last told by the store
  };

  void Bind(std::unique_ptr<Slot> slot, ManagedStorage* storage);
  std::unique_ptr<Slot> Unbind(Slot* slot);
  void PointAtNothing(const Slot& slot, ManagedStorage* storage) const;
  void Vacate(size_t group, size_t index, ChunkId chunk);

  ChunkStore* store_ = nullptr;
  std::mutex mutex_;
  std::deque<std::optional<ChunkGroup>> groups_;  // empty: every tensor of it died
  std::vector<size_t> free_groups_;               // indexes of the empty ones

  std::mutex bindings_mutex_;
  std::unordered_map<ChunkId, Binding> bindings_;
  bool is_observed_ = false;
};

}  // namespace patrickstar
