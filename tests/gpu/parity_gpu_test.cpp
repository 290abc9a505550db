// Training on GPUs equals training the plain module on the host, in double: one rank, ranks that share a GPU, and a GPU
// a rank.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <vector>

#include "hsdp/hsdp.h"
#include "hsdp/launch/device.h"
#include "models/transformer.h"
#include "tests/gpu/device.h"
#include "tests/testing/blocks.h"
#include "tests/testing/modules.h"
#include "tests/testing/parity.h"
#include "tests/testing/small_transformer.h"

namespace {

using namespace testing_support;

/// Where a module computes: the plain one where its parameters are, a sharded one where it gathers them.
c10::Device place_of(const torch::nn::Module& module) { return module.parameters().front().view({-1}).device(); }

template <class Net>
ParityCase<Net> double_case(std::function<Net()> make) {
  ParityCase<Net> c;
  c.make = std::move(make);
  c.steps = 4;
  // Sums of a GPU go in another order.
  c.loss_tolerance = c.parameter_tolerance = 1e-9;
  c.optimizer = [](std::vector<torch::Tensor> parameters) -> std::unique_ptr<torch::optim::Optimizer> {
    // The eps covers gradients that are zero in exact arithmetic, which Adam would blow up to full steps.
    return std::make_unique<hsdp::FusedAdamW>(parameters, torch::optim::AdamWOptions(0.01).eps(1e-4));
  };
  return c;
}

ParityCase<OddMlp> odd_mlp() {
  auto c = double_case<OddMlp>([] { return OddMlp(); });
  c.options.units = hsdp::each<torch::nn::Linear>();
  c.max_norm = 0.5;
  c.loss = [](OddMlpImpl& net, int64_t step, int64_t begin, int64_t end) {
    const auto device = place_of(net);
    return torch::mse_loss(net.forward(rows_of(step, 1, {12, 5}, begin, end).to(device)),
                           rows_of(step, 2, {12, 2}, begin, end).to(device));
  };
  return c;
}

ParityCase<models::Transformer> transformer(bool tied) {
  auto c = double_case<models::Transformer>([tied] { return small_transformer(/*layers=*/3, tied); });
  c.options.units = hsdp::each<models::TransformerBlock>();
  c.max_norm = 1.0;
  c.loss = [](models::TransformerImpl& net, int64_t step, int64_t begin, int64_t end) {
    auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(step));
    const auto ids =
        torch::randint(0, 17, {12, 9}, generator, torch::kLong).narrow(0, begin, end - begin).to(place_of(net));
    const auto logits = net.forward(ids.narrow(1, 0, 8));
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1), ids.narrow(1, 1, 8).flatten());
  };
  return c;
}

ParityCase<Zoo> zoo() {
  auto c = double_case<Zoo>([] { return Zoo(); });
  c.options.units = hsdp::each<torch::nn::Linear>() | hsdp::each<torch::nn::LSTM>() |
                    hsdp::each<torch::nn::TransformerEncoderLayer>() | hsdp::each<torch::nn::MultiheadAttention>();
  c.whole_batch_everywhere = true;
  c.loss = [](ZooImpl& net, int64_t step, int64_t begin, int64_t end) {
    const auto device = place_of(net);
    const auto tokens = rows_of(step, 3, {12}, begin, end).abs().mul(10).to(torch::kLong).clamp(0, 10).to(device);
    return torch::mse_loss(net.forward(rows_of(step, 1, {12, 1, 4, 4}, begin, end).to(device), tokens),
                           rows_of(step, 2, {12, 4}, begin, end).to(device));
  };
  return c;
}

/// Forwards and backwards of two micro-batches, of which the second reduces.
ParityCase<OddMlp> accumulating() {
  auto c = odd_mlp();
  c.forward_backward = [loss = c.loss](OddMlpImpl& net, const InForward& forward, int64_t step, int64_t begin,
                                       int64_t end) {
    torch::Tensor total;
    for (int64_t micro = 0; micro < 2; ++micro) {
      const auto part = forward([&] { return loss(net, 2 * step + micro, begin, end); });
      part.backward();
      total = total.defined() ? total + part.detach() : part.detach();
    }
    return total;
  };
  return c;
}

template <class Net>
void train(RankContext& context, const std::vector<int64_t>& mesh, ParityCase<Net> c, const std::string& what) {
  SCOPED_TRACE(what);
  c.options.mesh = mesh_of(context, mesh);
  expect_parity(context, c);
}

/// All in one process a rank: starting CUDA takes longer than they do.
void train_all(RankContext& context, const std::vector<int64_t>& mesh) {
  torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
  train(context, mesh, odd_mlp(), "layers of odd sizes");
  train(context, mesh, accumulating(), "micro-batches");
  for (const bool tied : {false, true}) train(context, mesh, transformer(tied), tied ? "tied" : "untied");
  auto kept = transformer(false);
  kept.options.reshard_after_forward = false;
  train(context, mesh, kept, "kept after forward");
  auto recomputed = transformer(false);
  recomputed.options.activation_checkpoint = hsdp::each<models::TransformerBlock>();
  train(context, mesh, recomputed, "recomputed in backward");
  auto offloaded = odd_mlp();
  offloaded.options.offload.to_host = true;
  train(context, mesh, offloaded, "offloaded");
}

int ranks_of(const std::vector<int64_t>& mesh) {
  int64_t product = 1;
  for (const auto size : mesh) product *= size;
  return static_cast<int>(product);
}

std::string mesh_name(const ::testing::TestParamInfo<std::vector<int64_t>>& info) {
  std::string name = "Mesh";
  for (const auto size : info.param) name += "_" + std::to_string(size);
  return name;
}

class SharedGpu : public ::testing::TestWithParam<std::vector<int64_t>> {};

TEST_P(SharedGpu, TrainsAsThePlainModule) {
  HSDP_REQUIRE_GPUS(1);
  run_on_gpus(ranks_of(GetParam()), Place::one_gpu, [](RankContext& context) { train_all(context, GetParam()); });
}
INSTANTIATE_TEST_SUITE_P(Meshes, SharedGpu,
                         ::testing::Values(std::vector<int64_t>{2}, std::vector<int64_t>{3}, std::vector<int64_t>{2, 1},
                                           std::vector<int64_t>{2, 2}),
                         mesh_name);

class OwnGpus : public ::testing::TestWithParam<std::vector<int64_t>> {};

TEST_P(OwnGpus, TrainAsThePlainModule) {
  HSDP_REQUIRE_GPUS(ranks_of(GetParam()));
  run_on_gpus(ranks_of(GetParam()), Place::own_gpu, [](RankContext& context) { train_all(context, GetParam()); });
}
INSTANTIATE_TEST_SUITE_P(Meshes, OwnGpus,
                         ::testing::Values(std::vector<int64_t>{1}, std::vector<int64_t>{2}, std::vector<int64_t>{3},
                                           std::vector<int64_t>{2, 1}, std::vector<int64_t>{2, 2}),
                         mesh_name);

// As many as there are on one machine, up to eight.
TEST(AllGpus, TrainAsThePlainModule) {
  HSDP_REQUIRE_GPUS(5);  // fewer are covered above
  run_on_gpus(std::min(gpu_count(), 8), Place::own_gpu, [](RankContext& context) {
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
    const int64_t ranks = context.world_size();
    const auto one_row_a_rank = [&](auto c) {
      c.rows = ranks;
      return c;
    };
    train(context, {ranks}, one_row_a_rank(odd_mlp()), "layers of odd sizes");
    train(context, {ranks}, one_row_a_rank(accumulating()), "micro-batches");
    train(context, {ranks}, one_row_a_rank(transformer(true)), "tied");
    if (ranks % 2 == 0) train(context, {2, ranks / 2}, one_row_a_rank(transformer(false)), "replicated and sharded");
  });
}

// Convolution, batch norm, attention, an LSTM: what a GPU computes with cuDNN.
TEST(StockModules, TrainAsThePlainOnes) {
  HSDP_REQUIRE_GPUS(1);
  if (stand_in() == StandIn::device) GTEST_SKIP() << "a dry run: the tests' own device has no fused LSTM";
  run_on_gpus(2, Place::one_gpu, [](RankContext& context) {
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
    train(context, {2}, zoo(), "stock modules");
  });
}

// A program that has connected its ranks itself.
TEST(OwnGroup, TrainsAsThePlainModule) {
  HSDP_REQUIRE_GPUS(2);
  run_ranks(2,
            [](RankContext& context) {
              torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
              const auto first = first_gpu();
              const auto index = static_cast<c10::DeviceIndex>(context.rank());
              const c10::Device device = first.type() == c10::kCPU ? first : c10::Device(first.type(), index);
              if (device.has_index()) hsdp::set_device(device);
              auto store = c10::make_intrusive<c10d::FileStore>(context.directory() + "/store", 2);
              auto groups = c10::make_intrusive<c10d::PrefixStore>("group", store);
              context.set_environment(hsdp::init_from(store, make_gpu_backend(groups, context.rank(), 2, device),
                                                      {.timeout = std::chrono::minutes(1)}));
              EXPECT_EQ(context.environment().device(), device);
              for (const auto& mesh : {std::vector<int64_t>{2}, std::vector<int64_t>{1, 2}}) {
                train(context, mesh, odd_mlp(), "layers of odd sizes");
              }
            },
            {.timeout = std::chrono::seconds(150), .make_environment = false});
}

}  // namespace
