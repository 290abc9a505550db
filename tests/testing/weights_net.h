#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>

#include "hsdp/hsdp.h"
#include "tests/testing/multi_process.h"
#include "tests/testing/parity.h"

/// What the tests of whole weights share: a net with all that a file of weights has to hold, and its values.
namespace testing_support {

struct WeightsBodyImpl : torch::nn::Module {
  WeightsBodyImpl()
      : linear(register_module("linear", torch::nn::Linear(5, 7))),
        norm(register_module("norm", torch::nn::BatchNorm1d(7))) {}
  torch::Tensor forward(torch::Tensor x) { return norm(linear(x)); }
  torch::nn::Linear linear{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(WeightsBody);

/// Nested modules, a tied parameter, buffers of two dtypes, and two tensors that nobody registered, one of them random.
struct WeightsNetImpl : torch::nn::Module {
  WeightsNetImpl()
      : embedding(register_module("embedding", torch::nn::Embedding(11, 5))),
        body(register_module("body", WeightsBody())),
        out(register_module("out", torch::nn::Linear(7, 5))) {
    head = register_parameter("head", embedding->weight);
    ramp = torch::arange(5) / 10.0;
    noise = torch::randn({5});
  }
  torch::Tensor forward(torch::Tensor tokens) {
    auto x = out(torch::tanh(body(embedding(tokens)))) + ramp + noise;
    return x.matmul(head.t());
  }
  torch::nn::Embedding embedding{nullptr};
  WeightsBody body{nullptr};
  torch::nn::Linear out{nullptr};
  torch::Tensor head, ramp, noise;
};
TORCH_MODULE(WeightsNet);

using Net = WeightsNet;
using Model = hsdp::FullySharded<WeightsNetImpl>;

inline Net plain_net(uint64_t seed) {
  torch::manual_seed(seed);
  return Net();
}

inline Model sharded_net(RankContext& context, uint64_t seed) {
  torch::manual_seed(seed);
  auto net = hsdp::meta_init([] { return Net(); });
  return hsdp::fully_shard(net, {.mesh = context.environment().mesh(), .units = hsdp::each<WeightsBody>()});
}

inline torch::Tensor tokens() { return torch::arange(12) % 11; }

/// Values that no construction gives; tied ones stay tied.
inline void fill(torch::nn::Module& module, double start) {
  torch::NoGradGuard no_grad;
  for (auto& entry : module.named_parameters()) {
    const auto count = entry.value().numel();
    entry.value().copy_((torch::arange(count) + start).view(entry.value().sizes()) / 50);
  }
  for (auto& entry : module.named_buffers()) entry.value().fill_(start);
}

inline torch::Tensor whole_of(const torch::Tensor& tensor) {
  return dtensor::DTensor::is_dtensor(tensor) ? hsdp::unsharded(tensor) : tensor;
}

inline void expect_values(const Model& model, torch::nn::Module& expected) {
  const auto parameters = expected.named_parameters();
  for (auto& entry : model.module().named_parameters()) {
    const auto& wanted = parameters[entry.key()];
    EXPECT_TRUE(torch::equal(whole_of(entry.value()), wanted.to(entry.value().scalar_type()))) << entry.key();
  }
  const auto buffers = expected.named_buffers();
  for (auto& entry : model.module().named_buffers()) {
    EXPECT_TRUE(torch::equal(entry.value(), buffers[entry.key()].to(entry.value().scalar_type()))) << entry.key();
  }
}

/// One step of both on the whole batch gives the same values.
inline void expect_trains_alike(const Model& model, Net& plain) {
  torch::optim::SGD ours(model->parameters(), 0.1), theirs(plain->parameters(), 0.1);
  model->zero_grad();
  auto loss = model->forward(tokens()).pow(2).mean();
  loss.backward();
  ours.step();
  plain->zero_grad();
  auto expected = plain->forward(tokens()).pow(2).mean();
  expected.backward();
  theirs.step();
  EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-12 * std::abs(expected.item<double>()));
  const auto parameters = plain->named_parameters();
  for (auto& entry : model.module().named_parameters()) {
    EXPECT_LE(largest_difference(hsdp::unsharded(entry.value()), parameters[entry.key()]), 1e-12) << entry.key();
  }
  EXPECT_TRUE(model.module().head.is_same(model.module().embedding->weight));
}

/// As Net, with one name and one shape changed.
struct WeightsOtherImpl : torch::nn::Module {
  WeightsOtherImpl()
      : embedding(register_module("embedding", torch::nn::Embedding(11, 5))),
        body(register_module("body", WeightsBody())),
        out(register_module("output", torch::nn::Linear(7, 5))) {
    body->linear->register_parameter("extra", torch::zeros({2}));
    body->norm = torch::nn::BatchNorm1d(8);
    body->replace_module("norm", body->norm);
  }
  torch::nn::Embedding embedding{nullptr};
  WeightsBody body{nullptr};
  torch::nn::Linear out{nullptr};
};
TORCH_MODULE(WeightsOther);
using Other = WeightsOther;

inline constexpr auto kMisfit =
    " does not fit the module: missing \"out.weight\", \"out.bias\", unexpected \"body.linear.extra\", "
    "\"output.weight\", \"output.bias\", \"body.norm.weight\" of shape [8], expected [7], \"body.norm.bias\" of shape "
    "[8], expected [7], \"body.norm.running_mean\" of shape [8], expected [7], \"body.norm.running_var\" of shape [8], "
    "expected [7]; names and shapes must be those of the module";

/// Runs in float64; the parameter is the number of ranks.
class Weights : public ::testing::TestWithParam<int> {
 protected:
  static void on_ranks(const std::function<void(RankContext&)>& body) {
    run_ranks(GetParam(), [&](RankContext& context) {
      torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
      body(context);
    });
  }
};

}  // namespace testing_support
