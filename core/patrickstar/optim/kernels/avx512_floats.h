// SPDX-License-Identifier: Apache-2.0
//
// Avx512Floats: the vector trait (scalar_floats.h) with 16 lanes, for AVX-512 F alone.
#pragma once

#include <immintrin.h>

#include "patrickstar/optim/kernels/scalar_floats.h"

namespace patrickstar::kernels {
namespace {

struct Avx512Floats {
  using Value = __m512;
  static constexpr int64_t kLanes = 16;

  static Value Broadcast(float value) { return _mm512_set1_ps(value); }
  static Value Load(const float* from) { return _mm512_loadu_ps(from); }
  static void Store(float* to, Value value) { _mm512_storeu_ps(to, value); }
  static Value LoadBfloat16(const uint16_t* from) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }

  static Value Add(Value a, Value b) { return _mm512_add_ps(a, b); }
  static Value Subtract(Value a, Value b) { return _mm512_sub_ps(a, b); }
  static Value Multiply(Value a, Value b) { return _mm512_mul_ps(a, b); }
  static Value Divide(Value a, Value b) { return _mm512_div_ps(a, b); }
  static Value MultiplyAdd(Value a, Value b, Value c) { return _mm512_fmadd_ps(a, b, c); }
  static Value SquareRoot(Value a) { return _mm512_sqrt_ps(a); }
  static Value Negate(Value a) {
    return _mm512_castsi512_ps(
        _mm512_xor_si512(_mm512_castps_si512(a), _mm512_castps_si512(_mm512_set1_ps(-0.0f))));
  }
  static Value Maximum(Value a, Value b) {
    const __m512i nan = _mm512_set1_epi32(static_cast<int>(kMaximumNan));
    return _mm512_mask_mov_ps(_mm512_max_ps(a, b), _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q),
                              _mm512_castsi512_ps(nan));
  }

  static void StoreBfloat16(uint16_t* to, Value value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    const __m512i halves = _mm512_mask_mov_epi32(
        rounded, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), _mm512_set1_epi32(kBfloat16Nan));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(halves));
  }

  static void StoreFloat16(uint16_t* to, Value value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};

}  // namespace
}  // namespace patrickstar::kernels
