#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hsdp/hsdp.h"
#include "tests/testing/habit.h"
#include "tests/testing/multi_process.h"
#include "tests/testing/parity.h"

/// What the tests of single units' settings share: a chain of equal blocks, and a sharded module beside its plain twin.
namespace testing_support {

/// Linear blocks of an odd width, each meant to be a unit, and a head that the root holds.
struct BlocksImpl : torch::nn::Module {
  explicit BlocksImpl(int64_t count = 3, int64_t width = 5) {
    for (int64_t i = 0; i < count; ++i) blocks->push_back(torch::nn::Linear(width, width));
    register_module("blocks", blocks);
    head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
  }
  torch::Tensor block(int64_t index, const torch::Tensor& x) {
    return torch::tanh(blocks[static_cast<size_t>(index)]->as<torch::nn::Linear>()->forward(x));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (int64_t i = 0; i < static_cast<int64_t>(blocks->size()); ++i) x = block(i, x);
    return head(x);
  }
  torch::nn::ModuleList blocks;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Blocks);

inline std::shared_ptr<const dtensor::DeviceMesh> mesh_of(RankContext& context, const std::vector<int64_t>& sizes) {
  return context.environment().make_mesh(
      sizes, sizes.size() == 1 ? std::vector<std::string>{"shard"} : std::vector<std::string>{"replicate", "shard"});
}

/// One module twice with the same values: sharded, and plain.
template <class Net>
struct Twins {
  Twins(const std::function<Net()>& make, const hsdp::FullyShardOptions& options)
      : plain(seeded(make)),
        net(hsdp::meta_init([&] { return seeded(make); })),
        model(hsdp::fully_shard(net, options)) {
    model.materialize(at::kCPU);
  }

  void expect_equal_gradients(double tolerance) {
    const auto expected = plain->named_parameters();
    for (auto& parameter : net->named_parameters()) {
      const auto& theirs = expected[parameter.key()].grad();
      ASSERT_EQ(parameter.value().grad().defined(), theirs.defined()) << parameter.key();
      if (!theirs.defined()) continue;
      const auto ours = whole(parameter.value().grad());
      EXPECT_LE(largest_difference(ours.to(theirs.scalar_type()), theirs), tolerance)
          << "gradient of " << parameter.key();
    }
  }
  void expect_equal_parameters(double tolerance) {
    const auto expected = plain->named_parameters();
    for (auto& parameter : net->named_parameters()) {
      EXPECT_LE(largest_difference(whole(parameter.value()), expected[parameter.key()]), tolerance) << parameter.key();
    }
  }
  void zero_grad() {
    plain->zero_grad();
    net->zero_grad();
  }
  static torch::Tensor whole(const torch::Tensor& tensor) {
    return dtensor::DTensor::is_dtensor(tensor) ? hsdp::unsharded(tensor) : tensor.detach();
  }

  Net plain, net;
  hsdp::FullySharded<typename Net::ContainedType> model;

 private:
  static Net seeded(const std::function<Net()>& make) {
    torch::manual_seed(7);
    return make();
  }
};

/// This rank's share of a batch of 12 rows.
struct Share {
  explicit Share(RankContext& context)
      : begin(context.rank() * 12 / context.world_size()), end((context.rank() + 1) * 12 / context.world_size()) {}
  int64_t begin, end;
};

}  // namespace testing_support
