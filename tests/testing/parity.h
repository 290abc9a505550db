#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hsdp/hsdp.h"
#include "tests/testing/multi_process.h"

/// Training a sharded module, on the environment's device, beside the same module unsharded on the host, on the
/// concatenated batch, in one process a rank.
namespace testing_support {

/// Calls a function inside a forward scope of the model that is being trained (or plainly, for the reference).
using InForward = std::function<torch::Tensor(const std::function<torch::Tensor()>&)>;

/// What is trained, on what, and how closely the two must agree.
template <class Net>
struct ParityCase {
  std::function<Net()> make;
  /// Loss of rows [begin, end) of the batch of this step, a mean over rows.
  std::function<torch::Tensor(typename Net::ContainedType&, int64_t step, int64_t begin, int64_t end)> loss;
  /// Instead of `loss` and one backward: runs forwards and backwards as it likes and returns what `loss` would have.
  std::function<torch::Tensor(typename Net::ContainedType&, const InForward&, int64_t step, int64_t begin, int64_t end)>
      forward_backward;
  int64_t rows = 12;  // divides by 1, 2, 3, 4
  bool whole_batch_everywhere = false;
  hsdp::FullyShardOptions options = {};
  std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<torch::Tensor>)> optimizer;
  int64_t steps = 10;
  double loss_tolerance = 1e-11, parameter_tolerance = 1e-11;  // relative to the largest entry
  double max_norm = std::numeric_limits<double>::infinity();
};

inline double largest_difference(const torch::Tensor& a, const torch::Tensor& b) {
  if (a.numel() == 0) return 0;
  const double scale = std::max(b.abs().max().item<double>(), std::numeric_limits<double>::min());
  return (a - b).abs().max().item<double>() / scale;
}

inline double mean_over_ranks(double value, hsdp::Environment& environment) {
  auto sum = torch::full({1}, value, torch::TensorOptions(environment.device()).dtype(torch::kFloat64));
  environment.communicator()->all_reduce(sum, dtensor::ReduceOp::sum, {"all_reduce", "test loss"})->wait();
  return sum.item<double>() / static_cast<double>(environment.world_size());
}

/// Expects equal initial values bit for bit, and losses and gathered parameters within the tolerances after each step.
template <class Net>
void expect_parity(RankContext& context, const ParityCase<Net>& c) {
  auto& environment = context.environment();
  torch::manual_seed(7);
  Net reference = c.make();
  torch::manual_seed(7);
  auto net = hsdp::meta_init(c.make);
  auto options = c.options;
  if (!options.mesh) options.mesh = environment.mesh();
  auto model = hsdp::fully_shard(net, options);
  model.materialize(environment.device());
  const auto expected = reference->named_parameters();
  for (auto& parameter : model->named_parameters()) {
    ASSERT_TRUE(torch::equal(hsdp::unsharded(parameter.value()).cpu(), expected[parameter.key()])) << parameter.key();
  }
  const auto expected_buffers = reference->named_buffers();
  for (auto& buffer : model->named_buffers()) {
    ASSERT_TRUE(torch::equal(buffer.value().cpu(), expected_buffers[buffer.key()])) << buffer.key();
  }
  auto ours = c.optimizer(model->parameters());
  auto theirs = c.optimizer(reference->parameters());
  const int64_t share = c.rows / environment.world_size();
  auto forward_backward = c.forward_backward;
  if (!forward_backward) {
    forward_backward = [&](typename Net::ContainedType& module, const InForward& forward, int64_t step, int64_t begin,
                           int64_t end) {
      auto loss = forward([&] { return c.loss(module, step, begin, end); });
      loss.backward();
      return loss.detach();
    };
  }
  const InForward plainly = [](const std::function<torch::Tensor()>& call) { return call(); };
  const InForward in_scope = [&](const std::function<torch::Tensor()>& call) {
    hsdp::ForwardScope scope(model.core());
    return call();
  };
  for (int64_t step = 0; step < c.steps; ++step) {
    theirs->zero_grad();
    const auto expected_loss = forward_backward(*reference, plainly, step, 0, c.rows);
    ours->zero_grad();
    const int64_t begin = c.whole_batch_everywhere ? 0 : environment.rank() * share;
    const int64_t end = c.whole_batch_everywhere ? c.rows : begin + share;
    const auto loss = forward_backward(model.module(), in_scope, step, begin, end);
    if (std::isfinite(c.max_norm)) {
      const double norm = hsdp::clip_grad_norm_(model->parameters(), c.max_norm);
      const double expected_norm = torch::nn::utils::clip_grad_norm_(reference->parameters(), c.max_norm);
      ASSERT_NEAR(norm, expected_norm, expected_norm * std::max(c.parameter_tolerance, 1e-6)) << "step " << step;
    }
    for (auto& parameter : model->named_parameters()) {
      ASSERT_EQ(parameter.value().grad().defined(), expected[parameter.key()].grad().defined())
          << "gradient of " << parameter.key() << " at step " << step;
    }
    const double mean = mean_over_ranks(loss.template item<double>(), environment);
    ASSERT_NEAR(mean, expected_loss.template item<double>(),
                c.loss_tolerance * std::abs(expected_loss.template item<double>()))
        << "loss at step " << step;
    ours->step();
    theirs->step();
    for (auto& parameter : model->named_parameters()) {
      const double difference = largest_difference(hsdp::unsharded(parameter.value()).cpu(), expected[parameter.key()]);
      ASSERT_LE(difference, c.parameter_tolerance) << parameter.key() << " after step " << step;
    }
    for (auto& buffer : model->named_buffers()) {
      const double difference = largest_difference(buffer.value().cpu().to(torch::kFloat64),
                                                   expected_buffers[buffer.key()].to(torch::kFloat64));
      ASSERT_LE(difference, c.parameter_tolerance) << "buffer " << buffer.key() << " after step " << step;
    }
  }
}

}  // namespace testing_support
