// How parameters lie (meshes, shard dims, groups, replicated and joint ones) never changes what is trained.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>

#include "dtensor/communicator.h"
#include "dtensor/dtensor.h"
#include "hsdp/hsdp.h"
#include "hsdp/replica_check.h"
#include "models/transformer.h"
#include "tests/testing/blocks.h"
#include "tests/testing/expect.h"
#include "tests/testing/modules.h"
#include "tests/testing/multi_process.h"
#include "tests/testing/parity.h"
#include "tests/testing/small_transformer.h"

namespace mesh_modes_test {

using namespace testing_support;
using dtensor::DTensor;

struct Mode {
  std::string name;
  std::vector<int64_t> mesh;
  std::function<void(hsdp::FullyShardOptions&)> set = [](hsdp::FullyShardOptions&) {};
};

std::optional<int64_t> largest_dim(const std::string&, const at::Tensor& parameter) {
  return std::max_element(parameter.sizes().begin(), parameter.sizes().end()) - parameter.sizes().begin();
}

std::vector<Mode> modes() {
  using Options = hsdp::FullyShardOptions;
  std::vector<Mode> all;
  for (auto& mesh : std::vector<std::vector<int64_t>>{{4}, {2, 2}, {4, 1}, {1, 4}, {3, 1}, {1, 1}, {2}}) {
    std::string name = "Mesh";
    for (auto size : mesh) name += "_" + std::to_string(size);
    all.push_back({name, mesh});
    all.push_back({name + "_LargestDim", mesh, [](Options& o) { o.shard_placement_fn = largest_dim; }});
    all.push_back({name + "_Replicated", mesh, [](Options& o) { o.replicated = {"**norm**", "**.q*.**"}; }});
  }
  all.push_back({"LastDim", {4}, [](Options& o) {
                   o.shard_placement_fn = [](const std::string&, const at::Tensor&) {
                     return std::optional<int64_t>(-1);
                   };
                 }});
  for (int group : {1, 2, 4}) {
    const auto number = std::to_string(group);
    all.push_back({"Group_" + number, {4}, [group](Options& o) { o.reshard_after_forward = group; }});
    all.push_back({"GroupLargestDim_" + number, {4}, [group](Options& o) {
                     o.reshard_after_forward = group;
                     o.shard_placement_fn = largest_dim;
                   }});
  }
  all.push_back({"HybridGroup_2", {2, 2}, [](Options& o) { o.reshard_after_forward = 2; }});
  all.push_back({"Together", {4}, [](Options& o) {
                   o.units =
                       hsdp::each("model.layers.*") | hsdp::together(hsdp::each("model.norm") | hsdp::each("lm_head"));
                 }});
  return all;
}

class Modes : public ::testing::TestWithParam<Mode> {};

TEST_P(Modes, TrainATransformerAsOneProcessDoes) {
  const auto mode = GetParam();
  int ranks = 1;
  for (auto size : mode.mesh) ranks *= static_cast<int>(size);
  ParityCase<models::Transformer> c;
  c.make = [] { return small_transformer(/*layers=*/3); };
  c.options.units = hsdp::each<models::TransformerBlock>();
  mode.set(c.options);
  c.max_norm = 1.0;
  c.steps = 4;
  c.optimizer = [](std::vector<torch::Tensor> parameters) -> std::unique_ptr<torch::optim::Optimizer> {
    return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(0.01).eps(1e-4));
  };
  c.loss = [](models::TransformerImpl& net, int64_t step, int64_t begin, int64_t end) {
    auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(step));
    auto ids = torch::randint(0, 17, {12, 9}, generator, torch::kLong).narrow(0, begin, end - begin);
    auto logits = net.forward(ids.narrow(1, 0, 8));
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1), ids.narrow(1, 1, 8).flatten());
  };
  run_ranks(ranks, [&](RankContext& context) {
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
    auto mine = c;
    mine.options.mesh = mesh_of(context, mode.mesh);
    expect_parity(context, mine);
  });
}

// Modes that name no part of the transformer.
std::vector<Mode> modes_of_any_module() {
  auto all = modes();
  std::erase_if(all, [](const Mode& mode) { return mode.name == "Together" || mode.name.ends_with("_Replicated"); });
  return all;
}

class ModesOfAnyModule : public ::testing::TestWithParam<Mode> {};

TEST_P(ModesOfAnyModule, TrainLayersOfFewerRowsThanRanks) {
  const auto mode = GetParam();
  int ranks = 1;
  for (auto size : mode.mesh) ranks *= static_cast<int>(size);
  ParityCase<OddMlp> c;
  c.make = [] { return OddMlp(); };
  c.options.units = hsdp::each<torch::nn::Linear>();
  mode.set(c.options);
  c.max_norm = 0.5;
  c.steps = 4;
  c.optimizer = [](std::vector<torch::Tensor> parameters) -> std::unique_ptr<torch::optim::Optimizer> {
    return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.05).momentum(0.9));
  };
  c.loss = [](OddMlpImpl& net, int64_t step, int64_t begin, int64_t end) {
    auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(step));
    const auto x = torch::randn({12, 5}, generator), y = torch::randn({12, 2}, generator);
    return torch::mse_loss(net.forward(x.narrow(0, begin, end - begin)), y.narrow(0, begin, end - begin));
  };
  run_ranks(ranks, [&](RankContext& context) {
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
    auto mine = c;
    mine.options.mesh = mesh_of(context, mode.mesh);
    expect_parity(context, mine);
  });
}

INSTANTIATE_TEST_SUITE_P(All, Modes, ::testing::ValuesIn(modes()), [](const auto& which) { return which.param.name; });
INSTANTIATE_TEST_SUITE_P(All, ModesOfAnyModule, ::testing::ValuesIn(modes_of_any_module()),
                         [](const auto& which) { return which.param.name; });

// ---- what a step costs ----

struct ChainImpl : torch::nn::Module {
  explicit ChainImpl(int64_t count) {
    for (int64_t i = 0; i < count; ++i) layers->push_back(torch::nn::Linear(8, 8));
    register_module("layers", layers);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : *layers) x = torch::tanh(layer->as<torch::nn::Linear>()->forward(x));
    return x;
  }
  torch::nn::ModuleList layers;
};
TORCH_MODULE(Chain);

TEST(DataParallel, CostsOneAllReduceAUnitAndNothingElse) {
  run_ranks(3, [](RankContext& context) {
    auto net = hsdp::meta_init([] { return Chain(4); });
    auto model = hsdp::fully_shard(net, {.mesh = mesh_of(context, {3, 1}), .units = hsdp::each("layers.*")});
    model.materialize(at::kCPU);
    for (int step = 0; step < 3; ++step) {
      if (step > 0) dtensor::reset_collective_counts();  // the first forward compares the replicas
      model->forward(torch::ones({2, 8})).sum().backward();
      if (step == 0) continue;
      const auto counts = dtensor::collective_counts();
      EXPECT_EQ(counts.all_gathers, 0);
      EXPECT_EQ(counts.reduce_scatters, 0);
      EXPECT_EQ(counts.all_reduces, 4);
      EXPECT_EQ(counts.all_reduce_bytes, 4 * (8 * 8 + 8) * 4);
      EXPECT_EQ(model.core()->scheduler()->peaks().bytes, 0) << "the parameters are there already";
    }
  });
}

TEST(Hybrid, ReduceScattersThenAllReducesWhatIsLeft) {
  run_ranks(4, [](RankContext& context) {
    auto net = hsdp::meta_init([] { return Chain(3); });
    auto model = hsdp::fully_shard(
        net, {.mesh = mesh_of(context, {2, 2}), .units = hsdp::each("layers.*"), .reshard_after_forward = true});
    model.materialize(at::kCPU);
    for (int step = 0; step < 2; ++step) {
      dtensor::reset_collective_counts();
      auto x = torch::ones({2, 8}).set_requires_grad(true);
      auto loss = model->forward(x).sum();
      loss.backward();
    }
    const auto counts = dtensor::collective_counts();
    EXPECT_EQ(counts.all_gathers, 6);
    EXPECT_EQ(counts.reduce_scatters, 3);
    EXPECT_EQ(counts.all_reduces, 3);
    EXPECT_EQ(counts.all_reduce_bytes, 3 * (8 * 8 + 8) * 4 / 2);
    const auto& weight = net->layers->ptr<torch::nn::LinearImpl>(0)->weight;
    EXPECT_EQ(dtensor::to_string(DTensor(weight).placements()), "(Replicate(), Shard(0))");
    EXPECT_EQ(DTensor(weight).to_local().sizes(), (std::vector<int64_t>{4, 8}));
    EXPECT_EQ(dtensor::to_string(DTensor(weight.grad()).placements()), "(Replicate(), Shard(0))");
  });
}

TEST(Replicas, ThatStartUnlikeAreRefusedUntilTheyAreMadeEqual) {
  run_ranks(4, [](RankContext& context) {
    auto net = hsdp::meta_init([] { return Chain(2); });
    auto model = hsdp::fully_shard(net, {.mesh = mesh_of(context, {2, 2})});
    model.to_empty(at::kCPU);
    {
      torch::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) DTensor(parameter).to_local().fill_(context.rank() / 2 + 1);
      for (auto& parameter : net->parameters()) parameter.mul_(1);
    }
    expect_error<dtensor::StateError>(
        [&] {
          model->forward(torch::ones({1, 8}));
        },
        "[forward] parameter \"layers.0.weight\" differs between rank", "hsdp::broadcast_replicas(model)");
    hsdp::broadcast_replicas(model);
    const auto y = model->forward(torch::zeros({1, 8}));
    EXPECT_NEAR(y[0][0].item<double>(), std::tanh(8 * std::tanh(1.0) + 1), 1e-6);
  });
}

TEST(Hybrid, TrainsOverGroupsThatTheProgramMade) {
  run_ranks(4, [](RankContext& context) {
    const auto made = mesh_of(context, {2, 2});
    const auto given = dtensor::DeviceMesh::from_communicators(
        at::kCPU, {made->shared_communicator(0), made->shared_communicator(1)}, {"dp", "fsdp"});
    const auto train = [&](const std::shared_ptr<const dtensor::DeviceMesh>& mesh) {
      torch::manual_seed(5);
      auto net = hsdp::meta_init([] { return Chain(2); });
      auto model = hsdp::fully_shard(net, {.mesh = mesh, .units = hsdp::each("layers.*")});
      model.materialize(at::kCPU);
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      for (int step = 0; step < 2; ++step) {
        optimizer.zero_grad();
        model->forward(torch::full({2, 8}, 0.1 * (context.rank() + step))).pow(2).sum().backward();
        optimizer.step();
      }
      return hsdp::unsharded(net->layers->ptr<torch::nn::LinearImpl>(0)->weight);
    };
    EXPECT_TRUE(torch::equal(train(made), train(given)));
  });
}

TEST(MeshesOfOneReplica, MergeWhatWaitsOnceAndAllReduceNothing) {
  run_ranks(2, [](RankContext& context) {
    auto net = hsdp::meta_init([] { return Chain(2); });
    auto model = hsdp::fully_shard(net, {.mesh = mesh_of(context, {1, 2}), .units = hsdp::each("layers.*")});
    model.materialize(at::kCPU);
    const auto gradient = [&](int backwards, bool waits) {
      net->zero_grad();
      dtensor::reset_collective_counts();
      for (int i = 0; i < backwards; ++i) {
        model.set_requires_all_reduce(!waits || i + 1 == backwards);
        model->forward(torch::ones({2, 8})).sum().backward();
      }
      EXPECT_EQ(dtensor::collective_counts().all_reduces, 0);
      return hsdp::unsharded(net->layers->ptr<torch::nn::LinearImpl>(0)->weight.grad());
    };
    const auto once = gradient(1, false);
    EXPECT_TRUE(torch::equal(gradient(2, true), once + once));
  });
}

TEST(ReplicatedParameters, AreReducedBesideShardedOnes) {
  run_ranks(2, [](RankContext& context) {
    auto net = hsdp::meta_init([] { return Chain(2); });
    auto model = hsdp::fully_shard(
        net, {.mesh = mesh_of(context, {2}), .units = hsdp::each("layers.*"), .replicated = {"**.bias"}});
    model.materialize(at::kCPU);
    model->forward(torch::ones({2, 8}));  // compares the biases
    dtensor::reset_collective_counts();
    model->forward(torch::ones({2, 8})).sum().backward();
    const auto counts = dtensor::collective_counts();
    EXPECT_EQ(counts.reduce_scatters, 2);
    EXPECT_EQ(counts.all_reduces, 2);
    EXPECT_EQ(counts.all_reduce_bytes, 2 * 8 * 4);
    EXPECT_TRUE(torch::equal(net->layers->ptr<torch::nn::LinearImpl>(1)->bias.grad().sum(),
                             hsdp::unsharded(net->layers->ptr<torch::nn::LinearImpl>(1)->bias.grad()).sum()));
  });
}

TEST(ResettingAnIteration, LeavesAnotherModelAlone) {
  run_ranks(2, [](RankContext& context) {
    const auto make = [&] {
      torch::manual_seed(1);
      auto net = hsdp::meta_init([] { return Chain(2); });
      auto model = hsdp::fully_shard(net, {.mesh = mesh_of(context, {2}), .units = hsdp::each("layers.*")});
      model.materialize(at::kCPU);
      model.set_requires_gradient_sync(false);
      model->forward(torch::ones({2, 8})).sum().backward();
      model.set_requires_gradient_sync(true);
      return std::make_pair(net, model);
    };
    auto [first, reset] = make();
    auto [second, kept] = make();
    reset.reset_iteration_state();
    reset->forward(torch::ones({2, 8})).sum().backward();
    kept->forward(torch::ones({2, 8})).sum().backward();
    const auto gradient = [](Chain& net) {
      return hsdp::unsharded(net->layers->ptr<torch::nn::LinearImpl>(0)->weight.grad());
    };
    EXPECT_TRUE(torch::equal(gradient(second), 2 * gradient(first)));
  });
}

TEST(Groups, KeepAPartBetweenForwardAndBackward) {
  run_ranks(4, [](RankContext& context) {
    auto net = hsdp::meta_init([] { return Chain(3); });
    auto model = hsdp::fully_shard(
        net, {.mesh = mesh_of(context, {4}), .units = hsdp::each("layers.*"), .reshard_after_forward = 2});
    model.materialize(at::kCPU);
    for (int step = 0; step < 3; ++step) {
      dtensor::reset_collective_counts();
      auto x = torch::ones({2, 8}).set_requires_grad(true);
      auto y = model->forward(x);
      auto& units = model.core()->units();
      for (auto& unit : units) EXPECT_TRUE(unit->keeps_part()) << unit->name();
      const auto forward = dtensor::collective_counts();
      y.sum().backward();
      const auto both = dtensor::collective_counts();
      EXPECT_EQ(forward.all_gathers, 3);
      EXPECT_EQ(both.all_gathers, 6);
      EXPECT_EQ(forward.all_gather_bytes, 3 * ((64 + 8) * 4 + 4 * 32)) << "among four";
      EXPECT_EQ(both.all_gather_bytes - forward.all_gather_bytes, 3 * ((64 + 8) * 4 + 2 * 32)) << "among two";
      for (auto& unit : units) EXPECT_FALSE(unit->keeps_part() || unit->is_gathered()) << unit->name();
    }
    torch::NoGradGuard no_grad;
    model->forward(torch::ones({2, 8}));
    for (auto& unit : model.core()->units()) EXPECT_FALSE(unit->keeps_part()) << "no backward is to come";
  });
}

TEST(Options, ThatDoNotFitAreRefusedAndChangeNothing) {
  run_ranks(2, [](RankContext& context) {
    auto mesh = context.environment().mesh();
    auto net = hsdp::meta_init([] { return Chain(2); });
    const auto refused = [&](hsdp::FullyShardOptions options, const std::string& text) {
      options.mesh = options.mesh ? options.mesh : mesh;
      expect_error<dtensor::Error>([&] { hsdp::fully_shard(net, options); }, text);
    };
    refused({.mesh = context.environment().make_mesh({1, 2, 1}, {"a", "b", "c"})},
            "has 3 axes, expected one to shard over, or two: replicate, shard");
    refused({.reshard_after_forward = 3}, "[reshard_after_forward] group of 3 ranks on a shard axis of 2");
    refused({.ignored = {"head.*"}}, "[fully_shard] ignored pattern \"head.*\" matches none of the parameters");
    refused({.replicated = {"head.*"}}, "replicated pattern \"head.*\" matches none");
    refused({.shard_placement_fn = [](const std::string&, const at::Tensor&) { return std::optional<int64_t>(1); }},
            "[shard_placement_fn] dim 1 for parameter \"layers.0.bias\" of shape [8], expected -1 to 0");
    refused({.mixed_precision = {.param_dtype = torch::kLong}}, "mixed_precision.param_dtype is Long");
    refused({.activation_checkpoint = hsdp::each("layers.0")}, "picks \"layers.0\", which is no unit");
    auto model = hsdp::fully_shard(net, {.mesh = mesh, .units = hsdp::each("layers.*")});
    model.materialize(at::kCPU);
    EXPECT_THROW(model.set_reshard_after_forward(3), dtensor::ValueError);
    expect_error<dtensor::ValueError>([&] { model.units("nowhere"); },
                                      "[units] pattern \"nowhere\" matches no unit, expected at least one; they are "
                                      "\"layers.0\", \"layers.1\"");
    model->forward(torch::ones({1, 8})).sum().backward();
  });
}

}  // namespace mesh_modes_test
