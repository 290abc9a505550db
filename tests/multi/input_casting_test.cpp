// Where a unit's parameters are gathered in another dtype, which other inputs of an operator take that dtype.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

#include "dtensor/error.h"
#include "hsdp/hsdp.h"
#include "tests/testing/expect.h"
#include "tests/testing/multi_process.h"

namespace input_casting_test {

using namespace testing_support;

struct OneWeightImpl : torch::nn::Module {
  OneWeightImpl() { weight = register_parameter("weight", torch::arange(12).to(torch::kFloat).view({4, 3}) / 7); }
  torch::Tensor forward(const std::function<torch::Tensor(torch::Tensor)>& use) { return use(weight); }
  torch::Tensor weight;
};
TORCH_MODULE(OneWeight);

void in_bf16(const std::function<void(hsdp::FullySharded<OneWeightImpl>&)>& body) {
  run_ranks(2, [&](RankContext& context) {
    auto net = hsdp::meta_init([] { return OneWeight(); });
    auto model =
        hsdp::fully_shard(net, {.mesh = context.environment().mesh(),
                                .mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}});
    model.materialize(at::kCPU);
    body(model);
  });
}

TEST(InputCasting, LeavesWhatIsAskedForItsDtypeOrShapeAlone) {
  in_bf16([](auto& model) {
    torch::NoGradGuard no_grad;
    const auto x = torch::ones({4, 3}) / 3;
    const auto rounded = (torch::arange(12).to(torch::kFloat).view({4, 3}) / 7).to(torch::kBFloat16).to(torch::kFloat);
    for (auto& cast : std::vector<std::function<torch::Tensor(torch::Tensor)>>{
             [&](torch::Tensor w) { return w.to(x); }, [&](torch::Tensor w) { return w.type_as(x); },
             [&](torch::Tensor w) { return w.to(torch::kFloat); }}) {
      const auto w = model->forward(cast);
      EXPECT_EQ(w.scalar_type(), torch::kFloat);
      EXPECT_TRUE(torch::equal(w, rounded));
      EXPECT_TRUE(torch::equal(model->forward([&](torch::Tensor p) { return x * cast(p); }), x * rounded));
    }
    model->forward([&](torch::Tensor w) {
      EXPECT_EQ(at::result_type(w, x), torch::kFloat);
      const auto flat = torch::zeros({12});
      auto view = flat.view_as(w);
      EXPECT_EQ(view.scalar_type(), torch::kFloat);
      view.add_(1);
      EXPECT_EQ(flat.sum().template item<float>(), 12) << "a view writes into what it is a view of";
      EXPECT_EQ(torch::zeros({1, 3}).expand_as(w).scalar_type(), torch::kFloat);
      return w;
    });
  });
}

TEST(InputCasting, TakesWhatIsComputedWithAndNotScalars) {
  in_bf16([](auto& model) {
    torch::NoGradGuard no_grad;
    const auto w = (torch::arange(12).to(torch::kFloat).view({4, 3}) / 7).to(torch::kBFloat16);
    const auto x = torch::ones({2, 3}) / 3;
    const auto y = model->forward([&](torch::Tensor p) { return torch::linear(x, p); });
    EXPECT_TRUE(torch::equal(y, torch::linear(x.to(torch::kBFloat16), w)));
    const auto scale = torch::full({}, 1.0009765625);  // is 1 in bf16
    EXPECT_TRUE(torch::equal(model->forward([&](torch::Tensor p) { return p * scale; }), w * scale));
  });
}

TEST(InputCasting, SumsGradientsThatAreExpandedOverMicroBatches) {
  in_bf16([](auto& model) {
    for (int micro = 0; micro < 3; ++micro) {
      model.set_requires_gradient_sync(micro == 2);
      auto loss = model->forward([](torch::Tensor w) { return w.sum(); });
      loss.backward();
    }
    EXPECT_TRUE(torch::equal(hsdp::unsharded(model.module().weight.grad()), torch::full({4, 3}, 3.f)));
  });
}

TEST(ReshardGroups, BelowOneAreRefused) {
  in_bf16([](auto& model) {
    for (int group : {0, -1, -2}) {
      expect_error<dtensor::ValueError>([&] { model.set_reshard_after_forward(group); },
                                        "[reshard_after_forward] group of", "expected a number that divides it");
    }
  });
}

TEST(Unsharding, ThatNobodyWaitsForEndsWithTheModel) {
  run_ranks(2, [](RankContext& context) {
    for (int i = 0; i < 20; ++i) {
      auto net = hsdp::meta_init([] { return torch::nn::Linear(64, 64); });
      auto model = hsdp::fully_shard(net, {.mesh = context.environment().mesh()});
      model.materialize(at::kCPU);
      model.unshard(/*async=*/true);
    }
  });
}

}  // namespace input_casting_test
