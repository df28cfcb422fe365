// SPDX-License-Identifier: Apache-2.0
//
// ScalarFloats: the vector trait with one lane. It is the reference that the other
// sets are tested against, and in each of them takes the elements that do not fill a
// vector. A trait offers lanes of float: load, store, arithmetic that rounds once per
// call, and the conversions from and to 16 bits.
#pragma once

#include <cstdint>

namespace patrickstar::kernels {
namespace {

// What torch's cast to bf16 makes of a NaN on AVX2.
constexpr uint16_t kBfloat16Nan = 0xffff;
// What torch's maximum makes of a NaN on AVX2.
constexpr uint32_t kMaximumNan = 0xffffffff;

struct ScalarFloats {
  using Value = float;
  static constexpr int64_t kLanes = 1;

  static Value Broadcast(float value) { return value; }
  static Value Load(const float* from) { return *from; }
  static void Store(float* to, Value value) { *to = value; }
  static Value LoadBfloat16(const uint16_t* from) { return FromBits(uint32_t{*from} << 16); }

  static Value Add(Value a, Value b) { return a + b; }
  static Value Subtract(Value a, Value b) { return a - b; }
  static Value Multiply(Value a, Value b) { return a * b; }
  static Value Divide(Value a, Value b) { return a / b; }
  // a * b + c, rounded once.
  static Value MultiplyAdd(Value a, Value b, Value c) { return __builtin_fmaf(a, b, c); }
  static Value SquareRoot(Value a) { return __builtin_sqrtf(a); }
  static Value Negate(Value a) { return FromBits(Bits(a) ^ 0x80000000); }
  // The larger one; kMaximumNan if one is NaN.
  static Value Maximum(Value a, Value b) {
    if (a != a || b != b) return FromBits(kMaximumNan);
    return a > b ? a : b;
  }

  static void StoreBfloat16(uint16_t* to, Value value) {
    const uint32_t bits = Bits(value);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    *to = value != value ? kBfloat16Nan : static_cast<uint16_t>(rounded);
  }

  static void StoreFloat16(uint16_t* to, Value value) {
    const uint32_t bits = Bits(value);
    *to = static_cast<uint16_t>((bits >> 16 & 0x8000) | MagnitudeToFloat16(bits & 0x7fffffff));
  }

 private:
  static uint32_t Bits(float value) { return __builtin_bit_cast(uint32_t, value); }
  static float FromBits(uint32_t bits) { return __builtin_bit_cast(float, bits); }

  static uint32_t MagnitudeToFloat16(uint32_t bits) {
    constexpr uint32_t kInfinity = 0x7f800000;
    constexpr uint32_t kOverflow = 0x477ff000;        // 65520, half way from the largest to 2^16
    constexpr uint32_t kSmallestNormal = 0x38800000;  // 2^-14
    constexpr uint32_t kExponentShift = 112 << 23;    // the bias of float less that of fp16
    if (bits > kInfinity) return 0x7e00 | (bits >> 13 & 0x3ff);
    if (bits >= kOverflow) return 0x7c00;
    if (bits < kSmallestNormal) {
      // Beside 0.5 a float has steps of 2^-24, those of fp16 below 2^-14: the addition rounds.
      return Bits(FromBits(bits) + 0.5f) - Bits(0.5f);
    }
    return (bits - kExponentShift + 0xfff + (bits >> 13 & 1)) >> 13;
  }
};

}  // namespace
}  // namespace patrickstar::kernels
