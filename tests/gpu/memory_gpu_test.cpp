// Bytes that a training step holds on the device, against the bounds of FSDP2.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "hsdp/hsdp.h"
#include "hsdp/transport.h"
#include "tests/gpu/device.h"
#include "tests/testing/blocks.h"

namespace {

using namespace testing_support;
using dtensor::OperationName;
using dtensor::Work;

/// Every unit is one linear layer, so that the largest unit is any, and nothing is left for the root. On GPUs large
/// enough that what operators take for themselves is little beside it.
struct Sizes {
  int64_t width, blocks, rows;
  int64_t unit() const { return width * width * 4; }
  // Activations and their gradients while an operator runs, scalars, words that ranks compare.
  int64_t slack() const { return unit() / 4; }
};
Sizes sizes_here() { return stand_in() == StandIn::none ? Sizes{2048, 8, 16} : Sizes{256, 8, 1}; }

struct ChainImpl : torch::nn::Module {
  explicit ChainImpl(const Sizes& sizes) {
    for (int64_t i = 0; i < sizes.blocks; ++i) {
      blocks->push_back(torch::nn::Linear(torch::nn::LinearOptions(sizes.width, sizes.width).bias(false)));
    }
    register_module("blocks", blocks);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& block : *blocks) x = torch::tanh(block->as<torch::nn::Linear>()->forward(x));
    return x;
  }
  torch::nn::ModuleList blocks;
};
TORCH_MODULE(Chain);

/// What a communicator of NCCL asks of a transport, over one that packs: collectives of single tensors, started
/// together.
class Grouping final : public dtensor::Communicator {
 public:
  explicit Grouping(std::shared_ptr<dtensor::Communicator> below) : below_(std::move(below)) {}
  int64_t rank() const override { return below_->rank(); }
  int64_t size() const override { return below_->size(); }
  std::string describe() const override { return below_->describe(); }
  bool prefers_groups() const override { return true; }
  std::shared_ptr<Work> all_gather(const at::Tensor& output, const at::Tensor& input, OperationName name) override {
    return below_->all_gather(output, input, name);
  }
  std::shared_ptr<Work> reduce_scatter(const at::Tensor& output, const at::Tensor& input, OperationName name) override {
    return below_->reduce_scatter(output, input, name);
  }
  std::shared_ptr<Work> all_reduce(const at::Tensor& tensor, dtensor::ReduceOp op, OperationName name) override {
    return below_->all_reduce(tensor, op, name);
  }
  std::shared_ptr<Work> broadcast(const at::Tensor& tensor, int64_t root, OperationName name) override {
    return below_->broadcast(tensor, root, name);
  }
  void start_group() override { below_->start_group(); }
  std::shared_ptr<Work> end_group() override { return below_->end_group(); }
  void barrier(OperationName name) override { below_->barrier(name); }

 private:
  std::shared_ptr<dtensor::Communicator> below_;
};

struct Case {
  std::string name;
  int ranks;
  Place place;
  bool grouped = true;  // as over NCCL, else packed
  std::optional<torch::ScalarType> param_dtype = std::nullopt;
  // Units that may be on the device beside what is there before, and in backward beside the gradients' shards.
  double forward_units = 3, backward_units = 3;
  int gpus() const { return place == Place::own_gpu ? ranks : 1; }
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

class Memory : public ::testing::TestWithParam<Case> {};

/// What forward keeps for backward beside parameters, in the same layers unsharded. Leaves the workspaces of operators
/// behind, which then belong to the start of everything that is counted.
int64_t activations(const Sizes& sizes, const torch::TensorOptions& like) {
  const auto device = like.device();
  std::vector<torch::Tensor> weights;
  for (int64_t i = 0; i < sizes.blocks; ++i) {
    weights.push_back(torch::full({sizes.width, sizes.width}, 0.01, like).set_requires_grad(true));
  }
  int64_t kept = 0;
  for (int repetition = 0; repetition < 2; ++repetition) {
    const auto start = bytes_on(device).now;
    auto x = torch::ones({sizes.rows, sizes.width}, like);
    for (const auto& weight : weights) x = torch::tanh(torch::linear(x, weight));
    const auto loss = x.sum();
    kept = bytes_on(device).now - start;
    loss.backward();
  }
  return kept;
}

TEST_P(Memory, IsBoundedByShardsAndAFewUnits) {
  HSDP_REQUIRE_GPUS(GetParam().gpus());
  if (stand_in() == StandIn::host) GTEST_SKIP() << "a dry run: the host's memory is for memory_bounds_test";
  run_on_gpus(GetParam().ranks, GetParam().place, [](RankContext& context) {
    const auto c = GetParam();
    const auto sizes = sizes_here();
    const auto device = context.environment().device();
    count_bytes_on(device);
    const torch::TensorOptions like(device);
    int64_t act = activations(sizes, like.dtype(torch::kFloat));
    if (c.param_dtype) act = activations(sizes, like.dtype(*c.param_dtype));
    hsdp::FullyShardOptions options;
    options.mesh = context.environment().mesh();
    options.units = hsdp::each("blocks.*");
    options.reshard_after_forward = true;
    options.mixed_precision = {.param_dtype = c.param_dtype, .reduce_dtype = torch::kFloat};
    if (c.grouped && c.ranks > 1) {
      options.transport = [](std::shared_ptr<dtensor::Communicator> communicator) {
        return hsdp::make_transport(std::make_shared<Grouping>(std::move(communicator)));
      };
    }
    const auto base = bytes_on(device).now;
    auto net = hsdp::meta_init([&] { return Chain(sizes); });
    auto model = hsdp::fully_shard(net, options);
    model.materialize(device);
    hsdp::FusedAdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));
    const int64_t shards = sizes.blocks * sizes.unit() / context.world_size();
    const auto x = torch::ones({sizes.rows, sizes.width}, device);
    const auto now = [&] { return bytes_on(device).now - base; };
    EXPECT_LE(now(), shards + sizes.slack()) << "after materialize";
    double forward = 0, backward = 0;
    for (int step = 0; step < 3; ++step) {
      const auto start = bytes_on(device).now;
      reset_bytes(device);
      auto loss = model->forward(x).sum();
      forward = static_cast<double>(bytes_on(device).peak - start - act) / static_cast<double>(sizes.unit());
      loss.backward();
      loss.reset();
      synchronize(device);
      backward = static_cast<double>(bytes_on(device).peak - start - act - shards) / static_cast<double>(sizes.unit());
      const double slack = static_cast<double>(sizes.slack()) / static_cast<double>(sizes.unit());
      // The first forward learns the order and compares replicas.
      if (step > 0) {
        EXPECT_LE(forward, c.forward_units + slack) << "forward " << step;
        EXPECT_LE(backward, c.backward_units + slack) << "backward " << step;
      }
      EXPECT_GE(bytes_on(device).now - start, shards) << "gradients are counted";
      optimizer.step();
      EXPECT_LE(now(), 4 * shards + sizes.slack()) << "after step " << step;
      optimizer.zero_grad();
      EXPECT_LE(now(), 3 * shards + sizes.slack()) << "after zero_grad " << step;
      EXPECT_GE(now(), 3 * shards) << "parameters and two moments are counted";
    }
    if (context.rank() == 0) {
      std::printf("%s: forward %.2f units beside what was there, backward %.2f beside the gradients' shards\n",
                  c.name.c_str(), forward, backward);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Memory,
                         ::testing::Values(Case{"Alone", 1, Place::own_gpu},
                                           Case{"AloneBf16", 1, Place::own_gpu, true, torch::kBFloat16},
                                           Case{"Sharing2", 2, Place::one_gpu},
                                           Case{"Sharing2Bf16", 2, Place::one_gpu, true, torch::kBFloat16},
                                           // As over Gloo: parts arrive and leave side by side in buffers of their own.
                                           Case{"Sharing2Packed", 2, Place::one_gpu, false, std::nullopt, 4, 7},
                                           Case{"OwnGpus2", 2, Place::own_gpu},
                                           Case{"OwnGpus2Bf16", 2, Place::own_gpu, true, torch::kBFloat16},
                                           Case{"OwnGpus4", 4, Place::own_gpu}),
                         [](const auto& which) { return which.param.name; });

}  // namespace
