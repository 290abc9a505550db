// Checkpoints of models on a device other than the host, the tests' own behind PrivateUse1, with shards there or in
// host memory.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "dtensor/dtensor.h"
#include "hsdp/hsdp.h"
#include "tests/testing/blocks.h"
#include "tests/testing/checkpoint_run.h"
#include "tests/testing/on_device.h"
#include "tests/testing/scratch_folder.h"

namespace {

using namespace testing_support;

[[maybe_unused]] const auto* const registered = ::testing::AddGlobalTestEnvironment(new PrivateDeviceRegistered);

/// Blocks with statistics of a rank's own.
struct DeviceNetImpl : BlocksImpl {
  DeviceNetImpl() : BlocksImpl(2, 7) { seen = register_buffer("seen", torch::zeros({7})); }
  torch::Tensor forward(const torch::Tensor& x) {
    {
      torch::NoGradGuard no_grad;
      seen.add_(x.detach().sum(0));
    }
    return BlocksImpl::forward(x);
  }
  torch::Tensor seen;
};
TORCH_MODULE(DeviceNet);

struct Way {
  std::string name;
  std::vector<int64_t> mesh;
  bool offload;
};
std::ostream& operator<<(std::ostream& out, const Way& way) { return out << way.name; }

class DeviceRun {
 public:
  DeviceRun(RankContext& context, const Way& way)
      : net(seeded()),
        model(hsdp::fully_shard(net, {.mesh = mesh_of(context, way.mesh),
                                      .units = hsdp::each("blocks.*"),
                                      .offload = {.to_host = way.offload}})),
        optimizer(net->parameters(), torch::optim::AdamWOptions(0.01)),
        device(context.environment().device()),
        rank(context.rank()) {}

  hsdp::TrainingState state() {
    hsdp::TrainingState result;
    result.model = model.core();
    result.optimizers = {&optimizer};
    return result;
  }
  void train(int64_t steps) {
    for (int64_t i = 0; i < steps; ++i) {
      model->zero_grad();
      const auto x = (torch::linspace(-1, 1, 21).view({3, 7}) + static_cast<double>(rank)).to(device);
      model->forward(x).square().mean().backward();
      optimizer.step();
    }
  }
  /// On the host. A collective.
  std::map<std::string, torch::Tensor> values() {
    std::map<std::string, torch::Tensor> result;
    for (auto& entry : net->named_parameters()) {
      result[entry.key()] = whole_of(entry.value()).detach().cpu();
      const auto found = optimizer.state().find(entry.value().unsafeGetTensorImpl());
      if (found == optimizer.state().end()) continue;
      const auto& kept = static_cast<torch::optim::AdamWParamState&>(*found->second);
      result["state." + entry.key() + ".exp_avg"] = whole_of(kept.exp_avg()).cpu();
      result["state." + entry.key() + ".exp_avg_sq"] = whole_of(kept.exp_avg_sq()).cpu();
    }
    for (auto& entry : net->named_buffers()) result[entry.key()] = entry.value().cpu().clone();
    return result;
  }
  torch::Tensor draw() { return torch::rand({8}, at::globalContext().defaultGenerator(device)); }

  DeviceNet net;
  hsdp::FullySharded<DeviceNetImpl> model;
  torch::optim::AdamW optimizer;
  c10::Device device;
  int rank;

 private:
  static DeviceNet seeded() {
    torch::manual_seed(5);
    return hsdp::meta_init([] { return DeviceNet(); });
  }
};

const std::vector<Way> kWays = {{"OnTheDevice", {2}, false},
                                {"Offloaded", {2}, true},
                                {"Replicated", {2, 1}, false},
                                {"ReplicatedOffloaded", {2, 1}, true}};

class CheckpointOnDevice : public ::testing::TestWithParam<Way> {};

TEST_P(CheckpointOnDevice, GoesOnAsIfItHadNeverStopped) {
  const ScratchFolder folder;
  run_on_device(2, [&](RankContext& context) {
    DeviceRun run(context, GetParam());
    run.model.materialize(run.device);
    run.train(2);
    run.draw();
    hsdp::save(run.state(), folder / "checkpoint");
    const auto saved = run.values();
    write_values({{"drawn", run.draw()}}, folder / std::to_string(context.rank()));
    for (const auto& way : kWays) {
      SCOPED_TRACE("loaded as " + way.name);
      for (const bool materialized : {false, true}) {
        DeviceRun other(context, way);
        if (materialized) other.model.materialize(other.device);
        auto state = other.state();
        hsdp::load(state, folder / "checkpoint");
        expect_same_values(other.values(), saved);
        for (auto& parameter : other.net->parameters()) {
          const auto home = way.offload ? c10::Device(c10::kCPU) : other.device;
          const auto& kept =
              static_cast<torch::optim::AdamWParamState&>(*other.optimizer.state()[parameter.unsafeGetTensorImpl()]);
          EXPECT_EQ(dtensor::DTensor(parameter).to_local().device(), home);
          EXPECT_EQ(dtensor::DTensor(kept.exp_avg()).to_local().device(), home);
        }
        EXPECT_EQ(other.net->seen.device(), other.device);
        other.train(1);
      }
    }
    DeviceRun resumed(context, GetParam());
    auto state = resumed.state();
    hsdp::load(state, folder / "checkpoint");
    run.train(2);
    resumed.train(2);
    expect_same_values(resumed.values(), run.values());
  });
  // In a process whose device has drawn nothing yet.
  run_on_device(2, [&](RankContext& context) {
    DeviceRun resumed(context, GetParam());
    auto state = resumed.state();
    EXPECT_TRUE(hsdp::load(state, folder / "checkpoint").same_ranks);
    EXPECT_TRUE(torch::equal(resumed.draw(), read_values(folder / std::to_string(context.rank()))["drawn"]));
  });
}

TEST_P(CheckpointOnDevice, BecomesAFileAndComesBack) {
  const ScratchFolder folder;
  run_on_device(2, [&](RankContext& context) {
    DeviceRun run(context, GetParam());
    run.model.materialize(run.device);
    run.train(1);
    const auto weights = [](DeviceRun& of) {
      auto values = of.values();
      std::erase_if(values, [](const auto& entry) { return entry.first.starts_with("state."); });
      return values;
    };
    // Buffers of a file are those of rank 0.
    auto expected = weights(run);
    expected.erase("seen");
    hsdp::export_hf(run.model, folder / "model");
    DeviceRun other(context, GetParam());
    hsdp::load(other.model, folder / "model");
    auto values = weights(other);
    values.erase("seen");
    expect_same_values(values, expected);
    EXPECT_EQ(other.net->seen.device(), other.device);
  });
}

INSTANTIATE_TEST_SUITE_P(All, CheckpointOnDevice, ::testing::ValuesIn(kWays),
                         [](const auto& which) { return which.param.name; });

}  // namespace
