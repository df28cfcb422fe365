// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/optim/fused_step.h"

#include <algorithm>
#include <cmath>

#include "patrickstar/base/check.h"
#include "patrickstar/optim/kernels/step_kernels.h"

namespace patrickstar {
namespace {

using kernels::Decay;
using kernels::Momentum;

// torch's kernels take vectors of 8 elements of a tensor; what is left at its end is the tail,
// where its compiler fused other multiplications with additions than in the body. Its threads
// split tensors at multiples of 16, so there is one tail, at the same place for any number of them.
constexpr int64_t kTorchLanes = 8;

const kernels::StepKernels& KernelsOf(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return kernels::kScalarKernels;
#if defined(__x86_64__)
    case Isa::kAvx2:
      return kernels::kAvx2Kernels;
    case Isa::kAvx512:
      return kernels::kAvx512Kernels;
#elif defined(__aarch64__)
    case Isa::kNeon:
      return kernels::kNeonKernels;
#endif
    default:
      break;
  }
  PS_CHECK(false, "this build has no kernels for ", IsaName(isa));
}

kernels::Range RangeOf(const StepArrays& arrays, int64_t begin, int64_t end) {
  PS_CHECK(0 <= begin && begin <= end && 0 <= arrays.offset &&
               end <= arrays.num_elements - arrays.offset,
           "[", begin, ", ", end, ") from element ", arrays.offset, " of ", arrays.num_elements);
  const int64_t tail_begin = arrays.num_elements - arrays.num_elements % kTorchLanes;
  return {
      .begin = begin, .body_end = std::clamp(tail_begin - arrays.offset, begin, end), .end = end};
}

kernels::Gradient GradientOf(const StepArrays& arrays, bool maximize) {
  PS_CHECK(arrays.gradient != nullptr, "a step needs a gradient");
  return {.data = arrays.gradient,
          .factors = arrays.factors.data(),
          .num_factors = static_cast<int64_t>(arrays.factors.size()),
          .scale = arrays.grad_scale ? &*arrays.grad_scale : nullptr,
          .out = arrays.gradient_out,
          .type = arrays.gradient_type,
          .maximize = maximize};
}

kernels::Parameter ParameterOf(const StepArrays& arrays) {
  PS_CHECK(arrays.parameter != nullptr, "a step needs a parameter");
  PS_CHECK((arrays.compute_copy != nullptr) == (arrays.copy_type != CopyType::kNone),
           "a compute copy has an address and a type, or neither");
  return {.data = arrays.parameter, .copy = arrays.compute_copy, .copy_type = arrays.copy_type};
}

// torch is compiled so that a product and a sum of doubles become one fused operation.
double OneMinusProduct(double a, double b) { return std::fma(-a, b, 1.0); }
double OnePlusProduct(double a, double b) { return std::fma(a, b, 1.0); }

float ToFloat(double value) { return static_cast<float>(value); }

}  // namespace

void AdamStep(const AdamOptions& options, const AdamArrays& arrays, int64_t begin, int64_t end,
              Isa isa) {
  PS_CHECK(arrays.exp_avg != nullptr && arrays.exp_avg_sq != nullptr, "Adam needs both moments");
  PS_CHECK(!options.amsgrad || arrays.max_exp_avg_sq != nullptr, "amsgrad needs its maximum");
  Decay decay = Decay::kNone;
  double decay_factor = 0.0;
  if (options.weight_decay != 0.0) {
    decay = options.is_decoupled ? Decay::kDecoupled : Decay::kCoupled;
    decay_factor = options.is_decoupled ? OneMinusProduct(options.lr, options.weight_decay)
                                        : options.weight_decay;
  }
  const double bias_correction1 = 1.0 - std::pow(options.beta1, options.step);
  const double bias_correction2 = 1.0 - std::pow(options.beta2, options.step);
  const kernels::AdamCall call = {
      .gradient = GradientOf(arrays, options.maximize),
      .parameter = ParameterOf(arrays),
      .exp_avg = arrays.exp_avg,
      .exp_avg_sq = arrays.exp_avg_sq,
      .max_exp_avg_sq = options.amsgrad ? arrays.max_exp_avg_sq : nullptr,
      .decay = decay,
      .decay_factor = ToFloat(decay_factor),
      .exp_avg_weight = ToFloat(1.0 - options.beta1),
      .beta2 = ToFloat(options.beta2),
      .exp_avg_sq_weight = ToFloat(1.0 - options.beta2),
      .bias_correction2_sqrt = ToFloat(std::sqrt(bias_correction2)),
      .eps = ToFloat(options.eps),
      .negative_step_size = ToFloat(-(options.lr / bias_correction1)),
  };
  KernelsOf(isa).adam(call, RangeOf(arrays, begin, end));
}

void SgdStep(const SgdOptions& options, const SgdArrays& arrays, int64_t begin, int64_t end,
             Isa isa) {
  Momentum momentum_kind = Momentum::kNone;
  if (options.momentum != 0.0) {
    PS_CHECK(arrays.momentum_buffer != nullptr, "momentum needs its buffer");
    momentum_kind = options.is_first_step ? Momentum::kFirstStep : Momentum::kLaterStep;
  }
  const kernels::SgdCall call = {
      .gradient = GradientOf(arrays, options.maximize),
      .parameter = ParameterOf(arrays),
      .momentum_buffer = arrays.momentum_buffer,
      .momentum_kind = momentum_kind,
      .nesterov = options.nesterov,
      .has_decay = options.weight_decay != 0.0,
      .weight_decay = ToFloat(options.weight_decay),
      .momentum = ToFloat(options.momentum),
      .gradient_weight = ToFloat(1.0 - options.dampening),
      .negative_lr = ToFloat(-options.lr),
  };
  KernelsOf(isa).sgd(call, RangeOf(arrays, begin, end));
}

void AdagradStep(const AdagradOptions& options, const AdagradArrays& arrays, int64_t begin,
                 int64_t end, Isa isa) {
  PS_CHECK(arrays.state_sum != nullptr, "Adagrad needs its sum");
  const kernels::AdagradCall call = {
      .gradient = GradientOf(arrays, options.maximize),
      .parameter = ParameterOf(arrays),
      .state_sum = arrays.state_sum,
      .has_decay = options.weight_decay != 0.0,
      .weight_decay = ToFloat(options.weight_decay),
      .step_size = ToFloat(options.lr / OnePlusProduct(options.step - 1.0, options.lr_decay)),
      .eps = ToFloat(options.eps),
  };
  KernelsOf(isa).adagrad(call, RangeOf(arrays, begin, end));
}

}  // namespace patrickstar
