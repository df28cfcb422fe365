// SPDX-License-Identifier: Apache-2.0
#include "patrickstar/optim/fused_step.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "patrickstar/base/crc32c.h"

namespace patrickstar {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Everything that a step may read or write, for one tensor.
struct Tensor {
  std::vector<float> parameter, gradient, first_state, second_state, third_state, gradient_out;
  std::vector<uint16_t> bfloat16_gradient, compute_copy;

  int64_t size() const { return static_cast<int64_t>(parameter.size()); }

  std::array<std::vector<float>*, 6> AllFloats() {
    return {&parameter, &gradient, &first_state, &second_state, &third_state, &gradient_out};
  }

  // The elements [begin, end) as a tensor of their own, without 16-bit arrays.
  Tensor Part(int64_t begin, int64_t end) {
    Tensor part;
    for (size_t index = 0; index < AllFloats().size(); ++index) {
      const auto first = AllFloats()[index]->begin();
      part.AllFloats()[index]->assign(first + begin, first + end);
    }
    return part;
  }

  // From uniform bits, a third of them replaced by what float has beside ordinary numbers.
  static Tensor Random(size_t size, uint32_t seed, bool has_specials = true) {
    std::mt19937 random(seed);
    Tensor tensor;
    for (auto* values : {&tensor.parameter, &tensor.gradient, &tensor.first_state,
                         &tensor.second_state, &tensor.third_state}) {
      for (size_t at = 0; at < size; ++at) values->push_back(AnyFloat(random, has_specials));
    }
    for (auto* values : {&tensor.second_state, &tensor.third_state}) {
      for (float& value : *values) value = std::fabs(value);
    }
    for (const float value : tensor.gradient) {
      tensor.bfloat16_gradient.push_back(
          static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16));
    }
    tensor.gradient_out.assign(size, 0.0f);
    tensor.compute_copy.assign(size, 0);
    return tensor;
  }

 private:
  static float AnyFloat(std::mt19937& random, bool has_specials) {
    constexpr float kSpecials[] = {0.0f,    -0.0f,    1e-45f, -1e-40f,   1.17549435e-38f,
                                   3.4e38f, -3.4e38f, 1e19f,  kInfinity, -kInfinity,
                                   kNan};
    if (has_specials && random() % 3 == 0) return kSpecials[random() % std::size(kSpecials)];
    const float value = static_cast<float>(static_cast<int32_t>(random())) / 2147483648.0f;
    return std::ldexp(value, static_cast<int>(random() % 24) - 16);
  }
};

// One optimizer with its options, as a step over [begin, end) of a tensor.
struct Variant {
  std::string name;
  std::function<void(StepArrays, Tensor*, int64_t begin, int64_t end, Isa)> step;
};

Variant AdamOf(const std::string& name, const AdamOptions& options) {
  return {name, [options](StepArrays common, Tensor* tensor, int64_t begin, int64_t end, Isa isa) {
            AdamArrays arrays{common};
            arrays.exp_avg = tensor->first_state.data();
            arrays.exp_avg_sq = tensor->second_state.data();
            if (options.amsgrad) arrays.max_exp_avg_sq = tensor->third_state.data();
            AdamStep(options, arrays, begin, end, isa);
          }};
}

Variant SgdOf(const std::string& name, const SgdOptions& options) {
  return {name, [options](StepArrays common, Tensor* tensor, int64_t begin, int64_t end, Isa isa) {
            SgdArrays arrays{common};
            if (options.momentum != 0.0) arrays.momentum_buffer = tensor->first_state.data();
            SgdStep(options, arrays, begin, end, isa);
          }};
}

Variant AdagradOf(const std::string& name, const AdagradOptions& options) {
  return {name, [options](StepArrays common, Tensor* tensor, int64_t begin, int64_t end, Isa isa) {
            AdagradArrays arrays{common};
            arrays.state_sum = tensor->second_state.data();
            AdagradStep(options, arrays, begin, end, isa);
          }};
}

std::vector<Variant> AllVariants() {
  std::vector<Variant> variants;
  for (int flags = 0; flags < 32; ++flags) {
    const bool is_set[] = {(flags & 1) != 0, (flags & 2) != 0, (flags & 4) != 0, (flags & 8) != 0,
                           (flags & 16) != 0};
    const double decay = is_set[0] ? 0.1 : 0.0;
    const std::string suffix = " " + std::to_string(flags);
    variants.push_back(AdamOf("Adam" + suffix, {.beta1 = is_set[1] ? 0.3 : 0.9,
                                                .weight_decay = decay,
                                                .is_decoupled = is_set[2],
                                                .amsgrad = is_set[3],
                                                .maximize = is_set[4],
                                                .step = 3}));
    variants.push_back(SgdOf("SGD" + suffix, {.momentum = is_set[1] ? 0.9 : 0.0,
                                              .dampening = is_set[2] ? 0.1 : 0.0,
                                              .weight_decay = decay,
                                              .nesterov = is_set[2],
                                              .maximize = is_set[4],
                                              .is_first_step = is_set[3]}));
    variants.push_back(AdagradOf("Adagrad" + suffix, {.lr_decay = is_set[1] ? 0.01 : 0.0,
                                                      .weight_decay = decay,
                                                      .maximize = is_set[4],
                                                      .step = 3}));
  }
  return variants;
}

// The parts of a step that all optimizers have.
struct Common {
  GradientType gradient_type = GradientType::kFloat32;
  CopyType copy_type = CopyType::kNone;
  std::vector<float> factors = {};
  std::optional<float> grad_scale = {};
  bool writes_gradient = false;

  StepArrays ArraysOf(Tensor* tensor) const {
    StepArrays arrays;
    arrays.parameter = tensor->parameter.data();
    arrays.gradient = tensor->gradient.data();
    if (gradient_type == GradientType::kBfloat16) {
      arrays.gradient = tensor->bfloat16_gradient.data();
    }
    arrays.gradient_type = gradient_type;
    arrays.factors = factors;
    arrays.grad_scale = grad_scale;
    if (writes_gradient) arrays.gradient_out = tensor->gradient_out.data();
    if (copy_type != CopyType::kNone) arrays.compute_copy = tensor->compute_copy.data();
    arrays.copy_type = copy_type;
    arrays.num_elements = tensor->size();
    return arrays;
  }
};

std::vector<Common> AllCommons() {
  return {{},
          {.copy_type = CopyType::kBfloat16, .factors = {0.3f, 1.7f}, .writes_gradient = true},
          {.gradient_type = GradientType::kBfloat16,
           .copy_type = CopyType::kFloat16,
           .factors = {},
           .grad_scale = 3.0f,
           .writes_gradient = true},
          {.gradient_type = GradientType::kBfloat16,
           .copy_type = CopyType::kBfloat16,
           .factors = {0.1f},
           .grad_scale = {}}};
}

void StepAll(const Variant& variant, const Common& common, Tensor* tensor, Isa isa) {
  variant.step(common.ArraysOf(tensor), tensor, 0, tensor->size(), isa);
}

// Sign and payload of a NaN are not part of what is promised; that it is one is.
uint32_t ComparableBits(float value) {
  return std::bit_cast<uint32_t>(std::isnan(value) ? kNan : value);
}

void ExpectSameFloats(const std::vector<float>& actual, const std::vector<float>& expected,
                      const std::string& what) {
  for (size_t at = 0; at < actual.size(); ++at) {
    ASSERT_EQ(ComparableBits(actual[at]), ComparableBits(expected[at]))
        << what << ", element " << at << " of " << actual.size() << ": " << actual[at] << " and "
        << expected[at];
  }
}

void ExpectSame(const Tensor& actual, const Tensor& expected, const std::string& what) {
  ExpectSameFloats(actual.parameter, expected.parameter, what + ", parameter");
  ExpectSameFloats(actual.first_state, expected.first_state, what + ", first state");
  ExpectSameFloats(actual.second_state, expected.second_state, what + ", second state");
  ExpectSameFloats(actual.third_state, expected.third_state, what + ", third state");
  ExpectSameFloats(actual.gradient_out, expected.gradient_out, what + ", gradient");
  for (size_t at = 0; at < actual.compute_copy.size(); ++at) {
    if (std::isnan(actual.parameter[at])) continue;
    ASSERT_EQ(actual.compute_copy[at], expected.compute_copy[at])
        << what << ", copy of element " << at;
  }
}

TEST(FusedStep, EveryIsaGivesTheBitsOfTheScalarKernels) {
  std::vector<size_t> sizes = {255, 1031};
  for (size_t size = 1; size < 70; size += 3) sizes.push_back(size);
  for (const Isa isa : AvailableIsas()) {
    for (const Variant& variant : AllVariants()) {
      for (const Common& common : AllCommons()) {
        for (const size_t size : sizes) {
          Tensor expected = Tensor::Random(size, static_cast<uint32_t>(size));
          Tensor actual = expected;
          StepAll(variant, common, &expected, Isa::kScalar);
          StepAll(variant, common, &actual, isa);
          const std::string what = variant.name + ", " + std::string(IsaName(isa));
          ASSERT_NO_FATAL_FAILURE(ExpectSame(actual, expected, what));
        }
      }
    }
  }
}

TEST(FusedStep, AnySplitOverCallsGivesTheSameBits) {
  std::mt19937 random(3);
  for (const Isa isa : AvailableIsas()) {
    for (const Variant& variant : AllVariants()) {
      for (const Common& common : AllCommons()) {
        Tensor whole = Tensor::Random(203, static_cast<uint32_t>(random()));
        Tensor split = whole;
        StepAll(variant, common, &whole, isa);
        for (int64_t begin = 0; begin < split.size();) {
          const auto length = static_cast<int64_t>(random() % 40);
          const int64_t end = std::min(begin + length, split.size());
          variant.step(common.ArraysOf(&split), &split, begin, end, isa);
          begin = end;
        }
        ASSERT_NO_FATAL_FAILURE(ExpectSame(split, whole, variant.name));
      }
    }
  }
}

// A window holds a part of a tensor; the last elements of the tensor are rounded as its tail.
TEST(FusedStep, AWindowGivesTheBitsOfTheWholeTensor) {
  constexpr int64_t kSize = 45;
  const Variant variant = AdamOf("Adam", {.weight_decay = 0.1, .step = 2});
  for (const Isa isa : AvailableIsas()) {
    Tensor whole = Tensor::Random(kSize, 11, false);
    for (int64_t offset = 0; offset < kSize; ++offset) {
      Tensor window = whole.Part(offset, kSize);
      StepArrays arrays = Common{}.ArraysOf(&window);
      arrays.offset = offset;
      arrays.num_elements = kSize;
      variant.step(arrays, &window, 0, kSize - offset, isa);
      Tensor stepped = whole;
      StepAll(variant, {}, &stepped, isa);
      ExpectSame(window, stepped.Part(offset, kSize), "window");
    }
  }
}

// Inputs that any language can make again: a linear congruential generator, its upper 24 bits as a
// number in [-1, 1).
class Congruential {
 public:
  std::vector<float> Take(size_t size) {
    std::vector<float> values;
    for (size_t at = 0; at < size; ++at) {
      state_ = state_ * 6364136223846793005u + 1442695040888963407u;
      values.push_back((static_cast<float>(state_ >> 40) - 8388608.0f) / 8388608.0f);
    }
    return values;
  }

 private:
  uint64_t state_ = 1;
};

Tensor MakeReproducible(size_t size) {
  Congruential numbers;
  Tensor tensor = Tensor::Random(size, 0);
  tensor.parameter = numbers.Take(size);
  tensor.gradient = numbers.Take(size);
  tensor.first_state = numbers.Take(size);
  tensor.second_state = numbers.Take(size);
  tensor.third_state = numbers.Take(size);
  for (float& value : tensor.second_state) value = std::fabs(value);
  for (float& value : tensor.third_state) value = std::fabs(value);
  return tensor;
}

uint32_t ChecksumOf(const std::vector<float>& values) {
  return Crc32c(values.data(), values.size() * sizeof(float));
}

// Sizes of the reference below: a full vector of torch and the longest tail there is.
constexpr int64_t kReferenceTensors = 267;
constexpr int64_t kReferenceSize = 15;

// What torch 2.13.0 gives on AVX2 for the numbers of MakeReproducible, cut into tensors of
// kReferenceSize elements, with _fused_adam_, _fused_adamw_, _fused_sgd_ and _fused_adagrad_ and
// these options: the CRC-32C of all parameters, first, second and third states, and gradients.
struct OfTorch {
  Variant variant;
  std::optional<float> grad_scale = {};
  uint32_t checksums[5];
};

std::vector<OfTorch> ResultsOfTorch() {
  return {
      {AdamOf("Adam", {.step = 1}),
       {},
       {0x2f4f7b1a, 0x428b04d8, 0x35c05fdf, 0x17b995c8, 0x9ae93d9d}},
      {AdamOf("Adam, all", {.lr = 0.01,
                            .beta1 = 0.3,
                            .beta2 = 0.95,
                            .eps = 1e-6,
                            .weight_decay = 0.1,
                            .amsgrad = true,
                            .maximize = true,
                            .step = 7}),
       3.0f,
       {0xa0e4fd27, 0x95384e70, 0xc35eb61, 0x28b39ae, 0xdfb4bbb1}},
      {AdamOf("AdamW", {.weight_decay = 0.01, .is_decoupled = true, .step = 1000}),
       {},
       {0xfec7f12f, 0x428b04d8, 0x35c05fdf, 0x17b995c8, 0x9ae93d9d}},
      {AdamOf("AdamW, all", {.lr = 0.01,
                             .weight_decay = 0.1,
                             .is_decoupled = true,
                             .amsgrad = true,
                             .maximize = true,
                             .step = 7}),
       3.0f,
       {0x4759b096, 0x470c45a0, 0xf9109f2e, 0xae656648, 0xdfb4bbb1}},
      {SgdOf("SGD", {.lr = 0.1}), {}, {0x28158cd1, 0x986bc3cf, 0x3e3b75da, 0x17b995c8, 0x9ae93d9d}},
      {SgdOf("SGD, momentum",
             {.lr = 0.1, .momentum = 0.9, .dampening = 0.3, .weight_decay = 0.1, .maximize = true}),
       3.0f,
       {0xc5771cae, 0xb3c69b01, 0x3e3b75da, 0x17b995c8, 0xdfb4bbb1}},
      {SgdOf("SGD, nesterov", {.lr = 0.1, .momentum = 0.9, .nesterov = true}),
       {},
       {0x6a2cbdad, 0xfb5a28b4, 0x3e3b75da, 0x17b995c8, 0x9ae93d9d}},
      {SgdOf("SGD, first step", {.lr = 0.1,
                                 .momentum = 0.9,
                                 .weight_decay = 0.1,
                                 .nesterov = true,
                                 .is_first_step = true}),
       {},
       {0x668e0dfb, 0xc2f1522a, 0x3e3b75da, 0x17b995c8, 0x9ae93d9d}},
      {AdagradOf("Adagrad", {}), {}, {0xba563edc, 0x986bc3cf, 0xba8df46e, 0x17b995c8, 0x9ae93d9d}},
      {AdagradOf("Adagrad, all", {.lr = 0.1,
                                  .lr_decay = 0.01,
                                  .eps = 1e-6,
                                  .weight_decay = 0.1,
                                  .maximize = true,
                                  .step = 7}),
       3.0f,
       {0x20f511, 0x986bc3cf, 0xe60463b2, 0x17b995c8, 0xdfb4bbb1}},
  };
}

TEST(FusedStep, GivesTheBitsOfTorchsFusedKernels) {
  for (const Isa isa : AvailableIsas()) {
    for (const OfTorch& of_torch : ResultsOfTorch()) {
      Tensor numbers = MakeReproducible(kReferenceTensors * kReferenceSize);
      Tensor stepped;
      for (int64_t begin = 0; begin < numbers.size(); begin += kReferenceSize) {
        Tensor tensor = numbers.Part(begin, begin + kReferenceSize);
        StepArrays arrays = Common{.grad_scale = of_torch.grad_scale}.ArraysOf(&tensor);
        arrays.gradient_out = tensor.gradient.data();  // in place, as torch
        of_torch.variant.step(arrays, &tensor, 0, tensor.size(), isa);
        for (size_t index = 0; index < tensor.AllFloats().size(); ++index) {
          std::ranges::copy(*tensor.AllFloats()[index],
                            std::back_inserter(*stepped.AllFloats()[index]));
        }
      }
      const std::string what = of_torch.variant.name + ", " + std::string(IsaName(isa));
      EXPECT_EQ(ChecksumOf(stepped.parameter), of_torch.checksums[0]) << what;
      EXPECT_EQ(ChecksumOf(stepped.first_state), of_torch.checksums[1]) << what;
      EXPECT_EQ(ChecksumOf(stepped.second_state), of_torch.checksums[2]) << what;
      EXPECT_EQ(ChecksumOf(stepped.third_state), of_torch.checksums[3]) << what;
      EXPECT_EQ(ChecksumOf(stepped.gradient), of_torch.checksums[4]) << what;
    }
  }
}

TEST(FusedStep, FactorsAreAppliedInOrderEachRoundedAndThenTheScaleDivides) {
  for (const Isa isa : AvailableIsas()) {
    Tensor tensor = Tensor::Random(101, 5);
    const Tensor before = tensor;
    const Common common = {
        .factors = {0.3f, 1.1f, 0.7f}, .grad_scale = 3.0f, .writes_gradient = true};
    StepAll(SgdOf("SGD", {.lr = 0.5}), common, &tensor, isa);
    for (size_t at = 0; at < before.gradient.size(); ++at) {
      float gradient = before.gradient[at];
      for (const float factor : common.factors) gradient = gradient * factor;
      gradient = gradient / 3.0f;
      EXPECT_EQ(ComparableBits(tensor.gradient_out[at]), ComparableBits(gradient)) << at;
      const float parameter = std::fma(gradient, -0.5f, before.parameter[at]);
      EXPECT_EQ(ComparableBits(tensor.parameter[at]), ComparableBits(parameter)) << at;
    }
  }
}

TEST(FusedStep, ABfloat16GradientGivesTheBitsOfTheSameValuesInFloat) {
  for (const Isa isa : AvailableIsas()) {
    Tensor packed = Tensor::Random(133, 9);
    Tensor plain = packed;
    for (size_t at = 0; at < plain.gradient.size(); ++at) {
      plain.gradient[at] = std::bit_cast<float>(uint32_t{packed.bfloat16_gradient[at]} << 16);
    }
    const Variant variant = AdamOf("Adam", {.step = 2});
    StepAll(variant, {.gradient_type = GradientType::kBfloat16}, &packed, isa);
    StepAll(variant, {}, &plain, isa);
    ExpectSame(packed, plain, "gradient in bf16");
  }
}

// The compute copy of each value, by a step that leaves the parameter as it is.
std::vector<uint16_t> CopiesOf(const std::vector<float>& values, CopyType type, Isa isa) {
  Tensor tensor = Tensor::Random(values.size(), 0);
  tensor.parameter = values;
  tensor.gradient.assign(values.size(), 0.0f);
  StepAll(SgdOf("SGD", {.lr = 0.0}), {.copy_type = type}, &tensor, isa);
  ExpectSameFloats(tensor.parameter, values, "untouched parameter");
  return tensor.compute_copy;
}

struct Rounding {
  float value;
  uint16_t expected;
};

void ExpectRoundings(const std::vector<Rounding>& roundings, CopyType type) {
  for (const Isa isa : AvailableIsas()) {
    for (const Rounding& rounding : roundings) {
      // 19 of them: in full vectors, in the rest of the body and in the tail.
      const std::vector<uint16_t> copies =
          CopiesOf(std::vector<float>(19, rounding.value), type, isa);
      EXPECT_EQ(copies, std::vector<uint16_t>(19, rounding.expected))
          << rounding.value << ", " << IsaName(isa);
    }
  }
}

TEST(FusedStep, ABfloat16CopyIsRoundedToNearestEven) {
  ExpectRoundings({{1.0f, 0x3f80},
                   {std::bit_cast<float>(0x3f808000u), 0x3f80},  // half way, down to even
                   {std::bit_cast<float>(0x3f818000u), 0x3f82},  // half way, up to even
                   {std::bit_cast<float>(0x3f808001u), 0x3f81},
                   {3.4e38f, 0x7f80},  // rounds to infinity
                   {-kInfinity, 0xff80},
                   {-0.0f, 0x8000},
                   {std::bit_cast<float>(0x00018000u), 0x0002},  // denormal, half way
                   {kNan, 0xffff},
                   {std::bit_cast<float>(0x7f800001u), 0xffff}},  // a NaN that would round to inf
                  CopyType::kBfloat16);
}

TEST(FusedStep, AFloat16CopyIsRoundedToNearestEven) {
  ExpectRoundings({{1.0f, 0x3c00},
                   {-65504.0f, 0xfbff},
                   {65519.996f, 0x7bff},
                   {65520.0f, 0x7c00},
                   {-kInfinity, 0xfc00},
                   {1.00048828125f, 0x3c00},  // half way, down to even
                   {1.00146484375f, 0x3c02},  // half way, up to even
                   {std::ldexp(1.0f, -14), 0x0400},
                   {std::ldexp(1023.5f, -24), 0x0400},  // rounds up to a normal number
                   {std::ldexp(1.0f, -24), 0x0001},
                   {std::ldexp(-1.5f, -24), 0x8002},
                   {std::ldexp(1.0f, -25), 0x0000},  // half way, down to even
                   {std::ldexp(1.0001f, -25), 0x0001},
                   {-1e-45f, 0x8000},
                   {kNan, 0x7e00},
                   {std::bit_cast<float>(0xff802000u), 0xfe01}},
                  CopyType::kFloat16);
}

TEST(FusedStep, ANewNanEntersTheMaximumOfTheBodyAndIsPassedOverInTheTailAsInTorch) {
  for (const Isa isa : AvailableIsas()) {
    Tensor tensor = Tensor::Random(10, 1, false);
    tensor.gradient.assign(10, kNan);
    tensor.third_state.assign(10, 2.0f);
    StepAll(AdamOf("Adam", {.amsgrad = true}), {}, &tensor, isa);
    EXPECT_TRUE(std::isnan(tensor.third_state[7]));
    EXPECT_EQ(tensor.third_state[8], 2.0f);
  }
}

TEST(FusedStep, WithoutAFirstMomentTheSignOfZeroDiffersInTheTailAsInTorch) {
  for (const Isa isa : AvailableIsas()) {
    Tensor tensor = Tensor::Random(10, 1, false);
    tensor.gradient.assign(10, -0.0f);
    tensor.first_state.assign(10, 1.0f);
    StepAll(AdamOf("Adam", {.beta1 = 0.0}), {}, &tensor, isa);
    EXPECT_TRUE(std::signbit(tensor.first_state[7]));
    EXPECT_FALSE(std::signbit(tensor.first_state[8]));
  }
}

TEST(FusedStep, RefusesWhatIsNotInTheTensorOrNotThere) {
  Tensor tensor = Tensor::Random(16, 1);
  const Variant adam = AdamOf("Adam", {});
  StepArrays arrays = Common{}.ArraysOf(&tensor);
  EXPECT_THROW(adam.step(arrays, &tensor, 0, 17, Isa::kScalar), std::logic_error);
  EXPECT_THROW(adam.step(arrays, &tensor, -1, 4, Isa::kScalar), std::logic_error);
  arrays.offset = 1;
  EXPECT_THROW(adam.step(arrays, &tensor, 0, 16, Isa::kScalar), std::logic_error);
  EXPECT_THROW(AdamStep({.amsgrad = true}, AdamArrays{arrays}, 0, 8), std::logic_error);
  EXPECT_THROW(SgdStep({.momentum = 0.9}, SgdArrays{arrays}, 0, 8), std::logic_error);
  EXPECT_THROW(AdagradStep({}, AdagradArrays{arrays}, 0, 8), std::logic_error);
  arrays.copy_type = CopyType::kBfloat16;
  EXPECT_THROW(SgdStep({}, SgdArrays{arrays}, 0, 8), std::logic_error);
}

}  // namespace
}  // namespace patrickstar
