// An exception anywhere in a step, on all ranks, costs that step and nothing else.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <stdexcept>
#include <string>

#include "dtensor/device_mesh.h"
#include "hsdp/hsdp.h"
#include "hsdp/transport.h"
#include "tests/testing/multi_process.h"

namespace recovery_test {

using namespace testing_support;

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Where the next step breaks: at the n-th event of a kind, counted from 0; -1 is nowhere.
struct Plan {
  std::string kind;
  int64_t left = -1;
  bool broke = false;
  void pass(const std::string& event) {
    if (event != kind || left < 0 || left-- > 0) return;
    broke = true;
    throw Fault("planted at " + kind);
  }
};

class FaultyWork : public dtensor::Work {
 public:
  FaultyWork(std::shared_ptr<dtensor::Work> work, std::shared_ptr<Plan> plan, std::string event)
      : work_(std::move(work)), plan_(std::move(plan)), event_(std::move(event)) {}
  void wait() override {
    work_->wait();
    plan_->pass(event_);
  }
  bool is_completed() override { return work_->is_completed(); }

 private:
  std::shared_ptr<dtensor::Work> work_;
  std::shared_ptr<Plan> plan_;
  std::string event_;
};

class FaultyTransport : public hsdp::Transport {
 public:
  FaultyTransport(std::shared_ptr<hsdp::Transport> inner, std::shared_ptr<Plan> plan)
      : inner_(std::move(inner)), plan_(std::move(plan)) {}
  std::shared_ptr<dtensor::Work> all_gather(c10::ArrayRef<hsdp::TensorPair> pairs,
                                            dtensor::OperationName name) override {
    plan_->pass("gather start");
    return std::make_shared<FaultyWork>(inner_->all_gather(pairs, name), plan_, "gather wait");
  }
  std::shared_ptr<dtensor::Work> reduce_scatter(c10::ArrayRef<hsdp::TensorPair> pairs,
                                                dtensor::OperationName name) override {
    plan_->pass("reduce start");
    return std::make_shared<FaultyWork>(inner_->reduce_scatter(pairs, name), plan_, "reduce wait");
  }
  dtensor::Communicator& communicator() const override { return inner_->communicator(); }

 private:
  std::shared_ptr<hsdp::Transport> inner_;
  std::shared_ptr<Plan> plan_;
};

struct ChainImpl : torch::nn::Module {
  explicit ChainImpl(std::shared_ptr<Plan> faults) : plan(std::move(faults)) {
    for (int64_t i = 0; i < 3; ++i) layers->push_back(torch::nn::Linear(5, 5));
    register_module("layers", layers);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : *layers) {
      x = torch::tanh(layer->as<torch::nn::Linear>()->forward(x));
      plan->pass("forward");
      if (x.requires_grad()) x.register_hook([plan = plan](const torch::Tensor&) { plan->pass("backward"); });
    }
    return x;
  }
  torch::nn::ModuleList layers;
  std::shared_ptr<Plan> plan;
};
TORCH_MODULE(Chain);

struct Mode {
  std::string name;
  std::vector<int64_t> mesh;
  std::optional<hsdp::ReshardAfterForward> reshard = std::nullopt;
  int micro_batches = 1;
};

class Recovery : public ::testing::TestWithParam<std::tuple<Mode, std::string>> {};

TEST_P(Recovery, GivesTheBitsOfARunThatNeverBroke) {
  const auto& [mode, kind] = GetParam();
  int64_t ranks = 1;
  for (auto size : mode.mesh) ranks *= size;
  run_ranks(static_cast<int>(ranks), [&, mode = mode, kind = kind](RankContext& context) {
    auto mesh = context.environment().make_mesh(mode.mesh, {"replicate", "shard"});
    const auto train = [&](int64_t at) {
      auto plan = std::make_shared<Plan>();
      plan->kind = kind;
      torch::manual_seed(3);
      auto net = hsdp::meta_init([&] { return Chain(plan); });
      auto model = hsdp::fully_shard(
          net, {.mesh = mesh,
                .units = hsdp::each("layers.*"),
                .reshard_after_forward = mode.reshard,
                .transport = [&](std::shared_ptr<dtensor::Communicator> group) -> std::shared_ptr<hsdp::Transport> {
                  return std::make_shared<FaultyTransport>(hsdp::make_transport(std::move(group)), plan);
                }});
      model.materialize(at::kCPU);
      model.set_all_reduce_hook([plan](const torch::Tensor&) { plan->pass("reduced"); });
      torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      const auto step = [&](int64_t number) {
        optimizer.zero_grad();
        for (int micro = 0; micro < mode.micro_batches; ++micro) {
          model.set_requires_gradient_sync(micro + 1 == mode.micro_batches);
          auto x =
              torch::sin(torch::arange(20).to(torch::kFloat) + static_cast<double>(number + micro + context.rank()));
          model->forward(x.view({4, 5}).set_requires_grad(true)).pow(2).sum().backward();
        }
        optimizer.step();
      };
      step(0);
      plan->left = at;
      bool thrown = false;
      try {
        step(1);
      } catch (const std::exception&) {
        thrown = true;
      }
      const bool broke = plan->broke;
      EXPECT_EQ(thrown, broke);
      plan->left = -1;
      if (thrown) {
        model.reset_iteration_state();
        for (auto& unit : model.core()->units()) EXPECT_FALSE(unit->is_gathered() || unit->is_gathering());
        step(1);
      }
      step(2);
      std::vector<torch::Tensor> values;
      for (auto& parameter : net->parameters()) values.push_back(hsdp::unsharded(parameter));
      return std::make_pair(values, broke);
    };
    const auto expected = train(-1).first;
    int64_t places = 0;
    for (;; ++places) {
      const auto [values, broke] = train(places);
      if (!broke) break;
      for (size_t i = 0; i < values.size(); ++i) {
        ASSERT_TRUE(torch::equal(values[i], expected[i])) << "parameter " << i << " after " << kind << " " << places;
      }
    }
    const bool happens = mode.mesh[1] > 1 || kind == "forward" || kind == "backward" || kind == "reduced";
    EXPECT_EQ(places > 0, happens) << "places of " << kind << ": " << places;
  });
}

INSTANTIATE_TEST_SUITE_P(Everywhere, Recovery,
                         ::testing::Combine(::testing::Values(Mode{"Sharded", {1, 2}}, Mode{"Kept", {1, 2}, false},
                                                              Mode{"Accumulated", {1, 2}, true, 2},
                                                              Mode{"Group", {1, 4}, 2}, Mode{"Hybrid", {2, 2}},
                                                              Mode{"DataParallel", {2, 1}}),
                                            ::testing::Values("forward", "backward", "gather start", "gather wait",
                                                              "reduce start", "reduce wait", "reduced")),
                         [](const auto& which) {
                           auto name = std::get<0>(which.param).name + "_" + std::get<1>(which.param);
                           std::replace(name.begin(), name.end(), ' ', '_');
                           return name;
                         });

}  // namespace recovery_test
