// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/io/spill_file.h"

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "patrickstar/base/check.h"
#include "patrickstar/base/error.h"
#include "patrickstar/base/text.h"
#include "patrickstar/base/types.h"

namespace patrickstar {
SpillFile::SpillFile(std::unique_ptr<RawFile> file, const SpillFileOptions& options)
    : options_(options),
      path_(file->path()),
      async_file_(std::move(file), {.num_threads = options.num_threads,
                                    .random_delays = options.random_delays,
                                    .seed = options.seed}) {
  PS_CHECK(async_file_.file().alignment() <= kPageAlignment, "got ",
           async_file_.file().alignment());
}

SpillFile::~SpillFile() = default;

SpillSlot SpillFile::Allocate(int64_t num_bytes) {
  PS_CHECK(num_bytes > 0, "got ", num_bytes);
  if (async_file_.is_abandoned()) throw Error(AsyncFile::kForkedMessage);
  const int64_t rounded_bytes = AlignUp(num_bytes, kPageAlignment);
  SpillSlot slot = TryAllocate(rounded_bytes);
  if (slot.is_valid()) return slot;
  std::lock_guard lock(grow_mutex_);
  while (true) {
    // Others may free room while we wait for the lock, or take what we have just added.
    slot = TryAllocate(rounded_bytes);
    if (slot.is_valid()) return slot;
    GrowFor(rounded_bytes);
  }
}

void SpillFile::Free(const SpillSlot& slot) {
  if (async_file_.is_abandoned()) return;
  std::lock_guard lock(mutex_);
  const Slot& record = FindLocked(slot);
  PS_CHECK(record.num_reads == 0 && !record.is_being_written, "slot at ", slot.offset,
           " is freed during I/O");
  holes_.Add(slot.offset, slot.num_bytes);
  slots_.erase(slot.offset);
}

void SpillFile::Write(const SpillSlot& slot, const void* data, int64_t num_bytes, Done done) {
  // A write request only reads the buffer.
  Submit(slot, {.op = IoRequest::Op::kWrite, .num_bytes = num_bytes, .done = std::move(done)},
         const_cast<void*>(data));
}

void SpillFile::Read(const SpillSlot& slot, void* data, int64_t num_bytes, Done done) {
  Submit(slot, {.op = IoRequest::Op::kRead, .num_bytes = num_bytes, .done = std::move(done)}, data);
}

void SpillFile::ReadPart(const SpillSlot& slot, int64_t offset, void* data, int64_t num_bytes,
                         Done done) {
  Submit(slot,
         {.op = IoRequest::Op::kRead,
          .is_part = true,
          .offset = offset,
          .num_bytes = num_bytes,
          .done = std::move(done)},
         data);
}

void SpillFile::WritePart(const SpillSlot& slot, int64_t offset, const void* data,
                          int64_t num_bytes, Done done) {
  Submit(slot,
         {.op = IoRequest::Op::kWrite,
          .is_part = true,
          .offset = offset,
          .num_bytes = num_bytes,
          .done = std::move(done)},
         const_cast<void*>(data));
}

void SpillFile::Shutdown() { async_file_.Shutdown(); }

void SpillFile::AbandonAfterFork() { async_file_.AbandonAfterFork(); }

int64_t SpillFile::allocated_bytes() const {
  std::lock_guard lock(mutex_);
  return file_bytes_ - holes_.TotalBytes();
}

int64_t SpillFile::file_bytes() const {
  std::lock_guard lock(mutex_);
  return file_bytes_;
}

SpillSlot SpillFile::TryAllocate(int64_t num_bytes) {
  std::lock_guard lock(mutex_);
  const int64_t offset = holes_.Take(num_bytes);
  if (offset < 0) return {};
  slots_[offset].num_bytes = num_bytes;
  return {.offset = offset, .num_bytes = num_bytes};
}

// Adds what the hole at the end of the file lacks. REQUIRES: grow_mutex_ is held.
void SpillFile::GrowFor(int64_t num_bytes) {
  int64_t old_bytes;
  int64_t missing_bytes;
  {
    std::lock_guard lock(mutex_);
    old_bytes = file_bytes_;
    missing_bytes = num_bytes - std::min(num_bytes, holes_.BytesBefore(file_bytes_));
    // A hole at the end that is large enough was freed a moment ago: nothing to add.
    if (missing_bytes == 0) return;
    if (missing_bytes > options_.max_bytes - file_bytes_) {
      throw OutOfMemory(StrCat(
          "cannot spill ", FormatBytes(num_bytes), " to ", path_, ": ",
          FormatBytes(file_bytes_ - holes_.TotalBytes()), " of ", FormatBytes(options_.max_bytes),
          " allowed are used, largest hole ", FormatBytes(holes_.LargestBytes()),
          "; raise disk_space to at least ", FormatBytes(file_bytes_ + missing_bytes), " (",
          file_bytes_ + missing_bytes, " bytes)"));
    }
  }
  const int error_number = async_file_.file().Grow(old_bytes + missing_bytes);
  if (error_number != 0) ThrowGrowFailed(missing_bytes, error_number);
  std::lock_guard lock(mutex_);
  holes_.Add(old_bytes, missing_bytes);
  file_bytes_ = old_bytes + missing_bytes;
}

void SpillFile::ThrowGrowFailed(int64_t missing_bytes, int error_number) {
  throw IoError(
      StrCat("cannot grow the spill file in ", path_, ": ",
             std::system_category().message(error_number), ", ", FormatBytes(missing_bytes), " (",
             missing_bytes, " bytes) needed, ", FormatBytes(async_file_.file().FreeBytes()),
             " free; free space in ", path_, ", raise host_memory or name another spill_dir"),
      error_number);
}

SpillFile::Slot& SpillFile::FindLocked(const SpillSlot& slot) {
  const auto found = slots_.find(slot.offset);
  PS_CHECK(found != slots_.end(), "no slot at ", slot.offset);
  PS_CHECK(found->second.num_bytes == slot.num_bytes, "slot at ", slot.offset, " has ",
           found->second.num_bytes, " bytes, got ", slot.num_bytes);
  return found->second;
}

void SpillFile::Submit(const SpillSlot& slot, Batch whole, void* data) {
  if (async_file_.is_abandoned()) {
    whole.done(std::make_exception_ptr(Error(AsyncFile::kForkedMessage)));
    return;
  }
  PS_CHECK(whole.done != nullptr);
  PS_CHECK(whole.num_bytes > 0 && whole.offset >= 0 && whole.offset % kBlockBytes == 0 &&
               whole.offset + whole.num_bytes <= slot.num_bytes,
           "got ", whole.num_bytes, " bytes at ", whole.offset, " for ", slot.num_bytes);
  PS_CHECK(reinterpret_cast<uintptr_t>(data) % kPageAlignment == 0, "got ", data);
  whole.num_bytes = AlignUp(whole.num_bytes, kPageAlignment);
  whole.num_pending_blocks = AlignUp(whole.num_bytes, kBlockBytes) / kBlockBytes;
  const auto first_block = static_cast<size_t>(whole.offset / kBlockBytes);
  whole.slot_offset = slot.offset;
  const auto batch = std::make_shared<Batch>(std::move(whole));
  std::vector<uint32_t> checksums(static_cast<size_t>(batch->num_pending_blocks));
  {
    std::lock_guard lock(mutex_);
    Slot& record = FindLocked(slot);
    BeginLocked(*batch, &record);
    for (size_t block = 0; block < checksums.size(); ++block) {
      checksums[block] = record.checksums[first_block + block];
    }
  }
  for (size_t block = 0; block < checksums.size(); ++block) {
    const int64_t start = static_cast<int64_t>(block) * kBlockBytes;
    async_file_.Submit({.op = batch->op,
                        .buffer = static_cast<char*>(data) + start,
                        .num_bytes = std::min(kBlockBytes, batch->num_bytes - start),
                        .offset = slot.offset + batch->offset + start,
                        .checksum = checksums[block],
                        .done = [this, batch, block = first_block + block](
                                    IoRequest& request, std::exception_ptr error) {
                          FinishBlock(*batch, block, request, std::move(error));
                        }});
  }
}

// Marks the I/O as going on.
void SpillFile::BeginLocked(const Batch& batch, Slot* record) {
  PS_CHECK(record->is_being_written == (batch.op == IoRequest::Op::kWrite && batch.is_part),
           "slot at ", batch.slot_offset, " is ", record->is_being_written ? "" : "not ",
           "being written");
  if (batch.op == IoRequest::Op::kRead) {
    PS_CHECK(batch.is_part ? batch.offset + batch.num_bytes <= record->written_bytes
                           : batch.num_bytes == record->written_bytes,
             "slot at ", batch.slot_offset, " holds ", record->written_bytes, " bytes, asked for ",
             batch.num_bytes, " at ", batch.offset);
    ++record->num_reads;
  } else if (!batch.is_part) {
    BeginWriteLocked(batch.slot_offset, batch.num_bytes, record);
  }
}

void SpillFile::BeginWriteLocked(int64_t slot_offset, int64_t num_bytes, Slot* record) {
  PS_CHECK(record->num_reads == 0, "slot at ", slot_offset, " is being read");
  record->is_being_written = true;
  record->written_bytes = 0;
  record->checksums.assign(static_cast<size_t>(AlignUp(num_bytes, kBlockBytes) / kBlockBytes), 0);
}

void SpillFile::BeginParts(const SpillSlot& slot, int64_t num_bytes) {
  std::lock_guard lock(mutex_);
  Slot& record = FindLocked(slot);
  PS_CHECK(!record.is_being_written, "slot at ", slot.offset, " is being written");
  BeginWriteLocked(slot.offset, AlignUp(num_bytes, kPageAlignment), &record);
}

void SpillFile::EndParts(const SpillSlot& slot, int64_t num_bytes) {
  std::lock_guard lock(mutex_);
  Slot& record = FindLocked(slot);
  record.is_being_written = false;
  record.written_bytes = AlignUp(num_bytes, kPageAlignment);
}

void SpillFile::FinishBlock(Batch& batch, size_t block, const IoRequest& request,
                            std::exception_ptr error) {
  const bool is_write = batch.op == IoRequest::Op::kWrite;
  if (error == nullptr) {
    (is_write ? bytes_written_ : bytes_read_)
        .fetch_add(request.num_bytes, std::memory_order_relaxed);
  }
  bool is_last;
  {
    std::lock_guard lock(mutex_);
    if (is_write) slots_.at(batch.slot_offset).checksums[block] = request.checksum;
    if (batch.error == nullptr) batch.error = std::move(error);
    is_last = --batch.num_pending_blocks == 0;
    if (is_last) EndLocked(batch);
  }
  if (!is_last) return;
  // Nobody else looks at the batch once its last block has ended. What `done` owns ends here, not
  // when the slowest thread lets go of the batch.
  const Done done = std::move(batch.done);
  done(std::move(batch.error));
}

void SpillFile::EndLocked(const Batch& batch) {
  Slot& record = slots_.at(batch.slot_offset);
  if (batch.op == IoRequest::Op::kRead) {
    --record.num_reads;
    return;
  }
  if (batch.is_part) return;
  record.is_being_written = false;
  if (batch.error == nullptr) record.written_bytes = batch.num_bytes;
}

}  // namespace patrickstar
