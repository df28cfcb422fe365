// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/io/async_file.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <future>
#include <mutex>
#include <utility>
#include <vector>

#include "patrickstar/base/crc32c.h"
#include "patrickstar/base/error.h"
#include "patrickstar/base/types.h"
#include "patrickstar/io/faulty_file.h"
#include "patrickstar/io/test_support.h"

namespace patrickstar {
namespace {

using Op = IoRequest::Op;

class AsyncFileTest : public testing::Test {
 protected:
  void Open(const FaultyFileOptions& file_options = {}, const AsyncFileOptions& options = {}) {
    auto faulty = std::make_unique<FaultyFile>(file_options);
    faulty_ = faulty.get();
    ASSERT_EQ(faulty_->Grow(int64_t{16} << 20), 0);
    file_ = std::make_unique<AsyncFile>(std::move(faulty), options);
  }

  // Carries out one request and returns its checksum; throws its failure.
  uint32_t Run(Op op, PageBuffer* pages, int64_t offset, uint32_t checksum = 0) {
    const Outcome outcome;
    file_->Submit({.op = op,
                   .buffer = pages->data(),
                   .num_bytes = pages->num_bytes(),
                   .offset = offset,
                   .checksum = checksum,
                   .done = [&checksum, outcome](IoRequest& request, std::exception_ptr error) {
                     checksum = request.checksum;
                     outcome.Set(std::move(error));
                   }});
    outcome.Wait();
    return checksum;
  }

  template <typename Exception>
  std::string Failure(Op op, PageBuffer* pages, int64_t offset, uint32_t checksum = 0) {
    try {
      Run(op, pages, offset, checksum);
    } catch (const Exception& error) {
      return error.what();
    }
    return "no failure";
  }

  // Queues a request that appends `name` to order_ when it is done.
  void Queue(Op op, PageBuffer* pages, const std::string& name, uint32_t checksum = 0) {
    file_->Submit({.op = op,
                   .buffer = pages->data(),
                   .num_bytes = pages->num_bytes(),
                   .offset = 0,
                   .checksum = checksum,
                   .done = [this, name](IoRequest&, const std::exception_ptr& error) {
                     std::lock_guard lock(mutex_);
                     order_.push_back(error == nullptr ? name : name + " failed");
                   }});
  }

  void ExpectRoundTrips(int num_rounds) {
    for (int round = 0; round < num_rounds; ++round) {
      PageBuffer out((1 + round % 5) * kPageAlignment, static_cast<uint32_t>(round));
      PageBuffer in(out.num_bytes(), 0);
      const int64_t offset = round * kPageAlignment;
      const uint32_t checksum = Run(Op::kWrite, &out, offset);
      EXPECT_EQ(checksum, Crc32c(out.data(), static_cast<size_t>(out.num_bytes())));
      Run(Op::kRead, &in, offset, checksum);
      EXPECT_EQ(in, out);
    }
  }

  FaultyFile* faulty_ = nullptr;
  std::mutex mutex_;
  std::vector<std::string> order_;  // Guarded by mutex_.
  std::unique_ptr<AsyncFile> file_;
};

TEST_F(AsyncFileTest, ReadsBackWhatItWrote) {
  Open();
  ExpectRoundTrips(20);
}

TEST_F(AsyncFileTest, FinishesShortAndInterruptedIo) {
  Open({.short_probability = 0.6, .interrupt_probability = 0.3});
  ExpectRoundTrips(60);
  EXPECT_GT(faulty_->num_reads(), 60);
  EXPECT_GT(faulty_->num_writes(), 60);
}

TEST_F(AsyncFileTest, FinishesShortIoToTheByteWithoutAlignment) {
  Open({.short_probability = 0.9, .alignment = 1});
  ExpectRoundTrips(60);
}

TEST_F(AsyncFileTest, StressDelaysChangeNothing) {
  Open({.max_delay_us = 100}, {.num_threads = 2, .random_delays = true, .seed = 3});
  ExpectRoundTrips(20);
}

TEST_F(AsyncFileTest, GivesUpOnADiskThatMakesNoProgress) {
  Open({.short_probability = 1.0});
  PageBuffer pages(kPageAlignment, 1);
  const std::string message = Failure<IoError>(Op::kWrite, &pages, 0);
  EXPECT_NE(message.find("the disk makes no progress"), std::string::npos) << message;
}

TEST_F(AsyncFileTest, AnErrorNamesPlaceSizeReasonAndRemedy) {
  Open({.path = "/data/spill"});
  faulty_->FailNthCall(1, EIO);
  PageBuffer pages(2 * kPageAlignment, 1);
  EXPECT_EQ(Failure<IoError>(Op::kWrite, &pages, 12288),
            "cannot write 8.0 KiB (8192 bytes) at offset 12288 of the spill file in /data/spill: "
            "Input/output error after 0 bytes; check the disk or name another spill_dir");
  ExpectRoundTrips(1);
}

TEST_F(AsyncFileTest, AFullDiskAdvisesToFreeSpace) {
  Open({.path = "/data/spill"});
  faulty_->SetWritesFull(true);
  PageBuffer pages(kPageAlignment, 1);
  const std::string message = Failure<IoError>(Op::kWrite, &pages, 0);
  EXPECT_NE(message.find("free space in /data/spill or name another spill_dir"), std::string::npos)
      << message;
  faulty_->SetWritesFull(false);
  ExpectRoundTrips(1);
}

TEST_F(AsyncFileTest, ReportsTheErrnoOfABadRange) {
  Open();
  faulty_->FailRange(8192, 8193, ENXIO);
  PageBuffer pages(kPageAlignment, 1);
  Run(Op::kWrite, &pages, 4096);
  try {
    Run(Op::kWrite, &pages, 8192);
    FAIL() << "no failure";
  } catch (const IoError& error) {
    EXPECT_EQ(error.error_number(), ENXIO);
  }
}

TEST_F(AsyncFileTest, AnUnexpectedEndOfTheFileIsAnError) {
  Open();
  PageBuffer pages(2 * kPageAlignment, 1);
  const std::string message = Failure<IoError>(Op::kRead, &pages, faulty_->num_bytes() - 4096);
  EXPECT_NE(message.find("the file ends after 4096 bytes"), std::string::npos) << message;
}

TEST_F(AsyncFileTest, DetectsOneFlippedBit) {
  Open({.path = "/data/spill"});
  PageBuffer pages(3 * kPageAlignment, 1);
  const uint32_t checksum = Run(Op::kWrite, &pages, 4096);
  faulty_->FlipBitOnRead(4096 + 5000, 3);
  const std::string message = Failure<CorruptData>(Op::kRead, &pages, 4096, checksum);
  EXPECT_NE(message.find("corrupt data in 12.0 KiB (12288 bytes) at offset 4096 of the spill file "
                         "in /data/spill: expected checksum 0x"),
            std::string::npos)
      << message;
  faulty_->Heal();
  Run(Op::kRead, &pages, 4096, checksum);
}

TEST_F(AsyncFileTest, ReadsGoFirstAndEachKindKeepsItsOrder) {
  Open({}, {.num_threads = 1});
  PageBuffer pages(kPageAlignment, 1);
  const uint32_t checksum = Run(Op::kWrite, &pages, 0);
  faulty_->Pause();
  Queue(Op::kWrite, &pages, "write 0");
  faulty_->WaitForPaused(1);
  Queue(Op::kWrite, &pages, "write 1");
  Queue(Op::kRead, &pages, "read 0", checksum);
  Queue(Op::kWrite, &pages, "write 2");
  Queue(Op::kRead, &pages, "read 1", checksum);
  faulty_->Resume();
  file_->Shutdown();
  EXPECT_EQ(order_,
            (std::vector<std::string>{"write 0", "read 0", "read 1", "write 1", "write 2"}));
}

TEST_F(AsyncFileTest, ManyReadsDoNotStarveAWrite) {
  Open({}, {.num_threads = 1});
  PageBuffer pages(kPageAlignment, 1);
  const uint32_t checksum = Run(Op::kWrite, &pages, 0);
  faulty_->Pause();
  Queue(Op::kWrite, &pages, "first");
  faulty_->WaitForPaused(1);
  Queue(Op::kWrite, &pages, "waiting");
  for (int read = 0; read < 50; ++read) Queue(Op::kRead, &pages, "read", checksum);
  faulty_->Resume();
  file_->Shutdown();
  const auto place = std::find(order_.begin(), order_.end(), "waiting") - order_.begin();
  EXPECT_LT(place, 12);
}

TEST_F(AsyncFileTest, ShutdownFinishesWhatWasQueued) {
  Open({.max_delay_us = 200}, {.num_threads = 2});
  PageBuffer pages(kPageAlignment, 1);
  for (int write = 0; write < 40; ++write) Queue(Op::kWrite, &pages, "write");
  file_->Shutdown();
  file_->Shutdown();
  EXPECT_EQ(order_, std::vector<std::string>(40, "write"));
}

TEST_F(AsyncFileTest, SubmitAfterShutdownCompletesWithAnError) {
  Open();
  file_->Shutdown();
  PageBuffer pages(kPageAlignment, 1);
  const std::string message = Failure<Error>(Op::kRead, &pages, 0);
  EXPECT_NE(message.find("it was shut down"), std::string::npos) << message;
}

TEST_F(AsyncFileTest, SignalsOfTheProcessNeverReachAnIoThread) {
  Open();
  PageBuffer pages(kPageAlignment, 1);
  std::promise<bool> is_blocked;
  file_->Submit({.op = Op::kWrite,
                 .buffer = pages.data(),
                 .num_bytes = kPageAlignment,
                 .done = [&](IoRequest&, const std::exception_ptr&) {
                   sigset_t mask;
                   pthread_sigmask(SIG_SETMASK, nullptr, &mask);
                   is_blocked.set_value(sigismember(&mask, SIGINT) == 1);
                 }});
  EXPECT_TRUE(is_blocked.get_future().get());
  sigset_t mask;
  pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  EXPECT_EQ(sigismember(&mask, SIGINT), 0);
}

TEST_F(AsyncFileTest, AForkedChildCanLeaveWithoutTheThreads) {
  Open();
  PageBuffer pages(kPageAlignment, 1);
  faulty_->Pause();
  Queue(Op::kWrite, &pages, "write");
  faulty_->WaitForPaused(1);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // A hang is a failure.
    file_->AbandonAfterFork();
    bool is_refused = false;
    try {
      Run(Op::kRead, &pages, 0);
    } catch (const Error& error) {
      is_refused = std::string(error.what()) == AsyncFile::kForkedMessage;
    }
    file_.reset();
    _exit(is_refused ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  faulty_->Resume();
  file_->Shutdown();
  EXPECT_EQ(order_, std::vector<std::string>{"write"});
}

}  // namespace
}  // namespace patrickstar
