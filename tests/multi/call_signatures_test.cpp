// What `model->method(...)` and `model(...)` pass and return: several arguments, references, optionals, tuples,
// structs, default arguments, braced lists, move-only values, templates, and stock containers as the model.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "hsdp/hsdp.h"
#include "tests/testing/multi_process.h"

namespace call_signatures_test {

using namespace testing_support;

struct Output {
  torch::Tensor logits;
  std::optional<torch::Tensor> loss;
};

struct State {
  torch::Tensor hidden;
  int64_t steps = 0;
};

struct ManyImpl : torch::nn::Module {
  ManyImpl()
      : in(register_module("in", torch::nn::Linear(4, 5))), out(register_module("out", torch::nn::Linear(5, 3))) {}
  Output forward(const torch::Tensor& x, const std::optional<torch::Tensor>& target = std::nullopt, double scale = 1) {
    auto logits = out(torch::tanh(in(x))) * scale;
    return {logits, target ? std::optional(torch::mse_loss(logits, *target)) : std::nullopt};
  }
  std::tuple<torch::Tensor, torch::Tensor> encode(std::tuple<torch::Tensor, torch::Tensor> pair) {
    return {in(std::get<0>(pair)), in(std::get<1>(pair))};
  }
  torch::Tensor joined(const std::vector<torch::Tensor>& parts, torch::IntArrayRef order = {0, 1}) {
    std::vector<torch::Tensor> picked;
    for (auto i : order) picked.push_back(in(parts[static_cast<size_t>(i)]));
    return torch::cat(picked);
  }
  void advance(State& state) {
    state.hidden = torch::tanh(in(state.hidden.narrow(1, 0, 4)));
    ++state.steps;
  }
  std::unique_ptr<Output> boxed(std::unique_ptr<State> state) {
    return std::make_unique<Output>(Output{in(state->hidden), std::nullopt});
  }
  template <class F>
  auto mapped(F&& function) {
    return function(in->weight);
  }
  torch::nn::Linear& first() { return in; }
  std::string greeting() const { return "many"; }
  torch::nn::Linear in{nullptr}, out{nullptr};
};
TORCH_MODULE(Many);

TEST(Calls, PassAndReturnWhatTheMethodDoes) {
  for (const int ranks : {1, 3}) {
    run_ranks(ranks, [](RankContext& context) {
      torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
      torch::manual_seed(3);
      Many plain;
      torch::manual_seed(3);
      auto net = hsdp::meta_init([] { return Many(); });
      auto model =
          hsdp::fully_shard(net, {.mesh = context.environment().mesh(), .units = hsdp::each<torch::nn::Linear>()});
      model.materialize(context.environment().device());
      const auto x = torch::ones({2, 4}), y = torch::zeros({2, 3});

      EXPECT_TRUE(torch::equal(model->forward(x).logits, plain->forward(x).logits));
      EXPECT_FALSE(model(x).loss.has_value());
      EXPECT_TRUE(torch::equal(*model(x, y, 0.5).loss, *plain->forward(x, y, 0.5).loss));
      EXPECT_TRUE(torch::equal(*model->forward(x, y).loss, *plain->forward(x, y).loss));
      const auto [a, b] = model->encode({x, x * 2});
      EXPECT_TRUE(torch::equal(a, std::get<0>(plain->encode({x, x * 2}))));
      EXPECT_TRUE(torch::equal(b, plain->in(x * 2)));
      EXPECT_TRUE(torch::equal(model->joined({x, x * 3}), plain->joined({x, x * 3})));
      EXPECT_TRUE(torch::equal(model->joined({x, x * 3}, {1, 0}), plain->joined({x, x * 3}, {1, 0})));
      State ours{x}, theirs{x};
      for (int i = 0; i < 2; ++i) {
        model->advance(ours);
        plain->advance(theirs);
      }
      EXPECT_EQ(ours.steps, 2);
      EXPECT_TRUE(torch::equal(ours.hidden, theirs.hidden));
      auto state = std::make_unique<State>(State{x});
      EXPECT_TRUE(torch::equal(model->boxed(std::move(state))->logits, plain->in(x)));
      EXPECT_EQ(model->mapped([](const torch::Tensor& w) { return w.sum().item<double>(); }),
                plain->in->weight.sum().item<double>());
      EXPECT_EQ(&model->first(), &net->in);
      EXPECT_EQ(model->greeting(), "many");
      // Gradients of what came back in a struct, in a tuple and through a reference.
      (*model(x, y, 0.5).loss + std::get<1>(model->encode({x, x * 2})).pow(2).sum() + ours.hidden.sum()).backward();
      (*plain->forward(x, y, 0.5).loss + std::get<1>(plain->encode({x, x * 2})).pow(2).sum() + theirs.hidden.sum())
          .backward();
      for (auto& parameter : model->named_parameters()) {
        EXPECT_TRUE(torch::allclose(hsdp::unsharded(parameter.value().grad()),
                                    plain->named_parameters()[parameter.key()].grad(), 1e-11, 1e-12))
            << parameter.key();
      }
      const auto constant = model;
      EXPECT_TRUE(torch::equal(constant->forward(x).logits, plain->forward(x).logits));
    });
  }
}

TEST(Calls, OfStockContainers) {
  for (const int ranks : {1, 3}) {
    run_ranks(ranks, [](RankContext& context) {
      const auto make = [] {
        return torch::nn::Sequential(torch::nn::Linear(4, 5), torch::nn::Functional(torch::tanh),
                                     torch::nn::LayerNorm(torch::nn::LayerNormOptions({5})), torch::nn::Linear(5, 3));
      };
      torch::manual_seed(3);
      auto plain = make();
      torch::manual_seed(3);
      auto net = hsdp::meta_init(make);
      auto model =
          hsdp::fully_shard(net, {.mesh = context.environment().mesh(), .units = hsdp::each<torch::nn::Linear>()});
      model.materialize(context.environment().device());
      const auto x = torch::ones({2, 4});
      EXPECT_TRUE(torch::equal(model->forward(x), plain->forward(x)));
      model->forward(x).sum().backward();
      plain->forward(x).sum().backward();
      for (auto& parameter : model->named_parameters()) {
        EXPECT_TRUE(torch::allclose(hsdp::unsharded(parameter.value().grad()),
                                    plain->named_parameters()[parameter.key()].grad()))
            << parameter.key();
      }
    });
  }
}

}  // namespace call_signatures_test
