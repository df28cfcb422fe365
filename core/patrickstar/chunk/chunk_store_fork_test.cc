// SPDX-License-Identifier: Apache-2.0
//
// The chunk store across fork(): the child keeps what was resident as a snapshot, is
// refused everything else, and ends without touching the parent.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "patrickstar/chunk/testing/store_test.h"

namespace patrickstar {
namespace {

// A child that hangs is killed by its alarm, and the test sees that.
constexpr unsigned kChildSeconds = 60;

class ChunkStoreForkTest : public StoreTest {
 protected:
  // Forks; the child ends with the number of the first of `steps` that is false, or 0.
  int ExitCodeOfChild(const std::vector<std::function<bool()>>& steps) {
    store_->PrepareFork();
    const pid_t child = fork();
    if (child == 0) {
      alarm(kChildSeconds);
      store_->ResumeChild();
      _exit(FirstFalse(steps));
    }
    store_->ResumeParent();
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

  bool Refuses(const std::function<void()>& work) {
    try {
      work();
    } catch (const Error& error) {
      return std::string(error.what()).find("forked") != std::string::npos;
    }
    return false;
  }

 private:
  static int FirstFalse(const std::vector<std::function<bool()>>& steps) {
    for (size_t step = 0; step < steps.size(); ++step) {
      if (!steps[step]()) return static_cast<int>(step) + 1;
    }
    return 0;
  }
};

TEST_F(ChunkStoreForkTest, TheChildReadsWhatWasResidentAndIsRefusedTheRest) {
  Open(2);
  const ChunkId evicted = NewWith(1);
  const ChunkId resident = NewWith(2);
  const ChunkId leased = NewWith(3);
  const auto lease = Read({leased});
  const int code = ExitCodeOfChild({
      [&] { return ValueOf(resident) == 2; },
      [&] { return AttachedValue(leased) == 3; },
      [&] { return Refuses([&] { Use({evicted}); }); },
      [&] { return Refuses([&] { store_->Reserve(kPage, "op"); }); },
      [&] { return Refuses([&] { New(); }); },
      [&] {
        Write(resident, 9);
        return ValueOf(resident) == 9;
      },
      [&] {
        store_->EvictAll();
        store_->set_host_bytes(kPage);
        store_->Destroy(resident);
        store_->ThrowPendingFailure();
        return !store_->Discard(evicted, Content::kZero) && ValueOf(resident) == 9;
      },
      [&] { return store_->stats().resident_bytes == 2 * kPage; },
      [&] {
        store_.reset();
        return true;
      },
  });
  EXPECT_EQ(code, 0);
  EXPECT_EQ(ValueOf(resident), 2);
  EXPECT_EQ(ValueOf(evicted), 1);
  EXPECT_EQ(AttachedValue(leased), 3);
}

TEST_F(ChunkStoreForkTest, AForkInTheMiddleOfTransfersHarmsNobody) {
  Open(2);
  const ChunkId on_disk = NewWith(1);
  store_->EvictAll();
  const ChunkId resident = NewWith(2);
  disk_->Pause();
  auto reading = StartAndWaitUntilItWaits([&] { EXPECT_EQ(ValueOf(on_disk), 1); });
  disk_->WaitForPaused(1);
  const int code = ExitCodeOfChild({
      [&] { return ValueOf(resident) == 2; },
      [&] { return Refuses([&] { Use({on_disk}); }); },
      [&] {
        store_.reset();  // although a thread waited in it
        return true;
      },
  });
  EXPECT_EQ(code, 0);
  disk_->Resume();
  reading.get();
  EXPECT_EQ(ValueOf(resident), 2);
}

}  // namespace
}  // namespace patrickstar
