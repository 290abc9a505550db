// Shards, gradients and optimizer state in host memory, computing on a device: the tests' own, behind PrivateUse1.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "dtensor/communicator.h"
#include "dtensor/dtensor.h"
#include "hsdp/hsdp.h"
#include "hsdp/launch/device.h"
#include "tests/testing/blocks.h"
#include "tests/testing/expect.h"
#include "tests/testing/modules.h"
#include "tests/testing/on_device.h"
#include "tests/testing/parity.h"

namespace {

using namespace testing_support;
using dtensor::DTensor;

[[maybe_unused]] const auto* const registered = ::testing::AddGlobalTestEnvironment(new PrivateDeviceRegistered);

constexpr int64_t kWidth = 60;

hsdp::FullyShardOptions offloaded(RankContext& context, std::vector<int64_t> sizes) {
  return {.mesh = mesh_of(context, sizes), .units = hsdp::each("blocks.*"), .offload = {.to_host = true}};
}

void expect_on_host(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer) {
  for (auto& parameter : module.named_parameters()) {
    EXPECT_EQ(DTensor(parameter.value()).to_local().device(), c10::Device(c10::kCPU)) << parameter.key();
    EXPECT_EQ(parameter.value().device(), c10::Device(c10::kCPU)) << parameter.key();
    EXPECT_EQ(parameter.value().grad().device(), c10::Device(c10::kCPU)) << parameter.key();
    auto* key = parameter.value().unsafeGetTensorImpl();
    const auto& state = static_cast<const torch::optim::AdamWParamState&>(*optimizer.state().at(key));
    EXPECT_EQ(state.exp_avg().device(), c10::Device(c10::kCPU)) << parameter.key();
    EXPECT_EQ(state.exp_avg_sq().device(), c10::Device(c10::kCPU)) << parameter.key();
  }
}

class Offload : public ::testing::TestWithParam<std::vector<int64_t>> {
 protected:
  int ranks() const {
    int64_t product = 1;
    for (auto size : GetParam()) product *= size;
    return static_cast<int>(product);
  }
};
INSTANTIATE_TEST_SUITE_P(Meshes, Offload,
                         ::testing::Values(std::vector<int64_t>{1}, std::vector<int64_t>{2}, std::vector<int64_t>{3},
                                           std::vector<int64_t>{2, 1}, std::vector<int64_t>{2, 2}),
                         [](const auto& which) {
                           std::string name = "Mesh";
                           for (auto size : which.param) name += "_" + std::to_string(size);
                           return name;
                         });

TEST_P(Offload, KeepsEverythingButTheUnitInUseOnTheHost) {
  run_on_device(ranks(), [&](RankContext& context) {
    const auto device = context.environment().device();
    auto net = hsdp::meta_init([] { return Blocks(4, kWidth); });
    const auto before = private_bytes(device.index());
    auto model = hsdp::fully_shard(net, offloaded(context, GetParam()));
    model.materialize(device);
    EXPECT_EQ(private_bytes(device.index()), before) << "no shard is there";
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.01));
    const int64_t block = (kWidth + 1) * kWidth * 8;  // bytes of a block's whole parameters
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      {
        const auto y = model->forward(torch::ones({1, kWidth}, device));
        EXPECT_EQ(y.device(), device);
        EXPECT_LE(private_bytes(device.index()) - before, 3 * block) << "the root, which is kept, and activations";
        hsdp::reset_peak_memory(device);
        y.square().mean().backward();
      }
      EXPECT_EQ(private_bytes(device.index()), before) << "step " << step;
      // The root, two blocks, and the gradients of two blocks with what is sent of them.
      EXPECT_LE(hsdp::peak_memory_bytes(device) - before, 9 * block);
      hsdp::clip_grad_norm_(model->parameters(), 0.1);
      optimizer.step();
      expect_on_host(*net, optimizer);
    }
    // A whole value is gathered where collectives are.
    EXPECT_EQ(hsdp::unsharded(net->head->weight).device(), device);
  });
}

TEST_P(Offload, TrainsAsThePlainModuleWithClippingAccumulationAndStockOptimizers) {
  for (bool replicated : {false, true}) {
    ParityCase<OddMlp> c;
    c.make = [] { return OddMlp(); };
    c.steps = 4;
    c.max_norm = 0.5;
    c.forward_backward = [](OddMlpImpl& net, const InForward& forward, int64_t step, int64_t begin, int64_t end) {
      torch::Tensor total;
      for (int64_t micro = 0; micro < 2; ++micro) {
        auto loss = forward([&] {
          // The plain module computes where its parameters are; the sharded one where it gathers them.
          const auto to = net.layers->ptr<torch::nn::LinearImpl>(0)->weight.view({-1}).device();
          const auto x = rows_of(step, 1 + micro, {12, 5}, begin, end).to(to);
          return (net.forward(x) - rows_of(step, 3 + micro, {12, 2}, begin, end).to(to)).square().mean();
        });
        loss.backward();
        total = total.defined() ? total + loss.detach() : loss.detach();
      }
      return total;
    };
    c.optimizer = [](std::vector<torch::Tensor> parameters) -> std::unique_ptr<torch::optim::Optimizer> {
      return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(0.01).eps(1e-4));
    };
    c.options.units = hsdp::each<torch::nn::Linear>();
    c.options.offload.to_host = true;
    if (replicated) c.options.replicated = {"**.bias"};
    run_on_device(ranks(), [&](RankContext& context) {
      auto mine = c;
      mine.options.mesh = mesh_of(context, GetParam());
      expect_parity(context, mine);
    });
  }
}

TEST(OffloadedDtypes, ComputeInBf16AndStepInFloatOnTheHost) {
  run_on_device(2, [](RankContext& context) {
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat));
    const auto device = context.environment().device();
    auto options = offloaded(context, {2});
    options.mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
    torch::manual_seed(7);
    auto net = hsdp::meta_init([] { return Blocks(2, 6); });
    auto model = hsdp::fully_shard(net, options);
    model.materialize(device);
    torch::manual_seed(7);
    Blocks copy(2, 6);
    const auto masters = copy->named_parameters();
    std::map<std::string, torch::Tensor> kept;
    for (auto& parameter : masters) kept[parameter.key()] = parameter.value().detach().clone();
    copy->to(torch::kBFloat16);
    const auto x = rows_of(0, 1, {12, 6}, 6 * context.rank(), 6 * context.rank() + 6);
    const auto y = model->forward(x.to(device));
    EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
    y.square().mean().backward();
    copy->forward(x.to(torch::kBFloat16)).square().mean().backward();
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    optimizer.step();
    for (auto& parameter : net->named_parameters()) {
      auto sum = copy->named_parameters()[parameter.key()].grad().to(torch::kFloat).to(device);
      context.environment().communicator()->all_reduce(sum, dtensor::ReduceOp::sum, {"all_reduce", "sum"})->wait();
      const auto gradient = sum.cpu() / 2;
      EXPECT_EQ(parameter.value().grad().scalar_type(), torch::kFloat);
      EXPECT_EQ(parameter.value().device().type(), c10::kCPU);
      EXPECT_TRUE(torch::equal(hsdp::unsharded(parameter.value().grad()), gradient)) << parameter.key();
      EXPECT_TRUE(torch::equal(hsdp::unsharded(parameter.value()), kept[parameter.key()].add_(gradient, -0.1)))
          << parameter.key();
    }
  });
}

TEST(OffloadedShards, OnTheDeviceAreRefusedAndNothingChanges) {
  run_on_device(2, [](RankContext& context) {
    const auto device = context.environment().device();
    auto net = hsdp::meta_init([] { return Blocks(2, 6); });
    auto model = hsdp::fully_shard(net, offloaded(context, {2}));
    model.materialize(device);
    const auto before = hsdp::unsharded(net->head->weight);
    auto& slot = hsdp::ModuleAccess::parameters(*net->head)["weight"];
    const auto identity = slot;
    slot = torch::zeros({3, 6}, device);
    expect_error<dtensor::ValueError>([&] { model.reset_sharded_param(); },
                                      "[reset_sharded_param] parameter \"head.weight\" given a tensor on npu:",
                                      "expected cpu, where offloaded shards live");
    slot = identity;
    EXPECT_EQ(model.reset_sharded_param(), 0);
    EXPECT_TRUE(torch::equal(hsdp::unsharded(net->head->weight), before));
    // From the host it is taken.
    slot = torch::full({3, 6}, 2.0);
    EXPECT_EQ(model.reset_sharded_param(), 1);
    EXPECT_TRUE(torch::equal(hsdp::unsharded(net->head->weight), torch::full({6, 6}, 2.0)));
    torch::NoGradGuard no_grad;
    expect_error<dtensor::Error>(
        [&] {
          net->head->weight.set_data(torch::zeros({3, 6}, device));
        },
        "[set_data]", "expected");
    EXPECT_EQ(model->forward(torch::ones({1, 6}, device)).device(), device);
  });
}

TEST(OffloadedShards, AreLoadedAndExported) {
  run_on_device(2, [](RankContext& context) {
    const auto device = context.environment().device();
    auto net = hsdp::meta_init([] { return Blocks(2, 6); });
    auto model = hsdp::fully_shard(net, offloaded(context, {2}));
    model.materialize(device);
    const auto path = context.directory() + "/model.pt";
    hsdp::export_pt(model, path);
    Blocks plain(2, 6);
    torch::load(plain, path);
    auto again = hsdp::meta_init([] { return Blocks(2, 6); });
    auto other = hsdp::fully_shard(again, offloaded(context, {2}));
    other.to_empty(device);
    hsdp::load(other, path);
    for (auto& parameter : again->named_parameters()) {
      EXPECT_EQ(DTensor(parameter.value()).to_local().device().type(), c10::kCPU);
      EXPECT_TRUE(torch::equal(hsdp::unsharded(parameter.value()), plain->named_parameters()[parameter.key()]));
    }
    const auto x = torch::ones({2, 6});
    torch::NoGradGuard no_grad;
    EXPECT_LE(largest_difference(other->forward(x.to(device)).cpu(), plain->forward(x)), 1e-12);
    hsdp::SummonFull summoned(other);
    EXPECT_LE(largest_difference(other->forward(x.to(device)).cpu(), plain->forward(x)), 1e-12);
  });
}

TEST(OnTheHost, OffloadMeansNothing) {
  run_ranks(2, [](RankContext& context) {
    const Share share(context);
    for (auto& sizes : {std::vector<int64_t>{2}, std::vector<int64_t>{2, 1}}) {
      for (bool pins : {false, true}) {
        auto options = offloaded(context, sizes);
        Twins<Blocks> with([] { return Blocks(2, 6); }, options);
        options.offload = {.to_host = false, .pin_memory = pins};
        Twins<Blocks> without([] { return Blocks(2, 6); }, options);
        for (int64_t step = 0; step < 2; ++step) {
          const auto x = rows_of(step, 1, {12, 6}, share.begin, share.end);
          std::vector<torch::Tensor> results;
          std::vector<int64_t> bytes;
          for (auto* twins : {&with, &without}) {
            dtensor::reset_collective_counts();
            results.push_back(twins->model->forward(x));
            results.back().square().mean().backward();
            const auto counts = dtensor::collective_counts();
            bytes.push_back(counts.all_gather_bytes + counts.reduce_scatter_bytes + counts.all_reduce_bytes);
          }
          EXPECT_TRUE(torch::equal(results[0], results[1]));
          EXPECT_EQ(bytes[0], bytes[1]);
          EXPECT_TRUE(torch::equal(hsdp::unsharded(with.net->head->weight.grad()),
                                   hsdp::unsharded(without.net->head->weight.grad())));
        }
      }
    }
  });
}

}  // namespace
