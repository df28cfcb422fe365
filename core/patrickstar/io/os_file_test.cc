// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/io/os_file.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <thread>
#include <vector>

#include "patrickstar/base/error.h"

namespace patrickstar {
namespace {

namespace fs = std::filesystem;

struct alignas(4096) Page {
  char bytes[4096];
};

class OsFileTest : public testing::Test {
 protected:
  // The working directory, because the usual temporary folder may be memory.
  void SetUp() override {
    std::string name = (fs::current_path() / "os-file-test-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string Sub(const std::string& name) const { return (folder_ / name).string(); }

  bool IsEmpty(const std::string& directory) const {
    return fs::directory_iterator(directory) == fs::directory_iterator();
  }

  template <typename Exception>
  std::string Refusal(const std::string& directory) {
    try {
      OpenSpillFile(directory);
    } catch (const Exception& error) {
      return error.what();
    }
    return "not refused";
  }

  // Runs `body` on a thread that has mounts of its own. False when the user may not do that.
  bool RunWithOwnMounts(const std::function<void()>& body) {
    bool is_allowed = false;
    std::thread([&] {
      is_allowed = unshare(CLONE_NEWNS) == 0 &&
                   mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
      if (is_allowed) body();
    }).join();
    return is_allowed;
  }

  void ExpectRoundTrip(RawFile* file) {
    std::vector<Page> out(16);
    std::vector<Page> in(16);
    for (size_t page = 0; page < out.size(); ++page) out[page].bytes[page] = 'x';
    const auto num_bytes = static_cast<int64_t>(out.size() * sizeof(Page));
    ASSERT_EQ(file->Grow(2 * num_bytes), 0);
    EXPECT_EQ(file->Write(out.data(), num_bytes, num_bytes).num_bytes, num_bytes);
    EXPECT_EQ(file->Read(in.data(), num_bytes, num_bytes).num_bytes, num_bytes);
    EXPECT_EQ(std::memcmp(in.data(), out.data(), static_cast<size_t>(num_bytes)), 0);
    EXPECT_EQ(file->Read(in.data(), num_bytes, 0).num_bytes, num_bytes);
    EXPECT_EQ(in[1].bytes[1], '\0');
    EXPECT_EQ(file->Read(in.data(), num_bytes, 2 * num_bytes).num_bytes, 0);
  }

  fs::path folder_;
};

TEST_F(OsFileTest, CloseGivesTheDescriptorBackAndLaterGrowingFails) {
  const auto num_descriptors = [] {
    const fs::directory_iterator open("/proc/self/fd");
    return std::distance(begin(open), end(open));
  };
  const auto before = num_descriptors();
  const auto file = OpenSpillFile(folder_.string());
  ASSERT_EQ(file->Grow(8192), 0);
  EXPECT_EQ(num_descriptors(), before + 1);
  file->Close();
  file->Close();
  EXPECT_EQ(num_descriptors(), before);
  EXPECT_EQ(file->Grow(16384), EBADF);
}

TEST_F(OsFileTest, CreatesMissingFoldersAndLeavesNoName) {
  const std::string directory = Sub("a/b/c");
  const auto file = OpenSpillFile(directory);
  EXPECT_EQ(file->path(), directory);
  EXPECT_TRUE(IsEmpty(directory));
  ExpectRoundTrip(file.get());
}

TEST_F(OsFileTest, TwoFilesInOneFolderAreTwo) {
  const auto first = OpenSpillFile(Sub("shared"));
  const auto second = OpenSpillFile(Sub("shared"));
  ExpectRoundTrip(first.get());
  ExpectRoundTrip(second.get());
}

TEST_F(OsFileTest, EveryWayOfOpeningWorksOnADisk) {
  for (const auto naming : {OsFile::Naming::kUnnamed, OsFile::Naming::kUnlinked}) {
    for (const auto caching : {OsFile::Caching::kDirect, OsFile::Caching::kBuffered}) {
      int error_number = 0;
      const auto file = OsFile::TryOpen(folder_.string(), naming, caching, &error_number);
      ASSERT_NE(file, nullptr) << error_number;
      EXPECT_TRUE(IsEmpty(folder_.string()));
      EXPECT_EQ(file->alignment() == 1, caching == OsFile::Caching::kBuffered);
      ExpectRoundTrip(file.get());
    }
  }
}

TEST_F(OsFileTest, GrowReservesRealSpace) {
  const int64_t num_bytes = int64_t{64} << 20;
  const int64_t before = FreeBytes(folder_.string());
  const auto file = OpenSpillFile(folder_.string());
  ASSERT_EQ(file->Grow(num_bytes), 0);
  // Others use the disk too: half is proof enough that the file is not sparse.
  EXPECT_LT(file->FreeBytes(), before - num_bytes / 2);
}

TEST_F(OsFileTest, AFailedGrowLeavesTheFileUsable) {
  const auto file = OpenSpillFile(folder_.string());
  rlimit old_limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit limit = {.rlim_cur = 1 << 20, .rlim_max = old_limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  EXPECT_EQ(file->Grow(2 << 20), EFBIG);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &old_limit), 0);
  std::signal(SIGXFSZ, old_handler);
  ExpectRoundTrip(file.get());
}

TEST_F(OsFileTest, RefusesAFile) {
  std::ofstream(Sub("file")) << "x";
  for (const std::string& directory : {Sub("file"), Sub("file/below")}) {
    const std::string message = Refusal<InvalidArgument>(directory);
    EXPECT_NE(message.find(directory), std::string::npos) << message;
    EXPECT_NE(message.find("is a file"), std::string::npos) << message;
  }
}

TEST_F(OsFileTest, RefusesAnEmptyName) {
  EXPECT_NE(Refusal<InvalidArgument>("").find("spill_dir is empty"), std::string::npos);
}

TEST_F(OsFileTest, RefusesMemoryAndCreatesNothingThere) {
  const std::string directory = "/dev/shm/patrickstar-test-" + std::to_string(getpid());
  const std::string message = Refusal<InvalidArgument>(directory);
  EXPECT_NE(message.find(directory + " is on tmpfs, which is memory"), std::string::npos)
      << message;
  EXPECT_FALSE(fs::exists(directory));
}

TEST_F(OsFileTest, RefusesWhereNothingCanBeCreated) {
  const std::string message = Refusal<IoError>("/proc/patrickstar");
  EXPECT_NE(message.find("cannot create spill_dir /proc/patrickstar: "), std::string::npos)
      << message;
}

TEST_F(OsFileTest, RefusesAReadOnlyFileSystem) {
  std::string existing;
  std::string missing;
  const bool is_allowed = RunWithOwnMounts([&] {
    const std::string name = folder_.string();
    ASSERT_EQ(mount(name.c_str(), name.c_str(), nullptr, MS_BIND, nullptr), 0);
    ASSERT_EQ(mount("none", name.c_str(), nullptr, MS_REMOUNT | MS_BIND | MS_RDONLY, nullptr), 0);
    existing = Refusal<IoError>(name);
    missing = Refusal<IoError>(Sub("missing"));
  });
  if (!is_allowed) GTEST_SKIP() << "needs the right to mount";
  EXPECT_NE(existing.find("Read-only file system"), std::string::npos) << existing;
  EXPECT_NE(missing.find("Read-only file system"), std::string::npos) << missing;
}

TEST_F(OsFileTest, RefusesAFolderOfSomebodyElse) {
  const bool is_root = geteuid() == 0;
  ASSERT_EQ(chmod(folder_.c_str(), 0555), 0);
  if (is_root) {
    ASSERT_EQ(seteuid(65534), 0);
  }
  const std::string message = Refusal<IoError>(folder_.string());
  if (is_root) {
    ASSERT_EQ(seteuid(0), 0);
  }
  ASSERT_EQ(chmod(folder_.c_str(), 0755), 0);
  EXPECT_NE(message.find("Permission denied"), std::string::npos) << message;
}

// ramfs has neither direct I/O nor fallocate.
TEST_F(OsFileTest, WorksOnAFileSystemWithoutReservations) {
  const bool is_allowed = RunWithOwnMounts([&] {
    ASSERT_EQ(mount("none", folder_.c_str(), "ramfs", 0, nullptr), 0);
    int error_number = 0;
    EXPECT_EQ(OsFile::TryOpen(folder_.string(), OsFile::Naming::kUnlinked, OsFile::Caching::kDirect,
                              &error_number),
              nullptr);
    EXPECT_EQ(error_number, EINVAL);
    EXPECT_TRUE(IsEmpty(folder_.string()));
    const auto file = OsFile::TryOpen(folder_.string(), OsFile::Naming::kUnlinked,
                                      OsFile::Caching::kBuffered, &error_number);
    ASSERT_NE(file, nullptr);
    ExpectRoundTrip(file.get());
    const std::string message = Refusal<InvalidArgument>(folder_.string());
    EXPECT_NE(message.find("which is memory"), std::string::npos) << message;
  });
  if (!is_allowed) GTEST_SKIP() << "needs the right to mount";
}

TEST_F(OsFileTest, AFullFileSystemLeavesTheFileUsable) {
  const bool is_allowed = RunWithOwnMounts([&] {
    ASSERT_EQ(mount("none", folder_.c_str(), "tmpfs", 0, "size=8m"), 0);
    int error_number = 0;
    const auto file = OsFile::TryOpen(folder_.string(), OsFile::Naming::kUnnamed,
                                      OsFile::Caching::kBuffered, &error_number);
    ASSERT_NE(file, nullptr);
    EXPECT_EQ(file->Grow(16 << 20), ENOSPC);
    EXPECT_EQ(file->FreeBytes(), 8 << 20);
    ExpectRoundTrip(file.get());
    EXPECT_EQ(file->Grow(8 << 20), 0);
    EXPECT_EQ(file->FreeBytes(), 0);
  });
  if (!is_allowed) GTEST_SKIP() << "needs the right to mount";
}

TEST_F(OsFileTest, FreeBytesLooksAtTheNearestExistingFolder) {
  EXPECT_GT(FreeBytes(Sub("not/there/yet")), 0);
}

}  // namespace
}  // namespace patrickstar
