// How many bytes a step holds at once, counted at the host allocator rather than by the process's size.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

#include "hsdp/hsdp.h"
#include "hsdp/launch/device.h"
#include "tests/testing/multi_process.h"

namespace memory_bounds_test {

using namespace testing_support;

constexpr int64_t kWidth = 256, kBlocks = 8;
constexpr int64_t kUnit = (kWidth * kWidth + kWidth) * 4;  // bytes of one block's parameters
constexpr int64_t kSlack = 96 * 1024;                      // activations of one row, signatures, scalars

struct ChainImpl : torch::nn::Module {
  ChainImpl() {
    for (int64_t i = 0; i < kBlocks; ++i) blocks->push_back(torch::nn::Linear(kWidth, kWidth));
    register_module("blocks", blocks);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& block : *blocks) x = torch::tanh(block->as<torch::nn::Linear>()->forward(x));
    return x;
  }
  torch::nn::ModuleList blocks;
};
TORCH_MODULE(Chain);

struct Case {
  std::string name;
  std::vector<int64_t> mesh;
  double forward_units, backward_units;  // beside shards of gradients
};

class Bytes : public ::testing::TestWithParam<Case> {};

TEST_P(Bytes, OfAStepAreThoseOfFewUnits) {
  const auto c = GetParam();
  int64_t ranks = 1;
  for (auto size : c.mesh) ranks *= size;
  run_ranks(static_cast<int>(ranks), [&](RankContext& context) {
    hsdp::count_host_memory();
    auto mesh = context.environment().make_mesh(c.mesh, {"replicate", "shard"});
    auto net = hsdp::meta_init([] { return Chain(); });
    auto model = hsdp::fully_shard(net, {.mesh = mesh, .units = hsdp::each("blocks.*"), .reshard_after_forward = true});
    model.materialize(at::kCPU);
    torch::optim::SGD optimizer(model->parameters(), 0.01);
    const int64_t shards = kBlocks * kUnit / c.mesh[1];
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      auto x = torch::ones({1, kWidth}).set_requires_grad(true);
      const auto start = hsdp::memory_bytes(at::kCPU);
      hsdp::reset_peak_memory(at::kCPU);
      auto loss = model->forward(x).sum();
      const auto forward = hsdp::peak_memory_bytes(at::kCPU) - start;
      // The first forward compares the replicas as well.
      if (step > 0) {
        EXPECT_LE(forward, c.forward_units * kUnit + kSlack) << "forward " << step;
      }
      EXPECT_LE(hsdp::memory_bytes(at::kCPU) - start, kSlack) << "after forward " << step;
      loss.backward();
      const auto backward = hsdp::peak_memory_bytes(at::kCPU) - start;
      if (step > 0) {
        EXPECT_LE(backward, c.backward_units * kUnit + shards + kSlack) << "backward " << step;
      }
      EXPECT_GE(backward, shards) << "the count saw the gradients";
      EXPECT_LE(hsdp::memory_bytes(at::kCPU) - start, shards + kSlack) << "after backward " << step;
      if (context.rank() == 0 && step == 2) {
        std::printf("%s: forward %.2f units, backward %.2f units beside the gradients' shards\n", c.name.c_str(),
                    static_cast<double>(forward) / kUnit, static_cast<double>(backward - shards) / kUnit);
      }
      optimizer.step();
    }
  });
}

// Forward: two gathered units, and one buffer in which ranks' parts arrive side by side. Backward: the same, and
// of one unit the full gradients, the input of their reduction and what arrives of it, but not yet the shard.
INSTANTIATE_TEST_SUITE_P(Meshes, Bytes,
                         ::testing::Values(Case{"Sharded2", {1, 2}, 3, 5.5}, Case{"Sharded4", {1, 4}, 3, 5.75},
                                           Case{"Hybrid", {2, 2}, 3, 5.5}, Case{"DataParallel", {2, 1}, 0, 1}),
                         [](const auto& which) { return which.param.name; });

}  // namespace memory_bounds_test
