// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/base/text.h"

#include <gtest/gtest.h>

namespace patrickstar {
namespace {

// The same table is in tests/python/test_run_log.py: Python must write the same.
TEST(Text, WritesByteCountsInBinaryUnitsWithOneDecimal) {
  constexpr int64_t kOne = 1;
  EXPECT_EQ(FormatBytes(0), "0 bytes");
  EXPECT_EQ(FormatBytes(1023), "1023 bytes");
  EXPECT_EQ(FormatBytes(1024), "1.0 KiB");
  EXPECT_EQ(FormatBytes((kOne << 20) - 1), "1.0 MiB");
  EXPECT_EQ(FormatBytes(kOne << 28), "256.0 MiB");
  EXPECT_EQ(FormatBytes(-(kOne << 30) * 3), "-3.0 GiB");
  EXPECT_EQ(FormatBytes((kOne << 50) * 5000), "5000.0 PiB");
}

}  // namespace
}  // namespace patrickstar
