// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/base/crc32c.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace patrickstar {
namespace {

std::vector<unsigned char> MakeBytes(size_t num_bytes) {
  std::mt19937 random(7);
  std::vector<unsigned char> bytes(num_bytes);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

// The vectors of RFC 3720, appendix B.4, and the usual check value.
TEST(Crc32c, GivesThePublishedValues) {
  const std::string zeros(32, '\0');
  const std::string ones(32, '\xff');
  std::string ascending(32, '\0');
  for (size_t at = 0; at < ascending.size(); ++at) ascending[at] = static_cast<char>(at);
  const std::string descending(ascending.rbegin(), ascending.rend());
  const std::string digits = "123456789";
  for (auto* function : {&Crc32c, &Crc32cPortable}) {
    EXPECT_EQ(function("", 0), 0u);
    EXPECT_EQ(function(zeros.data(), zeros.size()), 0x8a9136aau);
    EXPECT_EQ(function(ones.data(), ones.size()), 0x62a8ab43u);
    EXPECT_EQ(function(ascending.data(), ascending.size()), 0x46dd794eu);
    EXPECT_EQ(function(descending.data(), descending.size()), 0x113fdb5cu);
    EXPECT_EQ(function(digits.data(), digits.size()), 0xe3069283u);
  }
}

TEST(Crc32c, AgreesWithThePortableReferenceAtEveryLengthAndAlignment) {
  const std::vector<unsigned char> bytes = MakeBytes(size_t{1} << 20);
  std::vector<size_t> lengths = {4095, 4096, 12287, 12288, 12289, 24576, 30001, 1048560};
  for (size_t length = 0; length < 70; ++length) lengths.push_back(length);
  for (size_t length : lengths) {
    for (size_t start : {0, 1, 7, 16}) {
      EXPECT_EQ(Crc32c(&bytes[start], length), Crc32cPortable(&bytes[start], length))
          << length << " bytes from " << start;
    }
  }
}

TEST(Crc32c, SeesEverySingleBitFlip) {
  std::vector<unsigned char> bytes = MakeBytes(13000);
  const uint32_t expected = Crc32c(bytes.data(), bytes.size());
  for (size_t at = 0; at < bytes.size(); at += 97) {
    for (int bit = 0; bit < 8; ++bit) {
      bytes[at] = static_cast<unsigned char>(bytes[at] ^ (1u << bit));
      EXPECT_NE(Crc32c(bytes.data(), bytes.size()), expected) << "bit " << bit << " of " << at;
      bytes[at] = static_cast<unsigned char>(bytes[at] ^ (1u << bit));
    }
  }
}

}  // namespace
}  // namespace patrickstar
