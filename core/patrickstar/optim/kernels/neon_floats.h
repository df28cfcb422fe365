// SPDX-License-Identifier: Apache-2.0
//
// NeonFloats: the vector trait (scalar_floats.h) with 4 lanes, for 64-bit ARM.
#pragma once

#include <arm_neon.h>

#include "patrickstar/optim/kernels/scalar_floats.h"

namespace patrickstar::kernels {
namespace {

struct NeonFloats {
  using Value = float32x4_t;
  static constexpr int64_t kLanes = 4;

  static Value Broadcast(float value) { return vdupq_n_f32(value); }
  static Value Load(const float* from) { return vld1q_f32(from); }
  static void Store(float* to, Value value) { vst1q_f32(to, value); }
  static Value LoadBfloat16(const uint16_t* from) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(from), 16));
  }

  static Value Add(Value a, Value b) { return vaddq_f32(a, b); }
  static Value Subtract(Value a, Value b) { return vsubq_f32(a, b); }
  static Value Multiply(Value a, Value b) { return vmulq_f32(a, b); }
  static Value Divide(Value a, Value b) { return vdivq_f32(a, b); }
  static Value MultiplyAdd(Value a, Value b, Value c) { return vfmaq_f32(c, a, b); }
  static Value SquareRoot(Value a) { return vsqrtq_f32(a); }
  static Value Negate(Value a) { return vnegq_f32(a); }
  static Value Maximum(Value a, Value b) {
    const uint32x4_t ordered = vandq_u32(vceqq_f32(a, a), vceqq_f32(b, b));
    const float32x4_t nan = vreinterpretq_f32_u32(vdupq_n_u32(kMaximumNan));
    return vbslq_f32(ordered, vmaxq_f32(a, b), nan);
  }

  static void StoreBfloat16(uint16_t* to, Value value) {
    const uint32x4_t bits = vreinterpretq_u32_f32(value);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t bias = vaddq_u32(odd, vdupq_n_u32(0x7fff));
    const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, bias), 16);
    const uint32x4_t halves =
        vbslq_u32(vceqq_f32(value, value), rounded, vdupq_n_u32(kBfloat16Nan));
    vst1_u16(to, vmovn_u32(halves));
  }

  static void StoreFloat16(uint16_t* to, Value value) {
    vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(value)));
  }
};

}  // namespace
}  // namespace patrickstar::kernels
