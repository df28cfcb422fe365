// SPDX-License-Identifier: Apache-2.0
#include "glue/raw_memory.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "glue/access_set.h"
#include "glue/adoption.h"
#include "glue/errors.h"
#include "glue/managed_storage.h"

namespace patrickstar {
namespace {

// An op lease, if there is room.
class LeaseIfItFits {
 public:
  LeaseIfItFits(Engine* engine, std::span<const ChunkAccess> set, const std::string& what)
      : engine_(*engine), set_(set) {
    if (set_.empty()) return;
    if (!engine_.store().CanHold(set_)) {
      is_taken_ = false;
    } else if (!engine_.store().TryAcquire(set_, LeaseKind::kOp)) {
      is_taken_ = TryAcquireWithoutGil(engine, set_, LeaseKind::kOp, what);
    }
  }
  ~LeaseIfItFits() {
    if (is_taken_ && !set_.empty()) engine_.store().Release(set_, LeaseKind::kOp);
  }
  LeaseIfItFits(const LeaseIfItFits&) = delete;
  LeaseIfItFits& operator=(const LeaseIfItFits&) = delete;

  bool is_taken() const { return is_taken_; }

 private:
  Engine& engine_;
  const std::span<const ChunkAccess> set_;
  bool is_taken_ = true;
};

// Storages over chunk memory that a pass sees. Where somebody keeps one, such as the traceback of
// a pass that threw, it ends up over nothing, and reading it raises.
class LentStorages {
 public:
  LentStorages() = default;
  ~LentStorages() {
    for (const c10::Storage& storage : storages_) {
      if (storage.use_count() == 1) continue;
      storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(
          "the memory that an optimizer's step saw is not there any more; read the parameter, its "
          "gradient or its state instead");
    }
  }
  LentStorages(const LentStorages&) = delete;
  LentStorages& operator=(const LentStorages&) = delete;

  void Add(const at::Tensor& tensor) { storages_.push_back(tensor.storage()); }

 private:
  std::vector<c10::Storage> storages_;
};

// Where the tensors of rows lie in the chunks of their group.
class RowWindows {
 public:
  // None when the managed tensors are not of one group, or no row has one.
  static std::optional<RowWindows> Of(const std::vector<std::vector<at::Tensor>>& rows,
                                      const std::vector<bool>& is_written) {
    RowWindows result(rows);
    std::optional<size_t> group;
    for (const std::vector<at::Tensor>& row : rows) {
      for (size_t column = 0; column < row.size(); ++column) {
        const ManagedStorage* const storage = ManagedStorageOf(row[column]);
        if (storage == nullptr) continue;
        if (group.value_or(storage->slot()->group) != storage->slot()->group) return std::nullopt;
        group = storage->slot()->group;
        result.AddChunk(*storage->slot(), row[column].element_size(), is_written[column]);
      }
      if (ManagedStorageOf(row[0]) == nullptr) return std::nullopt;
    }
    if (!group) return std::nullopt;
    return result;
  }

  const std::vector<StreamedChunk>& chunks() const { return chunks_; }

  std::vector<RowPiece> PiecesIn(int64_t first, int64_t count, std::span<std::byte* const> windows,
                                 LentStorages* lent) const {
    std::vector<RowPiece> pieces;
    for (size_t index = 0; index < rows_.size(); ++index) {
      const at::Tensor& parameter = rows_[index][0];
      const int64_t row_first =
          ManagedStorageOf(parameter)->slot()->byte_offset / parameter.element_size();
      const int64_t begin = std::max(first, row_first);
      const int64_t end = std::min(first + count, row_first + parameter.numel());
      if (begin >= end) continue;
      RowPiece& piece = pieces.emplace_back();
      piece.row = index;
      for (const at::Tensor& tensor : rows_[index]) {
        piece.tensors.push_back(Piece(tensor, begin - row_first, end - begin, first, windows));
        if (ManagedStorageOf(tensor) != nullptr) lent->Add(piece.tensors.back());
      }
    }
    return pieces;
  }

 private:
  explicit RowWindows(const std::vector<std::vector<at::Tensor>>& rows) : rows_(rows) {}

  void AddChunk(const Slot& slot, int64_t element_size, bool is_written) {
    const Access access = is_written ? Access::kWrite : Access::kRead;
    const auto [known, is_new] = indexes_.try_emplace(slot.chunk, chunks_.size());
    if (is_new) {
      chunks_.push_back({.chunk = slot.chunk, .element_size = element_size, .access = access});
    } else if (is_written) {
      chunks_[known->second].access = access;
    }
  }

  // `count` elements of the tensor from its `offset`th on, in the order of memory.
  at::Tensor Piece(const at::Tensor& tensor, int64_t offset, int64_t count, int64_t first,
                   std::span<std::byte* const> windows) const {
    const ManagedStorage* const storage = ManagedStorageOf(tensor);
    if (storage == nullptr) {
      return tensor.detach().as_strided({count}, {1}, tensor.storage_offset() + offset);
    }
    const Slot& slot = *storage->slot();
    const int64_t place = slot.byte_offset + (offset - first) * tensor.element_size();
    return at::from_blob(windows[indexes_.at(slot.chunk)] + place, {count},
                         at::TensorOptions().dtype(tensor.dtype()).device(c10::kCPU));
  }

  const std::vector<std::vector<at::Tensor>>& rows_;
  std::vector<StreamedChunk> chunks_;
  std::unordered_map<ChunkId, size_t> indexes_;  // of chunks_
};

}  // namespace

bool RunOnRawMemory(Engine* engine, const std::vector<at::Tensor>& tensors,
                    const std::vector<bool>& is_written, const std::string& what,
                    const std::function<void(std::vector<at::Tensor>)>& pass) {
  AccessSet set;
  for (size_t index = 0; index < tensors.size(); ++index) {
    set.Add(tensors[index].unsafeGetTensorImpl(), is_written[index]);
  }
  const LeaseIfItFits lease(engine, set.accesses(), what);
  if (!lease.is_taken()) return false;
  LentStorages lent;
  std::vector<at::Tensor> raw;
  raw.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    ManagedStorage* const storage = ManagedStorageOf(tensor);
    if (storage == nullptr) {
      raw.push_back(tensor.detach());
      continue;
    }
    const Slot& slot = *storage->slot();
    raw.push_back(MakeRawTensor(engine->store().data(slot.chunk) + slot.byte_offset, tensor));
    lent.Add(raw.back());
  }
  pass(std::move(raw));
  return true;
}

bool StreamRawMemory(Engine* engine, const std::vector<std::vector<at::Tensor>>& rows,
                     const std::vector<bool>& is_written,
                     const std::function<void(std::vector<RowPiece>)>& pass) {
  const std::optional<RowWindows> row_windows = RowWindows::Of(rows, is_written);
  if (!row_windows) return false;
  const GilReleaseIfHeld without_gil;
  return ThroughTorch([&] {
    return engine->store().Stream(row_windows->chunks(), [&](int64_t first, int64_t count,
                                                             std::span<std::byte* const> windows) {
      LentStorages lent;
      pass(row_windows->PiecesIn(first, count, windows, &lent));
    });
  });
}

std::optional<size_t> GroupOf(const at::Tensor& tensor) {
  ManagedStorage* const storage = ManagedStorageOf(tensor);
  if (storage == nullptr || !FillsItsSlot(tensor)) return std::nullopt;
  return storage->slot()->group;
}

}  // namespace patrickstar
