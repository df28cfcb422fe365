// SPDX-License-Identifier: Apache-2.0
//
// Fused steps: one optimizer step over a run of elements of one tensor in one pass.
// The gradient is read once, parameter and state are read and written once, and a
// 16-bit compute copy is written in passing. The bits are those of torch's fused CPU
// kernels as they run on AVX2, whatever Isa computes them and however a caller splits
// the elements over calls and threads.
// Nothing is owned or allocated here. Thread-safe on ranges that do not overlap.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "patrickstar/optim/isa.h"

namespace patrickstar {

// How the values of a gradient, which are float, lie in memory.
enum class GradientType : uint8_t { kFloat32, kBfloat16 };

// The dtype of a compute copy; rounded to nearest even, NaN as torch's cast on AVX2 has it.
enum class CopyType : uint8_t { kNone, kBfloat16, kFloat16 };

// The hyper-parameters of Adam and AdamW. Python's doubles: constants derived from them are
// computed in double and rounded to float once, as torch does.
struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  // Weight decay shrinks the parameter (AdamW) instead of being added to the gradient (Adam).
  bool is_decoupled = false;
  // Divide by the largest second moment so far; needs max_exp_avg_sq.
  bool amsgrad = false;
  bool maximize = false;
  // The tensor's step count, this step included: 1 at the first.
  double step = 1.0;
};

struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0.0;
  double dampening = 0.0;
  double weight_decay = 0.0;
  bool nesterov = false;
  bool maximize = false;
  // The momentum buffer has no value yet: it becomes the gradient.
  bool is_first_step = false;
};

struct AdagradOptions {
  double lr = 1e-2;
  double lr_decay = 0.0;
  double eps = 1e-10;
  double weight_decay = 0.0;
  bool maximize = false;
  // The tensor's step count, this step included: 1 at the first.
  double step = 1.0;
};

// What every step reads and writes. All arrays start at the same element of the tensor.
struct StepArrays {
  float* parameter = nullptr;

  // The gradient, and what is done to each element once it is read: multiplied by each factor in
  // turn, every product rounded to float, then divided by grad_scale.
  const void* gradient = nullptr;
  GradientType gradient_type = GradientType::kFloat32;
  std::span<const float> factors = {};
  std::optional<float> grad_scale = {};
  // Where the gradient after factors and grad_scale is written, as torch writes the unscaled one
  // back; null to keep it nowhere. May be `gradient` itself if that is kFloat32.
  float* gradient_out = nullptr;

  void* compute_copy = nullptr;
  CopyType copy_type = CopyType::kNone;

  // The size of the whole tensor, and the index in it of the element where the arrays start.
  // torch rounds the last `num_elements % 8` elements of a tensor otherwise than the rest.
  int64_t num_elements = 0;
  int64_t offset = 0;
};

struct AdamArrays : StepArrays {
  float* exp_avg = nullptr;
  float* exp_avg_sq = nullptr;
  float* max_exp_avg_sq = nullptr;  // with amsgrad only
};

struct SgdArrays : StepArrays {
  float* momentum_buffer = nullptr;  // with momentum only
};

struct AdagradArrays : StepArrays {
  float* state_sum = nullptr;
};

// Each of these steps the elements [begin, end) of the arrays.
// REQUIRES: `isa` is one of AvailableIsas(); arrays hold [begin, end) and do not overlap (but for
// gradient_out); offset + end <= num_elements.
// Throws: std::logic_error if an array that the options need is null or the range is not in the
// tensor.
void AdamStep(const AdamOptions& options, const AdamArrays& arrays, int64_t begin, int64_t end,
              Isa isa = SelectedIsa());
void SgdStep(const SgdOptions& options, const SgdArrays& arrays, int64_t begin, int64_t end,
             Isa isa = SelectedIsa());
void AdagradStep(const AdagradOptions& options, const AdagradArrays& arrays, int64_t begin,
                 int64_t end, Isa isa = SelectedIsa());

}  // namespace patrickstar
