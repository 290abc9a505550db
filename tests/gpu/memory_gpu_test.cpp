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
  // A few rows of activations' gradients while an operator runs, scalars, the words that ranks compare with a gather.
  // Nothing is for the allocator: its own rounding is not in the bytes that are asked for.
  int64_t slack() const { return unit() / 8; }
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
  bool grouped;  // as over NCCL, else packed
  std::optional<torch::ScalarType> param_dtype;
  // In fp32 units: what may be on the device beside what is there before, and in backward beside all gradients' shards.
  double forward_units, backward_units;
  int gpus() const { return place == Place::own_gpu ? ranks : 1; }
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

class Memory : public ::testing::TestWithParam<Case> {};

/// What forward needs beside parameters, in the same layers unsharded: what it keeps for backward, and what an operator
/// takes for a moment. Leaves the workspaces of operators behind, of this thread and of autograd's, which then belong
/// to the start of everything that is counted.
int64_t activations(const Sizes& sizes, const torch::TensorOptions& like) {
  const auto device = like.device();
  std::vector<torch::Tensor> weights;
  for (int64_t i = 0; i < sizes.blocks; ++i) {
    weights.push_back(torch::full({sizes.width, sizes.width}, 0.01, like).set_requires_grad(true));
  }
  int64_t needed = 0;
  for (int repetition = 0; repetition < 2; ++repetition) {
    auto x = torch::ones({sizes.rows, sizes.width}, like).set_requires_grad(true);
    const auto start = bytes_on(device).now;
    reset_bytes(device);
    for (const auto& weight : weights) x = torch::tanh(torch::linear(x, weight));
    const auto loss = x.sum();
    needed = bytes_on(device).peak - start;
    loss.backward();
  }
  return needed;
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
    const auto now = [&] { return bytes_on(device).now - base; };
    EXPECT_LE(now(), shards + sizes.slack()) << "after materialize";
    double forward = 0, backward = 0;
    for (int step = 0; step < 3; ++step) {
      // With a gradient of its own, so that the first unit is read in backward as well.
      const auto x = torch::ones({sizes.rows, sizes.width}, device).set_requires_grad(true);
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

// What the schedule holds, in units of fp32, over N ranks:
//
// Forward, while a unit computes: it and the next one gathered, 2. A packed gather has the ranks' parts in a buffer
// first, 1 more. In bf16 a gathered unit is 1/2, and the shard is cast for the gather that is under way, 1/2N.
//
// Backward, while a unit computes: the same, the full gradient that comes of it, 1, and what is reduced of the unit
// before, 1: its gradient itself or, packed, the rows that it was copied to. Shards of gradients are made when their
// reduction starts, so at this time those of this unit and of one more are not there, 2/N less than all. With bf16 the
// new gradient is 1/2. When it is reduced it is copied into the input in fp32, at a time when the other reduction has
// ended, only the next unit is gathered, 1/2 + 1/2N, and one shard is not there: 1/2 + 1/2N + 1/2 + 1 - 1/N.
//
// Alone nothing is gathered or reduced: gradients are the shards. In bf16 every unit is cast, and the last gradient is
// there beside its copy in fp32.
using torch::kBFloat16;
constexpr auto kFull = std::nullopt;
INSTANTIATE_TEST_SUITE_P(Ranks, Memory,
                         ::testing::Values(Case{"Alone", 1, Place::own_gpu, true, kFull, 0, 0},
                                           Case{"AloneBf16", 1, Place::own_gpu, true, kBFloat16, 2 * 0.5, 0.5},
                                           Case{"Sharing2", 2, Place::one_gpu, true, kFull, 2, 4 - 2 / 2.0},
                                           Case{"Sharing2Bf16", 2, Place::one_gpu, true, kBFloat16, 1 + 0.5 / 2,
                                                1 + 0.5 / 2 + 0.5 + 1 - 2 / 2.0},
                                           Case{"Sharing2Packed", 2, Place::one_gpu, false, kFull, 3, 5 - 2 / 2.0},
                                           Case{"OwnGpus2", 2, Place::own_gpu, true, kFull, 2, 4 - 2 / 2.0},
                                           Case{"OwnGpus2Bf16", 2, Place::own_gpu, true, kBFloat16, 1 + 0.5 / 2,
                                                1 + 0.5 / 2 + 0.5 + 1 - 2 / 2.0},
                                           Case{"OwnGpus4", 4, Place::own_gpu, true, kFull, 2, 4 - 2 / 4.0},
                                           Case{"OwnGpus8", 8, Place::own_gpu, true, kFull, 2, 4 - 2 / 8.0}),
                         [](const auto& which) { return which.param.name; });

}  // namespace
