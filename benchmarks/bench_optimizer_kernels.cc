// SPDX-License-Identifier: Apache-2.0
//
// The fused steps against a copy: how much of the bandwidth of memcpy, on the same arrays in
// the same run and on as many threads, a step over parameter, gradient and state reaches.
// A byte read and a byte written count alike in both. Kernels and memcpy take turns; the ratio
// is that of medians over the rounds.
//
// Usage: bench_optimizer_kernels [Mi parameters] [rounds] [threads...]
#include <sys/utsname.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "patrickstar/base/error.h"
#include "patrickstar/optim/fused_step.h"

namespace patrickstar::benchmarks {
namespace {

constexpr double kGiga = 1e9;
// Shares of threads start at multiples of this many elements, a cache line of fp16.
constexpr int64_t kShareElements = 32;

// Calls `work(begin, end)` for equal shares of [0, size), each on a thread of its own.
void OnThreads(int num_threads, int64_t size, const std::function<void(int64_t, int64_t)>& work) {
  const int64_t share = (size / num_threads + kShareElements - 1) / kShareElements * kShareElements;
  std::vector<std::thread> threads;
  for (int64_t begin = 0; begin < size; begin += share) {
    threads.emplace_back(work, begin, std::min(begin + share, size));
  }
  for (std::thread& thread : threads) thread.join();
}

// The arrays of one tensor, with values that stay ordinary numbers over many steps.
class Arrays {
 public:
  explicit Arrays(int64_t size) : size_(size) {
    const auto count = static_cast<size_t>(size);
    for (auto* values : {&parameter_, &gradient_, &first_state_, &second_state_}) {
      *values = std::make_unique<float[]>(count);
    }
    half_gradient_ = std::make_unique<uint16_t[]>(count);
    compute_copy_ = std::make_unique<uint16_t[]>(count);
    for (size_t at = 0; at < count; ++at) {
      gradient_[at] = static_cast<float>(at % 1000) * 1e-3f + 1e-3f;
      half_gradient_[at] = static_cast<uint16_t>(0x3f00 + at % 128);
      parameter_[at] = 1.0f;
      second_state_[at] = 1.0f;
    }
  }

  // fp32 throughout, or the mixed step: gradient in bf16, a bf16 copy of the parameter out.
  template <class StepArrays>
  StepArrays Views(bool is_mixed) const {
    StepArrays arrays;
    arrays.parameter = parameter_.get();
    arrays.gradient = gradient_.get();
    if (is_mixed) {
      arrays.gradient = half_gradient_.get();
      arrays.gradient_type = GradientType::kBfloat16;
      arrays.compute_copy = compute_copy_.get();
      arrays.copy_type = CopyType::kBfloat16;
    }
    arrays.num_elements = size_;
    return arrays;
  }

  // Reads num_bytes / 2 and writes as many, by memcpy from array to array.
  void Copy(int64_t num_bytes, int num_threads) const {
    const int64_t array_bytes = size_ * static_cast<int64_t>(sizeof(float));
    const std::pair<float*, const float*> pairs[] = {{parameter_.get(), gradient_.get()},
                                                     {second_state_.get(), first_state_.get()}};
    int64_t left = num_bytes / 2;
    for (size_t pair = 0; left > 0; pair = 1 - pair) {
      auto* to = reinterpret_cast<std::byte*>(pairs[pair].first);
      const auto* from = reinterpret_cast<const std::byte*>(pairs[pair].second);
      OnThreads(num_threads, std::min(left, array_bytes), [&](int64_t begin, int64_t end) {
        std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin));
      });
      left -= array_bytes;
    }
  }

  float* first_state() const { return first_state_.get(); }
  float* second_state() const { return second_state_.get(); }
  int64_t size() const { return size_; }

 private:
  const int64_t size_;
  std::unique_ptr<float[]> parameter_, gradient_, first_state_, second_state_;
  std::unique_ptr<uint16_t[]> half_gradient_, compute_copy_;
};

struct Kernel {
  std::string name;
  int64_t bytes_per_parameter;
  std::function<void(const Arrays&, int64_t begin, int64_t end, Isa isa)> step;
};

Kernel AdamWKernel(bool is_mixed) {
  const std::string name = is_mixed ? "AdamW, gradient and copy in bf16" : "AdamW";
  return {name, 28, [is_mixed](const Arrays& all, int64_t begin, int64_t end, Isa isa) {
            auto arrays = all.Views<AdamArrays>(is_mixed);
            arrays.exp_avg = all.first_state();
            arrays.exp_avg_sq = all.second_state();
            const AdamOptions options = {.weight_decay = 0.01, .is_decoupled = true, .step = 10};
            AdamStep(options, arrays, begin, end, isa);
          }};
}

Kernel SgdKernel() {
  return {"SGD with momentum", 20, [](const Arrays& all, int64_t begin, int64_t end, Isa isa) {
            auto arrays = all.Views<SgdArrays>(false);
            arrays.momentum_buffer = all.first_state();
            SgdStep({.momentum = 0.9}, arrays, begin, end, isa);
          }};
}

Kernel AdagradKernel() {
  return {"Adagrad", 20, [](const Arrays& all, int64_t begin, int64_t end, Isa isa) {
            auto arrays = all.Views<AdagradArrays>(false);
            arrays.state_sum = all.second_state();
            AdagradStep({.step = 10}, arrays, begin, end, isa);
          }};
}

struct Series {
  std::vector<double> values;

  void AddTimed(double num_bytes, const std::function<void()>& work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    values.push_back(num_bytes / seconds.count());
  }
  double Median() const {
    std::vector<double> sorted = values;
    std::sort(sorted.begin(), sorted.end());
    return sorted[sorted.size() / 2];
  }
  void Print(const char* name) const {
    const auto [min, max] = std::minmax_element(values.begin(), values.end());
    std::printf("    %-8s %8.2f %8.2f %8.2f  GB/s", name, *min / kGiga, Median() / kGiga,
                *max / kGiga);
  }
};

void Measure(const Kernel& kernel, const Arrays& arrays, int num_threads, int num_rounds) {
  const std::vector<Isa>& isas = AvailableIsas();
  std::vector<Series> of_isas(isas.size());
  Series copy;
  const int64_t num_bytes = kernel.bytes_per_parameter * arrays.size();
  for (int round = 0; round <= num_rounds; ++round) {
    if (round == 1) {  // the first one is a warm-up
      copy.values.clear();
      for (Series& series : of_isas) series.values.clear();
    }
    copy.AddTimed(static_cast<double>(num_bytes), [&] { arrays.Copy(num_bytes, num_threads); });
    for (size_t index = 0; index < isas.size(); ++index) {
      of_isas[index].AddTimed(static_cast<double>(num_bytes), [&] {
        OnThreads(num_threads, arrays.size(), [&](int64_t begin, int64_t end) {
          kernel.step(arrays, begin, end, isas[index]);
        });
      });
    }
  }
  std::printf("  %s, %d threads: min, median, max; ratio of medians to memcpy's\n",
              kernel.name.c_str(), num_threads);
  copy.Print("memcpy");
  std::printf("\n");
  for (size_t index = 0; index < isas.size(); ++index) {
    of_isas[index].Print(std::string(IsaName(isas[index])).c_str());
    std::printf("  %.2f\n", of_isas[index].Median() / copy.Median());
  }
}

void Run(int64_t num_parameters, int num_rounds, const std::vector<int>& thread_counts) {
  utsname system{};
  uname(&system);
  std::printf(
      "optimizer kernels: %u processors, Linux %s, %lld Mi parameters, %d rounds, %s by "
      "default (goal 0.90, avx2 0.85)\n",
      std::thread::hardware_concurrency(), system.release,
      static_cast<long long>(num_parameters >> 20), num_rounds,
      std::string(IsaName(SelectedIsa())).c_str());
  const Arrays arrays(num_parameters);
  for (const int num_threads : thread_counts) {
    for (const Kernel& kernel :
         {AdamWKernel(false), AdamWKernel(true), SgdKernel(), AdagradKernel()}) {
      Measure(kernel, arrays, num_threads, num_rounds);
    }
  }
}

}  // namespace
}  // namespace patrickstar::benchmarks

int main(int argc, char** argv) {
  const int64_t num_mi = argc > 1 ? std::atoll(argv[1]) : 64;
  const int num_rounds = argc > 2 ? std::atoi(argv[2]) : 7;
  std::vector<int> thread_counts;
  for (int at = 3; at < argc; ++at) thread_counts.push_back(std::atoi(argv[at]));
  if (thread_counts.empty()) thread_counts = {1, 2};
  try {
    patrickstar::benchmarks::Run(num_mi << 20, num_rounds, thread_counts);
  } catch (const patrickstar::Error& error) {
    std::fprintf(stderr, "bench_optimizer_kernels: %s\n", error.what());
    return 1;
  }
  return 0;
}
