// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/base/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace patrickstar {
namespace {

// The Castagnoli polynomial, bits reflected.
constexpr uint32_t kPolynomial = 0x82f63b78;

using ByteTable = std::array<uint32_t, 256>;

// Table k advances a register by one byte followed by k zero bytes, so that the
// portable loop takes 8 bytes a step ("slicing by 8").
constexpr std::array<ByteTable, 8> MakeTables() {
  std::array<ByteTable, 8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) != 0 ? (crc >> 1) ^ kPolynomial : crc >> 1;
    tables[0][byte] = crc;
  }
  for (size_t table = 1; table < tables.size(); ++table) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t previous = tables[table - 1][byte];
      tables[table][byte] = (previous >> 8) ^ tables[0][previous & 0xff];
    }
  }
  return tables;
}

constexpr std::array<ByteTable, 8> kTables = MakeTables();

uint32_t LoadLittleEndian(const unsigned char* bytes) {
  return static_cast<uint32_t>(bytes[0]) | static_cast<uint32_t>(bytes[1]) << 8 |
         static_cast<uint32_t>(bytes[2]) << 16 | static_cast<uint32_t>(bytes[3]) << 24;
}

#if defined(__x86_64__)

// The CRC instruction has a latency of three cycles and starts one each cycle, so
// three independent lanes of this many bytes run at once and are joined after.
constexpr size_t kLaneBytes = 4096;

// Advances a register by kLaneBytes zero bytes: a linear map, so one lookup for
// each byte of the register.
class LaneShift {
 public:
  LaneShift() {
    std::array<uint32_t, 32> basis{};
    for (size_t bit = 0; bit < basis.size(); ++bit) {
      uint32_t crc = uint32_t{1} << bit;
      for (size_t step = 0; step < kLaneBytes; ++step) {
        crc = (crc >> 8) ^ kTables[0][crc & 0xff];
      }
      basis[bit] = crc;
    }
    for (size_t place = 0; place < 4; ++place) {
      for (size_t byte = 0; byte < 256; ++byte) {
        for (size_t bit = 0; bit < 8; ++bit) {
          if ((byte >> bit & 1) != 0) tables_[place][byte] ^= basis[place * 8 + bit];
        }
      }
    }
  }

  uint32_t operator()(uint64_t crc) const {
    return tables_[0][crc & 0xff] ^ tables_[1][crc >> 8 & 0xff] ^ tables_[2][crc >> 16 & 0xff] ^
           tables_[3][crc >> 24 & 0xff];
  }

 private:
  std::array<ByteTable, 4> tables_{};
};

uint64_t LoadWord(const unsigned char* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

__attribute__((target("sse4.2"))) uint32_t Crc32cSse42(const unsigned char* bytes,
                                                       size_t num_bytes) {
  static const LaneShift shift;
  uint64_t crc = 0xffffffff;
  while (num_bytes >= 3 * kLaneBytes) {
    uint64_t middle = 0;
    uint64_t last = 0;
    for (size_t at = 0; at < kLaneBytes; at += sizeof(uint64_t)) {
      crc = _mm_crc32_u64(crc, LoadWord(bytes + at));
      middle = _mm_crc32_u64(middle, LoadWord(bytes + kLaneBytes + at));
      last = _mm_crc32_u64(last, LoadWord(bytes + 2 * kLaneBytes + at));
    }
    crc = shift(crc) ^ middle;
    crc = shift(crc) ^ last;
    bytes += 3 * kLaneBytes;
    num_bytes -= 3 * kLaneBytes;
  }
  for (; num_bytes >= sizeof(uint64_t); num_bytes -= sizeof(uint64_t)) {
    crc = _mm_crc32_u64(crc, LoadWord(bytes));
    bytes += sizeof(uint64_t);
  }
  auto tail = static_cast<uint32_t>(crc);
  for (; num_bytes > 0; --num_bytes) tail = _mm_crc32_u8(tail, *bytes++);
  return ~tail;
}

#endif  // defined(__x86_64__)

}  // namespace

uint32_t Crc32cPortable(const void* data, size_t num_bytes) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  uint32_t crc = 0xffffffff;
  for (; num_bytes >= 8; num_bytes -= 8, bytes += 8) {
    const uint32_t low = crc ^ LoadLittleEndian(bytes);
    const uint32_t high = LoadLittleEndian(bytes + 4);
    crc = kTables[7][low & 0xff] ^ kTables[6][low >> 8 & 0xff] ^ kTables[5][low >> 16 & 0xff] ^
          kTables[4][low >> 24] ^ kTables[3][high & 0xff] ^ kTables[2][high >> 8 & 0xff] ^
          kTables[1][high >> 16 & 0xff] ^ kTables[0][high >> 24];
  }
  for (; num_bytes > 0; --num_bytes) crc = (crc >> 8) ^ kTables[0][(crc ^ *bytes++) & 0xff];
  return ~crc;
}

uint32_t Crc32c(const void* data, size_t num_bytes) {
#if defined(__x86_64__)
  static const bool has_sse42 = __builtin_cpu_supports("sse4.2") != 0;
  if (has_sse42) return Crc32cSse42(static_cast<const unsigned char*>(data), num_bytes);
#endif
  return Crc32cPortable(data, num_bytes);
}

}  // namespace patrickstar
