// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/io/os_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "patrickstar/base/error.h"
#include "patrickstar/base/text.h"
#include "patrickstar/base/types.h"

namespace patrickstar {
namespace {

namespace fs = std::filesystem;

constexpr char kAdvice[] = "; name a folder on a disk as spill_dir";

// Size of the zero-filled buffer that reserves space where fallocate cannot.
constexpr int64_t kZeroBytes = int64_t{1} << 20;

std::string Describe(int error_number) { return std::system_category().message(error_number); }

[[noreturn]] void ThrowRefused(const std::string& what, const std::string& directory,
                               int error_number) {
  throw IoError(
      StrCat("cannot ", what, " spill_dir ", directory, ": ", Describe(error_number), kAdvice),
      error_number);
}

// `directory` itself, or the nearest folder above it that is there.
fs::path NearestExisting(const std::string& directory) {
  std::error_code ignored;
  fs::path path = fs::absolute(directory, ignored);
  while (!fs::exists(path, ignored) && path.has_relative_path()) path = path.parent_path();
  return path;
}

bool IsInMemory(const std::string& directory, const fs::path& existing) {
  struct statfs info{};
  if (statfs(existing.c_str(), &info) != 0) ThrowRefused("look at", directory, errno);
  return info.f_type == TMPFS_MAGIC || static_cast<uint64_t>(info.f_type) == RAMFS_MAGIC;
}

// Refuses what can never be a spill folder before anything is created.
void CheckPlace(const std::string& directory) {
  if (directory.empty()) throw InvalidArgument(StrCat("spill_dir is empty", kAdvice));
  const fs::path existing = NearestExisting(directory);
  std::error_code ignored;
  if (!fs::is_directory(existing, ignored)) {
    throw InvalidArgument(StrCat("spill_dir ", directory, " cannot be a folder: ",
                                 existing.string(), " is a file", kAdvice));
  }
  if (IsInMemory(directory, existing)) {
    throw InvalidArgument(
        StrCat("spill_dir ", directory, " is on tmpfs, which is memory", kAdvice));
  }
}

// Direct I/O is asked for afterwards, because an open that is refused for it leaves the name
// behind.
int OpenUnlinked(const std::string& directory, int caching_flags) {
  std::string name = directory + "/.patrickstar-spill-XXXXXX";
  const int descriptor = mkostemp(name.data(), O_CLOEXEC);
  if (descriptor < 0) return descriptor;
  unlink(name.c_str());
  if (caching_flags == 0 || fcntl(descriptor, F_SETFL, caching_flags) == 0) return descriptor;
  const int error_number = errno;
  close(descriptor);
  errno = error_number;
  return -1;
}

// What direct I/O on this file must be aligned to; 0 where the file has no direct I/O.
int64_t DirectAlignment(int descriptor) {
#ifdef STATX_DIOALIGN
  struct statx info{};
  if (statx(descriptor, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) == 0 &&
      (info.stx_mask & STATX_DIOALIGN) != 0) {
    return std::max(info.stx_dio_mem_align, info.stx_dio_offset_align);
  }
#endif
  return kPageAlignment;
}

// Errors that mean "not in this way here", not "not at all".
bool IsUnsupportedWay(int error_number) {
  return error_number == EINVAL || error_number == EOPNOTSUPP || error_number == EISDIR ||
         error_number == ENOENT;
}

IoCount ToCount(ssize_t result) {
  if (result < 0) return {.num_bytes = 0, .error_number = errno};
  return {.num_bytes = result, .error_number = 0};
}

}  // namespace

std::unique_ptr<RawFile> OpenSpillFile(const std::string& directory) {
  CheckPlace(directory);
  std::error_code error;
  fs::create_directories(directory, error);
  if (error) ThrowRefused("create", directory, error.value());
  int error_number = 0;
  for (const OsFile::Caching caching : {OsFile::Caching::kDirect, OsFile::Caching::kBuffered}) {
    for (const OsFile::Naming naming : {OsFile::Naming::kUnnamed, OsFile::Naming::kUnlinked}) {
      auto file = OsFile::TryOpen(directory, naming, caching, &error_number);
      if (file != nullptr) return file;
      if (!IsUnsupportedWay(error_number)) ThrowRefused("write to", directory, error_number);
    }
  }
  ThrowRefused("write to", directory, error_number);
}

int64_t FreeBytes(const std::string& directory) {
  struct statvfs info{};
  if (statvfs(NearestExisting(directory).c_str(), &info) != 0) {
    ThrowRefused("look at", directory, errno);
  }
  return static_cast<int64_t>(info.f_bavail * info.f_frsize);
}

std::unique_ptr<OsFile> OsFile::TryOpen(const std::string& directory, Naming naming,
                                        Caching caching, int* error_number) {
  const int flags = caching == Caching::kDirect ? O_DIRECT : 0;
  const int descriptor = naming == Naming::kUnnamed
                             ? open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600)
                             : OpenUnlinked(directory, flags);
  if (descriptor < 0) {
    *error_number = errno;
    return nullptr;
  }
  const int64_t alignment = caching == Caching::kDirect ? DirectAlignment(descriptor) : 1;
  // Slots are aligned to pages, so a file that wants more cannot be used directly.
  if (alignment == 0 || alignment > kPageAlignment) {
    close(descriptor);
    *error_number = EINVAL;
    return nullptr;
  }
  return std::unique_ptr<OsFile>(new OsFile(directory, descriptor, alignment));
}

OsFile::OsFile(std::string directory, int descriptor, int64_t alignment)
    : directory_(std::move(directory)), descriptor_(descriptor), alignment_(alignment) {}

OsFile::~OsFile() { Close(); }

IoCount OsFile::Read(void* buffer, int64_t num_bytes, int64_t offset) {
  return ToCount(pread(descriptor_, buffer, static_cast<size_t>(num_bytes), offset));
}

IoCount OsFile::Write(const void* buffer, int64_t num_bytes, int64_t offset) {
  return ToCount(pwrite(descriptor_, buffer, static_cast<size_t>(num_bytes), offset));
}

int OsFile::Grow(int64_t num_bytes) {
  std::lock_guard lock(grow_mutex_);
  const int64_t target = AlignUp(num_bytes, kPageAlignment);
  if (target <= num_bytes_) return 0;
  const int error_number = Reserve(num_bytes_, target);
  if (error_number == 0) {
    num_bytes_ = target;
    return 0;
  }
  // A failed reservation may have taken part of the space: give it back.
  while (ftruncate(descriptor_, num_bytes_) != 0 && errno == EINTR) {
  }
  return error_number;
}

int OsFile::Reserve(int64_t begin, int64_t end) {
  int result;
  do {
    result = fallocate(descriptor_, 0, begin, end - begin);
  } while (result != 0 && errno == EINTR);
  if (result == 0) return 0;
  return errno == EOPNOTSUPP || errno == ENOSYS ? WriteZeros(begin, end) : errno;
}

int OsFile::WriteZeros(int64_t begin, int64_t end) {
  const std::unique_ptr<void, void (*)(void*)> zeros(
      std::aligned_alloc(kPageAlignment, static_cast<size_t>(kZeroBytes)), &std::free);
  if (zeros == nullptr) return ENOMEM;
  std::fill_n(static_cast<char*>(zeros.get()), kZeroBytes, '\0');
  while (begin < end) {
    const IoCount count = Write(zeros.get(), std::min(kZeroBytes, end - begin), begin);
    if (count.error_number != 0 && count.error_number != EINTR) return count.error_number;
    // A short count may end between two aligned places: go on from the last aligned one.
    begin += count.num_bytes / alignment_ * alignment_;
  }
  return 0;
}

void OsFile::Close() {
  std::lock_guard lock(grow_mutex_);  // not in the middle of a reservation
  const int descriptor = descriptor_.exchange(kClosed);
  if (descriptor != kClosed) close(descriptor);
}

void OsFile::AbandonAfterFork() { close(descriptor_); }

int64_t OsFile::FreeBytes() const {
  struct statvfs info{};
  if (fstatvfs(descriptor_, &info) != 0) return 0;
  return static_cast<int64_t>(info.f_bavail * info.f_frsize);
}

}  // namespace patrickstar
