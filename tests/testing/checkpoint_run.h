#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hsdp/hsdp.h"
#include "tests/testing/blocks.h"
#include "tests/testing/multi_process.h"
#include "tests/testing/weights_net.h"

/// What the tests of checkpoints share: a net with all that a checkpoint has to hold, and a run that trains it.
namespace testing_support {

/// Tied, uneven and tiny parameters (some ranks hold nothing of them), buffers of three dtypes, one of no dims, and a
/// random tensor that nobody registered.
struct CheckpointNetImpl : torch::nn::Module {
  CheckpointNetImpl()
      : embedding(register_module("embedding", torch::nn::Embedding(11, 5))),
        body(register_module("body", WeightsBody())),
        out(register_module("out", torch::nn::Linear(7, 5))),
        gate(register_parameter("gate", torch::rand({1}))),
        scale(register_parameter("scale", torch::rand({3, 1}) + 1)),
        table(register_buffer("table", torch::arange(6, torch::kInt).view({2, 3}))) {
    head = register_parameter("head", embedding->weight);
    noise = torch::randn({5});
  }
  torch::Tensor forward(torch::Tensor rows) {
    auto x = out(torch::tanh(body(embedding(rows)))) * gate + noise * scale.mean() + table.sum() / 100.0;
    return x.matmul(head.t());
  }
  torch::nn::Embedding embedding{nullptr};
  WeightsBody body{nullptr};
  torch::nn::Linear out{nullptr};
  torch::Tensor gate, scale, table, head, noise;
};
TORCH_MODULE(CheckpointNet);

struct CheckpointRunOptions {
  /// Of the mesh, as mesh_of takes them; empty: all ranks on one axis.
  std::vector<int64_t> mesh = {};
  uint64_t seed = 7;
  hsdp::UnitSelector units = hsdp::each<WeightsBody>();
  decltype(hsdp::FullyShardOptions::shard_placement_fn) shard_placement_fn = {};
  /// Sets what else there is, last.
  std::function<void(hsdp::FullyShardOptions&)> adjust = {};
};

/// A model and its AdamW over two groups. Every rank has the whole batch, so that all numbers of ranks train alike but
/// for the order of sums.
class CheckpointRun {
 public:
  explicit CheckpointRun(RankContext& context, const CheckpointRunOptions& options = {})
      : net(meta_net(options.seed)), model(hsdp::fully_shard(net, sharding(context, options))) {
    using torch::optim::AdamWOptions;
    optimizer = std::make_unique<torch::optim::AdamW>(
        hsdp::parameter_groups(model, {{"**.bias", AdamWOptions(2e-2).weight_decay(0)}, {"**", AdamWOptions(1e-2)}}),
        AdamWOptions(1e-2));
  }

  hsdp::TrainingState state() {
    hsdp::TrainingState result;
    result.model = model.core();
    result.optimizers = {optimizer.get()};
    result.progress = progress;
    return result;
  }
  void save(const std::string& path) { hsdp::save(state(), path); }
  hsdp::LoadReport load(const std::string& path, const hsdp::LoadOptions& options = {}) {
    auto target = state();
    auto report = hsdp::load(target, path, options);
    progress = target.progress;
    return report;
  }

  /// The loss before the step.
  double step() {
    const auto rows = (torch::arange(12) * (progress.step + 1)) % 11;
    model->zero_grad();
    auto loss = model->forward(rows).pow(2).mean();
    loss.backward();
    optimizer->step();
    ++progress.step;
    progress.tokens += 12;
    progress.data_position += 1;
    return loss.item<double>();
  }
  std::vector<double> train(int64_t steps) {
    std::vector<double> losses;
    for (int64_t i = 0; i < steps; ++i) losses.push_back(step());
    return losses;
  }

  /// Whole parameters, buffers and optimizer state by name: a collective.
  std::map<std::string, torch::Tensor> values() {
    std::map<std::string, torch::Tensor> result;
    for (auto& entry : net->named_parameters()) {
      result[entry.key()] = whole_of(entry.value()).clone();
      const auto found = optimizer->state().find(entry.value().unsafeGetTensorImpl());
      if (found == optimizer->state().end()) continue;
      const auto& state_of_it = static_cast<const torch::optim::AdamWParamState&>(*found->second);
      result["state." + entry.key() + ".exp_avg"] = whole_of(state_of_it.exp_avg()).clone();
      result["state." + entry.key() + ".exp_avg_sq"] = whole_of(state_of_it.exp_avg_sq()).clone();
      result["state." + entry.key() + ".step"] = torch::tensor(state_of_it.step());
    }
    for (auto& entry : net->named_buffers()) result[entry.key()] = entry.value().clone();
    return result;
  }

  CheckpointNet net;
  hsdp::FullySharded<CheckpointNetImpl> model;
  std::unique_ptr<torch::optim::AdamW> optimizer;
  hsdp::TrainingProgress progress;

 private:
  static CheckpointNet meta_net(uint64_t seed) {
    torch::manual_seed(seed);
    return hsdp::meta_init([] { return CheckpointNet(); });
  }
  static hsdp::FullyShardOptions sharding(RankContext& context, const CheckpointRunOptions& options) {
    hsdp::FullyShardOptions result;
    result.mesh = options.mesh.empty() ? context.environment().mesh() : mesh_of(context, options.mesh);
    result.units = options.units;
    result.shard_placement_fn = options.shard_placement_fn;
    if (options.adjust) options.adjust(result);
    return result;
  }
};

/// Same names, dtypes, shapes and bits.
inline void expect_same_values(const std::map<std::string, torch::Tensor>& values,
                               const std::map<std::string, torch::Tensor>& expected) {
  ASSERT_EQ(values.size(), expected.size());
  for (const auto& [name, tensor] : expected) {
    const auto found = values.find(name);
    ASSERT_NE(found, values.end()) << name;
    ASSERT_EQ(found->second.scalar_type(), tensor.scalar_type()) << name;
    EXPECT_TRUE(torch::equal(found->second, tensor)) << name << "\n" << found->second << "\nexpected\n" << tensor;
  }
}

/// Keeps values for other processes of a test.
inline void write_values(const std::map<std::string, torch::Tensor>& values, const std::string& path) {
  c10::Dict<std::string, torch::Tensor> dict;
  for (const auto& [name, tensor] : values) dict.insert(name, tensor.detach());
  const auto bytes = torch::pickle_save(dict);
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}
inline std::map<std::string, torch::Tensor> read_values(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  std::map<std::string, torch::Tensor> values;
  for (const auto& entry : torch::pickle_load(bytes).toGenericDict()) {
    values[entry.key().toStringRef()] = entry.value().toTensor();
  }
  return values;
}

}  // namespace testing_support
