#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hsdp/hsdp.h"
#include "tests/testing/multi_process.h"
#include "tests/testing/parity.h"

/// What the tests of habits share: a small module whose loss is the test's choice, its inputs, and a fixture that
/// trains it sharded (parameter of the fixture: the ranks) beside the unsharded module.
namespace testing_support {

/// Rows [begin, end) of a batch that is a function of step and salt alone.
inline torch::Tensor rows_of(int64_t step, int64_t salt, torch::IntArrayRef sizes, int64_t begin, int64_t end) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(1000 * salt + step));
  return torch::randn(sizes, generator).narrow(0, begin, end - begin);
}

/// A batch of inputs and targets of 6 columns each.
struct Inputs {
  torch::Tensor x, y;
  Inputs(int64_t step, int64_t begin, int64_t end, int64_t salt = 0)
      : x(rows_of(step, 1 + 2 * salt, {12, 6}, begin, end)), y(rows_of(step, 2 + 2 * salt, {12, 6}, begin, end)) {}
};

/// Three linear layers; what forward does with them is the test's choice.
struct ThreeImpl : torch::nn::Module {
  ThreeImpl()
      : a(register_module("a", torch::nn::Linear(6, 7))),
        b(register_module("b", torch::nn::Linear(7, 7))),
        c(register_module("c", torch::nn::Linear(7, 6))) {
    bias = register_parameter("bias", torch::randn({6}));
  }
  torch::Tensor forward(torch::Tensor x) { return c(torch::tanh(b(torch::tanh(a(x))))) + bias; }
  torch::nn::Linear a{nullptr}, b{nullptr}, c{nullptr};
  torch::Tensor bias;
};
TORCH_MODULE(Three);

/// Trains under each setting of reshard_after_forward, by default with SGD with momentum for 4 steps, and a unit for each
/// linear layer.
class Habit : public ::testing::TestWithParam<int> {
 protected:
  template <class Net>
  void train(ParityCase<Net> c) {
    if (c.options.units.rules().empty()) c.options.units = hsdp::each<torch::nn::Linear>();
    c.steps = 4;
    if (!c.optimizer) {
      c.optimizer = [](std::vector<torch::Tensor> parameters) -> std::unique_ptr<torch::optim::Optimizer> {
        return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.05).momentum(0.9));
      };
    }
    for (std::optional<bool> reshard : {std::optional<bool>(), std::optional<bool>(true), std::optional<bool>(false)}) {
      c.options.reshard_after_forward = reshard;
      run_ranks(GetParam(), [&](RankContext& context) {
        torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
        expect_parity(context, c);
      });
    }
  }
  static ParityCase<Three> three() {
    ParityCase<Three> c;
    c.make = [] { return Three(); };
    return c;
  }
};

}  // namespace testing_support
