// SPDX-License-Identifier: Apache-2.0
//
// Avx2Floats: the vector trait (scalar_floats.h) with 8 lanes, for AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

#include "patrickstar/optim/kernels/scalar_floats.h"

namespace patrickstar::kernels {
namespace {

struct Avx2Floats {
  using Value = __m256;
  static constexpr int64_t kLanes = 8;

  static Value Broadcast(float value) { return _mm256_set1_ps(value); }
  static Value Load(const float* from) { return _mm256_loadu_ps(from); }
  static void Store(float* to, Value value) { _mm256_storeu_ps(to, value); }
  static Value LoadBfloat16(const uint16_t* from) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }

  static Value Add(Value a, Value b) { return _mm256_add_ps(a, b); }
  static Value Subtract(Value a, Value b) { return _mm256_sub_ps(a, b); }
  static Value Multiply(Value a, Value b) { return _mm256_mul_ps(a, b); }
  static Value Divide(Value a, Value b) { return _mm256_div_ps(a, b); }
  static Value MultiplyAdd(Value a, Value b, Value c) { return _mm256_fmadd_ps(a, b, c); }
  static Value SquareRoot(Value a) { return _mm256_sqrt_ps(a); }
  static Value Negate(Value a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }
  static Value Maximum(Value a, Value b) {
    return _mm256_or_ps(_mm256_max_ps(a, b), _mm256_cmp_ps(a, b, _CMP_UNORD_Q));
  }

  static void StoreBfloat16(uint16_t* to, Value value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i halves = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(kBfloat16Nan), nan);
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(to),
        _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
  }

  static void StoreFloat16(uint16_t* to, Value value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};

}  // namespace
}  // namespace patrickstar::kernels
