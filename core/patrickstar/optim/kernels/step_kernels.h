// SPDX-License-Identifier: Apache-2.0
//
// StepKernels: the entry points of the kernels of one instruction set, and the plain
// data they take: constants already rounded to float, raw pointers, variants as enums.
// step_kernels.cc is compiled once per Isa with that set's flags. So that no inline
// function compiled with them is linked into code for every processor, it uses nothing
// of the standard library, and neither does this header.
#pragma once

#include <cstdint>

#include "patrickstar/optim/fused_step.h"

namespace patrickstar::kernels {

// The range of one call. Elements from body_end on are rounded as the tail of torch's loop.
struct Range {
  int64_t begin;
  int64_t body_end;
  int64_t end;
};

struct Gradient {
  const void* data;
  const float* factors;
  int64_t num_factors;
  const float* scale;  // null: not scaled
  float* out;          // null: not written
  GradientType type;
  bool maximize;
};

struct Parameter {
  float* data;
  void* copy;
  CopyType copy_type;
};

enum class Decay : uint8_t { kNone, kCoupled, kDecoupled };

struct AdamCall {
  Gradient gradient;
  Parameter parameter;
  float* exp_avg;
  float* exp_avg_sq;
  float* max_exp_avg_sq;  // null without amsgrad
  Decay decay;
  float decay_factor;    // coupled: weight_decay; decoupled: 1 - lr * weight_decay
  float exp_avg_weight;  // 1 - beta1
  float beta2;
  float exp_avg_sq_weight;  // 1 - beta2
  float bias_correction2_sqrt;
  float eps;
  float negative_step_size;
};

enum class Momentum : uint8_t { kNone, kFirstStep, kLaterStep };

struct SgdCall {
  Gradient gradient;
  Parameter parameter;
  float* momentum_buffer;
  Momentum momentum_kind;
  bool nesterov;
  bool has_decay;
  float weight_decay;
  float momentum;
  float gradient_weight;  // 1 - dampening
  float negative_lr;
};

struct AdagradCall {
  Gradient gradient;
  Parameter parameter;
  float* state_sum;
  bool has_decay;
  float weight_decay;
  float step_size;
  float eps;
};

struct StepKernels {
  void (*adam)(const AdamCall& call, const Range& range);
  void (*sgd)(const SgdCall& call, const Range& range);
  void (*adagrad)(const AdagradCall& call, const Range& range);
};

extern const StepKernels kScalarKernels;
extern const StepKernels kAvx2Kernels;
extern const StepKernels kAvx512Kernels;
extern const StepKernels kNeonKernels;

}  // namespace patrickstar::kernels
