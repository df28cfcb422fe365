// SPDX-License-Identifier: Apache-2.0
//
// The fused steps, written once over a vector trait V. Every arithmetic call below is
// one rounding, in the order in which torch's kernels round, so the order of operations
// and the places of MultiplyAdd are the specification, not a choice.
#include "patrickstar/optim/kernels/step_kernels.h"

#if defined(PATRICKSTAR_COMPILE_FOR_AVX2)
#include "patrickstar/optim/kernels/avx2_floats.h"
#elif defined(PATRICKSTAR_COMPILE_FOR_AVX512)
#include "patrickstar/optim/kernels/avx512_floats.h"
#elif defined(PATRICKSTAR_COMPILE_FOR_NEON)
#include "patrickstar/optim/kernels/neon_floats.h"
#else
#include "patrickstar/optim/kernels/scalar_floats.h"
#endif

namespace patrickstar::kernels {
namespace {

#if defined(PATRICKSTAR_COMPILE_FOR_AVX2)
using Floats = Avx2Floats;
#elif defined(PATRICKSTAR_COMPILE_FOR_AVX512)
using Floats = Avx512Floats;
#elif defined(PATRICKSTAR_COMPILE_FOR_NEON)
using Floats = NeonFloats;
#else
using Floats = ScalarFloats;
#endif

// torch's loop has a vector body and a scalar tail, which round differently (see fused_step.cc).
enum class Part : uint8_t { kBody, kTail };

// A value known when a kernel is compiled, passed as an argument.
template <auto kGiven>
struct Constant {
  static constexpr auto kValue = kGiven;
};

// The gradient of `V::kLanes` elements from `index` on, as the optimizer's formula takes it.
template <class V, GradientType kType>
class GradientReader {
 public:
  using Value = typename V::Value;

  explicit GradientReader(const Gradient& gradient)
      : gradient_(gradient),
        is_changed_(gradient.num_factors > 0 || gradient.scale != nullptr ||
                    gradient.out != nullptr || gradient.maximize) {}

  Value operator()(int64_t index) const {
    Value value;
    if constexpr (kType == GradientType::kBfloat16) {
      value = V::LoadBfloat16(static_cast<const uint16_t*>(gradient_.data) + index);
    } else {
      value = V::Load(static_cast<const float*>(gradient_.data) + index);
    }
    return is_changed_ ? Change(value, index) : value;
  }

 private:
  Value Change(Value value, int64_t index) const {
    for (int64_t factor = 0; factor < gradient_.num_factors; ++factor) {
      value = V::Multiply(value, V::Broadcast(gradient_.factors[factor]));
    }
    if (gradient_.scale != nullptr) value = V::Divide(value, V::Broadcast(*gradient_.scale));
    if (gradient_.out != nullptr) V::Store(gradient_.out + index, value);
    return gradient_.maximize ? V::Negate(value) : value;
  }

  const Gradient gradient_;
  const bool is_changed_;
};

template <class V, CopyType kType>
void WriteParameter(const Parameter& parameter, int64_t index, typename V::Value value) {
  V::Store(parameter.data + index, value);
  if constexpr (kType == CopyType::kBfloat16) {
    V::StoreBfloat16(static_cast<uint16_t*>(parameter.copy) + index, value);
  } else if constexpr (kType == CopyType::kFloat16) {
    V::StoreFloat16(static_cast<uint16_t*>(parameter.copy) + index, value);
  }
}

// Each of the three optimizers is a variant, chosen outside of the loop, with a class Lanes, which
// steps `V::kLanes` elements per call. Its members are what stays in registers.

template <GradientType kGradient, CopyType kCopy, Decay kDecay, bool kAmsgrad>
struct AdamVariant {
  using Call = AdamCall;

  template <class V, Part kPart>
  class Lanes {
   public:
    using Value = typename V::Value;

    explicit Lanes(const Call& call)
        : read_gradient_(call.gradient),
          parameter_(call.parameter),
          exp_avg_(call.exp_avg),
          exp_avg_sq_(call.exp_avg_sq),
          max_exp_avg_sq_(call.max_exp_avg_sq),
          starts_at_gradient_(!(__builtin_fabsf(call.exp_avg_weight) < kHalfWay)),
          decay_factor_(V::Broadcast(call.decay_factor)),
          exp_avg_weight_(V::Broadcast(ExpAvgWeight(call.exp_avg_weight))),
          beta2_(V::Broadcast(call.beta2)),
          exp_avg_sq_weight_(V::Broadcast(call.exp_avg_sq_weight)),
          bias_correction2_sqrt_(V::Broadcast(call.bias_correction2_sqrt)),
          eps_(V::Broadcast(call.eps)),
          negative_step_size_(V::Broadcast(call.negative_step_size)) {}

    void operator()(int64_t index) const {
      Value parameter = V::Load(parameter_.data + index);
      Value gradient = read_gradient_(index);
      if constexpr (kDecay == Decay::kCoupled) {
        gradient = V::MultiplyAdd(parameter, decay_factor_, gradient);
      } else if constexpr (kDecay == Decay::kDecoupled) {
        parameter = V::Multiply(parameter, decay_factor_);
      }
      const Value exp_avg = ExpAvg(V::Load(exp_avg_ + index), gradient);
      const Value exp_avg_sq = ExpAvgSq(V::Load(exp_avg_sq_ + index), gradient);
      V::Store(exp_avg_ + index, exp_avg);
      V::Store(exp_avg_sq_ + index, exp_avg_sq);
      const Value root = V::SquareRoot(Largest(exp_avg_sq, index));
      const Value denominator = V::Add(V::Divide(root, bias_correction2_sqrt_), eps_);
      const Value step = V::Divide(V::Multiply(negative_step_size_, exp_avg), denominator);
      WriteParameter<V, kCopy>(parameter_, index, V::Add(parameter, step));
    }

   private:
    // torch's lerp starts at the end that is nearer to the result.
    static constexpr float kHalfWay = 0.5f;

    // What the difference from the start is multiplied by. With beta1 = 0 the body and the tail
    // differ in the sign of zero.
    float ExpAvgWeight(float weight) const {
      if (!starts_at_gradient_) return weight;
      return kPart == Part::kBody ? weight - 1.0f : -(1.0f - weight);
    }

    Value ExpAvg(Value exp_avg, Value gradient) const {
      return V::MultiplyAdd(exp_avg_weight_, V::Subtract(gradient, exp_avg),
                            starts_at_gradient_ ? gradient : exp_avg);
    }

    Value ExpAvgSq(Value exp_avg_sq, Value gradient) const {
      const Value weighted = V::Multiply(exp_avg_sq_weight_, gradient);
      if constexpr (kPart == Part::kBody) {
        return V::MultiplyAdd(weighted, gradient, V::Multiply(exp_avg_sq, beta2_));
      } else {
        return V::MultiplyAdd(exp_avg_sq, beta2_, V::Multiply(weighted, gradient));
      }
    }

    Value Largest(Value exp_avg_sq, int64_t index) const {
      if constexpr (!kAmsgrad) {
        return exp_avg_sq;
      } else {
        Value largest = V::Load(max_exp_avg_sq_ + index);
        if constexpr (kPart == Part::kBody) {
          largest = V::Maximum(largest, exp_avg_sq);
        } else {
          largest = largest < exp_avg_sq ? exp_avg_sq : largest;  // so a new NaN is passed over
        }
        V::Store(max_exp_avg_sq_ + index, largest);
        return largest;
      }
    }

    const GradientReader<V, kGradient> read_gradient_;
    const Parameter parameter_;
    float* const exp_avg_;
    float* const exp_avg_sq_;
    float* const max_exp_avg_sq_;
    const bool starts_at_gradient_;
    const Value decay_factor_, exp_avg_weight_, beta2_, exp_avg_sq_weight_;
    const Value bias_correction2_sqrt_, eps_, negative_step_size_;
  };
};

template <GradientType kGradient, CopyType kCopy, Momentum kMomentum>
struct SgdVariant {
  using Call = SgdCall;

  template <class V, Part kPart>
  class Lanes {
   public:
    using Value = typename V::Value;

    explicit Lanes(const Call& call)
        : read_gradient_(call.gradient),
          parameter_(call.parameter),
          momentum_buffer_(call.momentum_buffer),
          nesterov_(call.nesterov),
          has_decay_(call.has_decay),
          weight_decay_(V::Broadcast(call.weight_decay)),
          momentum_(V::Broadcast(call.momentum)),
          gradient_weight_(V::Broadcast(call.gradient_weight)),
          negative_lr_(V::Broadcast(call.negative_lr)) {}

    void operator()(int64_t index) const {
      const Value parameter = V::Load(parameter_.data + index);
      Value gradient = read_gradient_(index);
      if (has_decay_) gradient = V::MultiplyAdd(parameter, weight_decay_, gradient);
      if constexpr (kMomentum != Momentum::kNone) {
        const Value buffer = Buffer(index, gradient);
        V::Store(momentum_buffer_ + index, buffer);
        gradient = nesterov_ ? V::MultiplyAdd(buffer, momentum_, gradient) : buffer;
      }
      WriteParameter<V, kCopy>(parameter_, index,
                               V::MultiplyAdd(gradient, negative_lr_, parameter));
    }

   private:
    Value Buffer(int64_t index, Value gradient) const {
      if constexpr (kMomentum == Momentum::kFirstStep) {
        return gradient;
      } else {
        const Value buffer = V::Load(momentum_buffer_ + index);
        if constexpr (kPart == Part::kBody) {
          return V::MultiplyAdd(gradient, gradient_weight_, V::Multiply(buffer, momentum_));
        } else {
          return V::MultiplyAdd(buffer, momentum_, V::Multiply(gradient, gradient_weight_));
        }
      }
    }

    const GradientReader<V, kGradient> read_gradient_;
    const Parameter parameter_;
    float* const momentum_buffer_;
    const bool nesterov_, has_decay_;
    const Value weight_decay_, momentum_, gradient_weight_, negative_lr_;
  };
};

template <GradientType kGradient, CopyType kCopy>
struct AdagradVariant {
  using Call = AdagradCall;

  template <class V, Part kPart>
  class Lanes {
   public:
    using Value = typename V::Value;

    explicit Lanes(const Call& call)
        : read_gradient_(call.gradient),
          parameter_(call.parameter),
          state_sum_(call.state_sum),
          has_decay_(call.has_decay),
          weight_decay_(V::Broadcast(call.weight_decay)),
          step_size_(V::Broadcast(call.step_size)),
          eps_(V::Broadcast(call.eps)) {}

    void operator()(int64_t index) const {
      const Value parameter = V::Load(parameter_.data + index);
      Value gradient = read_gradient_(index);
      if (has_decay_) gradient = V::MultiplyAdd(parameter, weight_decay_, gradient);
      const Value sum = V::MultiplyAdd(gradient, gradient, V::Load(state_sum_ + index));
      V::Store(state_sum_ + index, sum);
      const Value denominator = V::Add(V::SquareRoot(sum), eps_);
      const Value step = V::Divide(V::Multiply(step_size_, gradient), denominator);
      WriteParameter<V, kCopy>(parameter_, index, V::Subtract(parameter, step));
    }

   private:
    const GradientReader<V, kGradient> read_gradient_;
    const Parameter parameter_;
    float* const state_sum_;
    const bool has_decay_;
    const Value weight_decay_, step_size_, eps_;
  };
};

template <class Lanes>
int64_t StepWhole(const Lanes& lanes, int64_t num_lanes, int64_t begin, int64_t end) {
  int64_t index = begin;
  for (; index <= end - num_lanes; index += num_lanes) lanes(index);
  return index;
}

template <class Variant>
void StepRange(const typename Variant::Call& call, const Range& range) {
  using Body = typename Variant::template Lanes<Floats, Part::kBody>;
  using BodyRest = typename Variant::template Lanes<ScalarFloats, Part::kBody>;
  using Tail = typename Variant::template Lanes<ScalarFloats, Part::kTail>;
  const int64_t rest = StepWhole(Body(call), Floats::kLanes, range.begin, range.body_end);
  StepWhole(BodyRest(call), 1, rest, range.body_end);
  StepWhole(Tail(call), 1, range.body_end, range.end);
}

// Calls `function` with both types as constants.
template <class Function>
void WithTypes(GradientType gradient, CopyType copy, const Function& function) {
  const auto with_copy = [&](auto gradient_constant) {
    switch (copy) {
      case CopyType::kNone:
        return function(gradient_constant, Constant<CopyType::kNone>{});
      case CopyType::kBfloat16:
        return function(gradient_constant, Constant<CopyType::kBfloat16>{});
      case CopyType::kFloat16:
        return function(gradient_constant, Constant<CopyType::kFloat16>{});
    }
  };
  if (gradient == GradientType::kBfloat16) {
    with_copy(Constant<GradientType::kBfloat16>{});
  } else {
    with_copy(Constant<GradientType::kFloat32>{});
  }
}

template <GradientType kGradient, CopyType kCopy, Decay kDecay>
void AdamWithDecay(const AdamCall& call, const Range& range) {
  if (call.max_exp_avg_sq != nullptr) {
    StepRange<AdamVariant<kGradient, kCopy, kDecay, true>>(call, range);
  } else {
    StepRange<AdamVariant<kGradient, kCopy, kDecay, false>>(call, range);
  }
}

void Adam(const AdamCall& call, const Range& range) {
  WithTypes(call.gradient.type, call.parameter.copy_type, [&](auto gradient, auto copy) {
    constexpr GradientType kGradient = decltype(gradient)::kValue;
    constexpr CopyType kCopy = decltype(copy)::kValue;
    switch (call.decay) {
      case Decay::kNone:
        return AdamWithDecay<kGradient, kCopy, Decay::kNone>(call, range);
      case Decay::kCoupled:
        return AdamWithDecay<kGradient, kCopy, Decay::kCoupled>(call, range);
      case Decay::kDecoupled:
        return AdamWithDecay<kGradient, kCopy, Decay::kDecoupled>(call, range);
    }
  });
}

void Sgd(const SgdCall& call, const Range& range) {
  WithTypes(call.gradient.type, call.parameter.copy_type, [&](auto gradient, auto copy) {
    constexpr GradientType kGradient = decltype(gradient)::kValue;
    constexpr CopyType kCopy = decltype(copy)::kValue;
    switch (call.momentum_kind) {
      case Momentum::kNone:
        return StepRange<SgdVariant<kGradient, kCopy, Momentum::kNone>>(call, range);
      case Momentum::kFirstStep:
        return StepRange<SgdVariant<kGradient, kCopy, Momentum::kFirstStep>>(call, range);
      case Momentum::kLaterStep:
        return StepRange<SgdVariant<kGradient, kCopy, Momentum::kLaterStep>>(call, range);
    }
  });
}

void Adagrad(const AdagradCall& call, const Range& range) {
  WithTypes(call.gradient.type, call.parameter.copy_type, [&](auto gradient, auto copy) {
    StepRange<AdagradVariant<decltype(gradient)::kValue, decltype(copy)::kValue>>(call, range);
  });
}

}  // namespace

#if defined(PATRICKSTAR_COMPILE_FOR_AVX2)
const StepKernels kAvx2Kernels = {Adam, Sgd, Adagrad};
#elif defined(PATRICKSTAR_COMPILE_FOR_AVX512)
const StepKernels kAvx512Kernels = {Adam, Sgd, Adagrad};
#elif defined(PATRICKSTAR_COMPILE_FOR_NEON)
const StepKernels kNeonKernels = {Adam, Sgd, Adagrad};
#else
const StepKernels kScalarKernels = {Adam, Sgd, Adagrad};
#endif

}  // namespace patrickstar::kernels
