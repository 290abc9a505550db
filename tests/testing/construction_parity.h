#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hsdp/hsdp.h"
#include "tests/testing/construction.h"
#include "tests/testing/multi_process.h"
#include "tests/testing/parity.h"

/// Modules constructed plainly beside the same ones constructed in meta_init, sharded and materialized.
namespace testing_support {

/// A module that a function constructs: it registers what it likes, leaves in `kept` what nobody registers, and in
/// `run` what forward does.
struct MadeImpl : Listed {
  explicit MadeImpl(const std::function<void(MadeImpl&)>& construct) { construct(*this); }
  torch::Tensor forward(torch::Tensor x) { return run(std::move(x)); }
  std::vector<torch::Tensor> members() const override { return kept; }
  /// register_module that returns the holder it was given.
  template <class Holder>
  Holder add(std::string name, Holder holder) {
    register_module(std::move(name), holder);
    return holder;
  }
  std::vector<torch::Tensor> kept;
  std::function<torch::Tensor(torch::Tensor)> run;
};
TORCH_MODULE(Made);

/// Expects `ours`, whole, to be `plain` bit for bit.
inline void expect_same_tensor(const std::string& name, const torch::Tensor& ours, const torch::Tensor& plain) {
  SCOPED_TRACE(name);
  ASSERT_EQ(ours.defined(), plain.defined());
  if (!plain.defined()) return;
  ASSERT_EQ(ours.dtype(), plain.dtype());
  ASSERT_EQ(ours.sizes(), plain.sizes());
  EXPECT_EQ(ours.device(), plain.device());
  EXPECT_EQ(ours.requires_grad(), plain.requires_grad());
  const auto whole = dtensor::DTensor::is_dtensor(ours) ? hsdp::unsharded(ours) : ours.detach();
  EXPECT_TRUE(torch::equal(whole, plain.detach())) << whole << "\n" << plain;
}

/// Expects parameters, buffers and unregistered members of what `make` makes to be the same bit for bit, constructed
/// plainly (by `make_plain`, where that differs) and in meta_init, and the default generator to go on alike.
template <class Net>
void expect_constructed_alike(RankContext& context, const std::function<Net()>& make,
                              const hsdp::UnitSelector& units = {}, const std::function<Net()>& make_plain = {}) {
  torch::manual_seed(7);
  Net plain = make_plain ? make_plain() : make();
  const auto next = torch::rand({3});
  torch::manual_seed(7);
  auto net = hsdp::meta_init(make);
  auto model = hsdp::fully_shard(net, {.mesh = context.environment().mesh(), .units = units});
  model.materialize(context.environment().device());
  EXPECT_EQ(torch::equal(torch::rand({3}), next), context.rank() == 0)
      << "the generator of rank 0 goes on as after plain construction, the others do not";
  const auto compare = [](const std::string& kind, const auto& ours, const auto& theirs) {
    ASSERT_EQ(ours.size(), theirs.size()) << kind;
    for (size_t i = 0; i < ours.size(); ++i) {
      ASSERT_EQ(ours[i].key(), theirs[i].key()) << kind;
      expect_same_tensor(kind + ours[i].key(), ours[i].value(), theirs[i].value());
    }
  };
  compare("parameter ", net->named_parameters(), plain->named_parameters());
  compare("buffer ", net->named_buffers(), plain->named_buffers());
  const auto ours = net->members(), theirs = plain->members();
  ASSERT_EQ(ours.size(), theirs.size());
  for (size_t i = 0; i < ours.size(); ++i) expect_same_tensor("member " + std::to_string(i), ours[i], theirs[i]);
}

/// Rows [begin, end) of the input of a step: 12 rows of 6 numbers.
inline torch::Tensor rows_of_step(int64_t step, int64_t begin, int64_t end) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(1000 + step));
  return torch::randn({12, 6}, generator).narrow(0, begin, end - begin);
}

/// The same, as numbers of tokens below `count`.
inline torch::Tensor tokens_of(const torch::Tensor& x, int64_t count) {
  return (x * 5).abs().to(torch::kLong).clamp(0, count - 1);
}

/// A case that trains what `make` makes on rows_of_step with AdamW. `forward` takes and returns one tensor.
template <class Net>
ParityCase<Net> training_case(std::function<Net()> make) {
  ParityCase<Net> c;
  c.make = std::move(make);
  c.steps = 3;
  c.loss = [](typename Net::ContainedType& net, int64_t step, int64_t begin, int64_t end) {
    return (net.forward(rows_of_step(step, begin, end)) - 0.3).pow(2).mean();
  };
  // The eps covers gradients that are zero in exact arithmetic, which Adam would blow up to full steps.
  c.optimizer = [](std::vector<torch::Tensor> parameters) -> std::unique_ptr<torch::optim::Optimizer> {
    return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(0.01).eps(1e-3));
  };
  return c;
}

}  // namespace testing_support
