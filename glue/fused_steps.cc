// SPDX-License-Identifier: Apache-2.0
#include "glue/fused_steps.h"

#include <ATen/Parallel.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

#include "patrickstar/base/check.h"
#include "patrickstar/optim/fused_step.h"

namespace patrickstar {
namespace {

namespace py = pybind11;

// Below this many elements a second thread costs more than it saves.
constexpr int64_t kElementsPerThread = int64_t{1} << 15;

float* FloatsOf(const at::Tensor& tensor) {
  PS_CHECK(tensor.scalar_type() == at::kFloat && tensor.is_non_overlapping_and_dense(),
           "got a tensor of type ", c10::toString(tensor.scalar_type()));
  return tensor.data_ptr<float>();
}

// The arrays that all kernels take: `tensors` is parameter, gradient, state...
template <typename Arrays>
Arrays ArraysOf(const std::vector<at::Tensor>& tensors) {
  Arrays arrays;
  arrays.parameter = FloatsOf(tensors.at(0));
  arrays.gradient = FloatsOf(tensors.at(1));
  arrays.num_elements = tensors[0].numel();
  return arrays;
}

template <typename Step>
void InParallel(int64_t num_elements, const Step& step) {
  const py::gil_scoped_release without_gil;
  at::parallel_for(0, num_elements, kElementsPerThread, step);
}

void StepAdam(const std::vector<at::Tensor>& tensors, const AdamOptions& options) {
  auto arrays = ArraysOf<AdamArrays>(tensors);
  arrays.exp_avg = FloatsOf(tensors.at(2));
  arrays.exp_avg_sq = FloatsOf(tensors.at(3));
  if (options.amsgrad) arrays.max_exp_avg_sq = FloatsOf(tensors.at(4));
  InParallel(tensors[0].numel(),
             [&](int64_t begin, int64_t end) { AdamStep(options, arrays, begin, end); });
}

void StepSgd(const std::vector<at::Tensor>& tensors, const SgdOptions& options) {
  auto arrays = ArraysOf<SgdArrays>(tensors);
  if (options.momentum != 0.0) arrays.momentum_buffer = FloatsOf(tensors.at(2));
  InParallel(tensors[0].numel(),
             [&](int64_t begin, int64_t end) { SgdStep(options, arrays, begin, end); });
}

void StepAdagrad(const std::vector<at::Tensor>& tensors, const AdagradOptions& options) {
  auto arrays = ArraysOf<AdagradArrays>(tensors);
  arrays.state_sum = FloatsOf(tensors.at(2));
  InParallel(tensors[0].numel(),
             [&](int64_t begin, int64_t end) { AdagradStep(options, arrays, begin, end); });
}

}  // namespace

void RegisterFusedSteps(py::module_& module) {
  module.def(
      "fused_adam_step",
      [](const std::vector<at::Tensor>& tensors, double lr, double beta1, double beta2, double eps,
         double weight_decay, bool is_decoupled, bool amsgrad, bool maximize, double step) {
        StepAdam(tensors, {.lr = lr,
                           .beta1 = beta1,
                           .beta2 = beta2,
                           .eps = eps,
                           .weight_decay = weight_decay,
                           .is_decoupled = is_decoupled,
                           .amsgrad = amsgrad,
                           .maximize = maximize,
                           .step = step});
      },
      py::arg("tensors"), py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
      py::arg("eps"), py::arg("weight_decay"), py::arg("is_decoupled"), py::arg("amsgrad"),
      py::arg("maximize"), py::arg("step"));
  module.def(
      "fused_sgd_step",
      [](const std::vector<at::Tensor>& tensors, double lr, double momentum, double dampening,
         double weight_decay, bool nesterov, bool maximize) {
        StepSgd(tensors, {.lr = lr,
                          .momentum = momentum,
                          .dampening = dampening,
                          .weight_decay = weight_decay,
                          .nesterov = nesterov,
                          .maximize = maximize});
      },
      py::arg("tensors"), py::kw_only(), py::arg("lr"), py::arg("momentum"), py::arg("dampening"),
      py::arg("weight_decay"), py::arg("nesterov"), py::arg("maximize"));
  module.def(
      "fused_adagrad_step",
      [](const std::vector<at::Tensor>& tensors, double lr, double lr_decay, double eps,
         double weight_decay, bool maximize, double step) {
        StepAdagrad(tensors, {.lr = lr,
                              .lr_decay = lr_decay,
                              .eps = eps,
                              .weight_decay = weight_decay,
                              .maximize = maximize,
                              .step = step});
      },
      py::arg("tensors"), py::kw_only(), py::arg("lr"), py::arg("lr_decay"), py::arg("eps"),
      py::arg("weight_decay"), py::arg("maximize"), py::arg("step"));
  module.def("selected_isa", [] { return std::string(IsaName(SelectedIsa())); });
}

}  // namespace patrickstar
