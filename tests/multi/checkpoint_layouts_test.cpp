// Checkpoints between models that are sharded in different ways, what each rank writes and reads, and which replica
// does it.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <numeric>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "dtensor/mesh_collectives.h"
#include "hsdp/checkpoint/manifest.h"
#include "hsdp/checkpoint/stored_tensors.h"
#include "hsdp/hsdp.h"
#include "tests/testing/checkpoint_run.h"
#include "tests/testing/multi_process.h"
#include "tests/testing/scratch_folder.h"

namespace checkpoint_layouts_test {

namespace fs = std::filesystem;
using namespace testing_support;
using hsdp::FullyShardOptions;

struct Way {
  std::string name;
  CheckpointRunOptions options;
};
std::ostream& operator<<(std::ostream& out, const Way& way) { return out << way.name; }

CheckpointRunOptions adjusted(std::function<void(FullyShardOptions&)> adjust) {
  CheckpointRunOptions options;
  options.adjust = std::move(adjust);
  return options;
}

/// Of two ranks.
std::vector<Way> ways() {
  const auto last_dim = [](const std::string&, const at::Tensor&) { return std::optional<int64_t>(-1); };
  const auto mixed_dims = [](const std::string& path, const at::Tensor& parameter) {
    return std::optional<int64_t>(path.find("out") != std::string::npos ? parameter.dim() - 1 : 0);
  };
  return {
      {"Plain", {}},
      {"LastDim", {.shard_placement_fn = last_dim}},
      {"MixedDims", {.shard_placement_fn = mixed_dims}},
      {"OneUnit", {.units = {}}},
      {"ManyUnits", {.units = hsdp::each<torch::nn::Linear>()}},
      {"DataParallel", {.mesh = {2, 1}}},
      {"OneReplica", {.mesh = {1, 2}}},
      {"Replicated", adjusted([](auto& options) {
         options.replicated = {"out.*", "gate"};
       })},
      {"ReplicatedOnReplicas", {.mesh = {2, 1}, .adjust = [](auto& options) { options.replicated = {"gate"}; }}},
      {"Ignored", adjusted([](auto& options) {
         options.ignored = {"out.*", "scale"};
       })},
      {"Offloaded", adjusted([](auto& options) { options.offload.to_host = true; })},
      {"MixedPrecision", adjusted([](auto& options) { options.mixed_precision.reduce_dtype = torch::kDouble; })},
  };
}

class CheckpointLayouts : public ::testing::TestWithParam<Way> {};

// Into all others.
TEST_P(CheckpointLayouts, HoldTheSameValues) {
  run_ranks(2, [](RankContext& context) {
    const auto path = context.directory() + "/checkpoint";
    CheckpointRun run(context, GetParam().options);
    run.model.materialize(at::kCPU);
    run.train(2);
    run.save(path);
    const auto saved = run.values();
    bool materialized = false;
    for (const auto& way : ways()) {
      SCOPED_TRACE("loaded as " + way.name);
      CheckpointRun other(context, way.options);
      if (materialized) {
        other.model.materialize(at::kCPU);
        other.train(1);
      }
      materialized = !materialized;
      const auto report = other.load(path);
      EXPECT_TRUE(report.same_ranks);
      EXPECT_TRUE(report.missing.empty() && report.unexpected.empty());
      expect_same_values(other.values(), saved);
      EXPECT_TRUE(other.net->head.is_same(other.net->embedding->weight));
    }
  });
}

TEST_P(CheckpointLayouts, GoOnAsIfTheyHadNeverStopped) {
  run_ranks(2, [](RankContext& context) {
    const auto path = context.directory() + "/checkpoint";
    CheckpointRun run(context, GetParam().options);
    run.model.materialize(at::kCPU);
    run.train(2);
    run.save(path);
    CheckpointRun resumed(context, GetParam().options);
    resumed.load(path);
    EXPECT_EQ(resumed.train(3), run.train(3));
    expect_same_values(resumed.values(), run.values());
  });
}

INSTANTIATE_TEST_SUITE_P(All, CheckpointLayouts, ::testing::ValuesIn(ways()),
                         [](const auto& which) { return which.param.name; });

// What is computed with is another dtype than what is kept.
TEST(CheckpointOfMixedPrecision, HasTheParametersAsTheyAreKept) {
  run_ranks(2, [](RankContext& context) {
    const auto path = context.directory() + "/checkpoint";
    struct Run {
      explicit Run(RankContext& context)
          : net(seeded()),
            model(hsdp::fully_shard(net, {.mesh = context.environment().mesh(),
                                          .units = hsdp::each("blocks.*"),
                                          .mixed_precision = {.param_dtype = torch::kBFloat16}})),
            optimizer(net->parameters(), torch::optim::AdamWOptions(0.01)) {}
      static Blocks seeded() {
        torch::manual_seed(3);
        return hsdp::meta_init([] { return Blocks(); });
      }
      hsdp::TrainingState state() {
        hsdp::TrainingState result;
        result.model = model.core();
        result.optimizers = {&optimizer};
        return result;
      }
      void train() {
        for (int64_t i = 0; i < 3; ++i) {
          net->zero_grad();
          model->forward(torch::linspace(-1, 1, 15).view({3, 5})).square().mean().backward();
          optimizer.step();
        }
      }
      Blocks net;
      hsdp::FullySharded<BlocksImpl> model;
      torch::optim::AdamW optimizer;
    };
    Run run(context), resumed(context);
    run.model.materialize(at::kCPU);
    run.train();
    hsdp::save(run.state(), path);
    EXPECT_EQ(hsdp::read_manifest("test", path).model.at("head.weight").dtype, torch::kFloat);
    auto state = resumed.state();
    hsdp::load(state, path);
    run.train();
    resumed.train();
    const auto expected = run.net->named_parameters();
    for (auto& entry : resumed.net->named_parameters()) {
      EXPECT_TRUE(torch::equal(whole_of(entry.value()), whole_of(expected[entry.key()]))) << entry.key();
    }
  });
}

// Parameters that are left alone train on each rank's own gradients.
TEST(CheckpointOfIgnoredParameters, IsEachRanksOwn) {
  const ScratchFolder folder;
  const auto options = adjusted([](auto& of) { of.ignored = {"out.*", "scale"}; });
  const auto train = [](CheckpointRun& run, RankContext& context) {
    for (int64_t i = 0; i < 2; ++i) {
      const auto rows = (torch::arange(12) * (i + 2) + 3 * context.rank()) % 11;
      run.model->zero_grad();
      run.model->forward(rows).pow(2).mean().backward();
      run.optimizer->step();
    }
  };
  run_ranks(2, [&](RankContext& context) {
    CheckpointRun run(context, options);
    run.model.materialize(at::kCPU);
    train(run, context);
    const auto all = dtensor::all_gather_rows(*run.model.core()->mesh(), run.net->out->bias.detach(), {"", "test"});
    EXPECT_FALSE(torch::equal(all[0], all[1]));
    run.save(folder / "checkpoint");
    const auto saved = run.values();
    if (context.rank() == 0) write_values(saved, folder / "values");
    const auto averages =
        dtensor::all_gather_rows(*run.model.core()->mesh(), saved.at("state.out.bias.exp_avg"), {"", "test"});
    EXPECT_FALSE(torch::equal(averages[0], averages[1]));
    CheckpointRun resumed(context, options);
    resumed.load(folder / "checkpoint");
    expect_same_values(resumed.values(), saved);
    train(run, context);
    train(resumed, context);
    expect_same_values(resumed.values(), run.values());
  });
  run_ranks(3, [&](RankContext& context) {
    CheckpointRun other(context, options);
    other.load(folder / "checkpoint");
    expect_same_values(other.values(), read_values(folder / "values"));
  });
}

// ---- how much is written and read ----

constexpr int64_t kWide = 1448, kLayers = 4;
constexpr uint64_t kLayerBytes = kWide * kWide * 4, kBlock = hsdp::kChecksumBlock;
constexpr uint64_t kSmall = 64 * 1024;  // headers and scalars

/// Four matrices of 8 MiB.
struct WideImpl : torch::nn::Module {
  WideImpl() {
    for (int64_t i = 0; i < kLayers; ++i) {
      layers->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWide, kWide).bias(false)));
    }
    register_module("layers", layers);
  }
  torch::nn::ModuleList layers;
};
TORCH_MODULE(Wide);

/// A model of these, filled by row and column, and SGD with momentum that stands at twice the values.
class WideRun {
 public:
  WideRun(RankContext& context, const std::vector<int64_t>& mesh, const std::vector<std::string>& replicated = {})
      : net(hsdp::meta_init([] { return Wide(); })),
        model(hsdp::fully_shard(
            net, {.mesh = mesh_of(context, mesh), .units = hsdp::each("layers.*"), .replicated = replicated})),
        optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)) {}

  void fill() {
    torch::NoGradGuard no_grad;
    model.to_empty(at::kCPU);
    for (auto& parameter : net->parameters()) {
      parameter.copy_(torch::arange(kWide * kWide, torch::kFloat).view({kWide, kWide}));
      auto state = std::make_unique<torch::optim::SGDParamState>();
      state->momentum_buffer(parameter.detach() * 2);
      optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
    }
  }
  void expect_filled() {
    const auto expected = torch::arange(kWide * kWide, torch::kFloat).view({kWide, kWide});
    for (auto& parameter : net->parameters()) {
      const auto& state =
          static_cast<torch::optim::SGDParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
      EXPECT_TRUE(torch::equal(whole_of(parameter), expected));
      EXPECT_TRUE(torch::equal(whole_of(state.momentum_buffer()), expected * 2));
    }
  }
  hsdp::TrainingState state() {
    hsdp::TrainingState result;
    result.model = model.core();
    result.optimizers = {&optimizer};
    return result;
  }

  Wide net;
  hsdp::FullySharded<WideImpl> model;
  torch::optim::SGD optimizer;
};

constexpr uint64_t kCopyBytes = 2 * kLayers * kLayerBytes;  // of the model and its state

std::vector<uint64_t> of_all_ranks(const hsdp::FullySharded<WideImpl>& model, uint64_t own) {
  const auto row = torch::tensor({static_cast<int64_t>(own)});
  const auto rows = dtensor::all_gather_rows(*model.core()->mesh(), row, {"all_gather", "test"});
  std::vector<uint64_t> all;
  for (int64_t rank = 0; rank < rows.size(0); ++rank) {
    all.push_back(static_cast<uint64_t>(rows[rank].item<int64_t>()));
  }
  return all;
}

struct Grid {
  std::vector<int64_t> from, to;
};
std::string to_string(const std::vector<int64_t>& mesh) {
  std::string text;
  for (const auto size : mesh) text += (text.empty() ? "" : "x") + std::to_string(size);
  return text;
}
std::ostream& operator<<(std::ostream& out, const Grid& grid) {
  return out << to_string(grid.from) << " " << to_string(grid.to);
}

class CheckpointBytes : public ::testing::TestWithParam<Grid> {};

TEST_P(CheckpointBytes, AreWrittenOnceAndReadOnce) {
  const ScratchFolder folder;
  const auto path = folder / "checkpoint";
  const auto count = [](const std::vector<int64_t>& mesh) { return static_cast<int>(c10::multiply_integers(mesh)); };
  const auto ranks = static_cast<uint64_t>(count(GetParam().from));
  run_ranks(count(GetParam().from), [&](RankContext& context) {
    WideRun run(context, GetParam().from);
    run.fill();
    hsdp::save(run.state(), path);
  });
  uint64_t on_disk = 0;
  std::vector<uint64_t> model_files, optimizer_files;
  for (const auto& file : hsdp::read_manifest("test", path).files) {
    EXPECT_EQ(file.written.bytes, fs::file_size(fs::path(path) / file.path));
    on_disk += file.written.bytes;
    if (file.path.starts_with("shard")) model_files.push_back(file.written.bytes);
    if (file.path.starts_with("optimizer")) optimizer_files.push_back(file.written.bytes);
  }
  EXPECT_GE(on_disk, kCopyBytes);
  EXPECT_LE(on_disk, kCopyBytes + kSmall);
  // Each rank has written its share.
  for (const auto& files : {model_files, optimizer_files}) {
    ASSERT_EQ(files.size(), ranks);
    for (const auto bytes : files) {
      EXPECT_NEAR(static_cast<double>(bytes), static_cast<double>(kLayers * kLayerBytes / ranks), double{kSmall});
    }
  }

  run_ranks(count(GetParam().to), [&](RankContext& context) {
    WideRun run(context, GetParam().to);
    auto state = run.state();
    const auto report = hsdp::load(state, path);
    run.expect_filled();
    // What a rank reads of a tensor may begin and end in the middle of a block.
    const auto& to = GetParam().to;
    const auto readers = static_cast<uint64_t>(context.world_size());
    const auto tensors = 2 * kLayers / static_cast<uint64_t>(to.size() == 2 ? to[0] : 1);
    const auto share = kCopyBytes / readers, slack = tensors * 2 * kBlock;
    for (const auto bytes : of_all_ranks(run.model, report.bytes_read)) {
      EXPECT_GE(bytes, share);
      EXPECT_LE(bytes, share + slack);
    }
    // The same of a model alone.
    hsdp::TrainingState model;
    model.model = run.model.core();
    const auto of_model = of_all_ranks(run.model, hsdp::load(model, path).bytes_read);
    const auto sum = std::accumulate(of_model.begin(), of_model.end(), uint64_t{0});
    EXPECT_GE(sum, kCopyBytes / 2);
    EXPECT_LE(sum, kCopyBytes / 2 + slack * readers / 2);
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, CheckpointBytes,
                         ::testing::Values(Grid{{2}, {2}}, Grid{{2}, {4}}, Grid{{4}, {2}}, Grid{{1}, {2, 1}},
                                           Grid{{2, 1}, {2, 1}}, Grid{{2, 2}, {2, 2}}, Grid{{2, 2}, {1}},
                                           Grid{{2}, {2, 2}}, Grid{{4, 1}, {4}}),
                         [](const auto& which) {
                           return to_string(which.param.from) + "To" + to_string(which.param.to);
                         });

// Two layers are sharded, two are whole on every rank: all have the same to do.
TEST(CheckpointReplicas, ShareTheWorkEvenly) {
  for (const auto& mesh : std::vector<std::vector<int64_t>>{{2, 2}, {4}, {4, 1}}) {
    SCOPED_TRACE(to_string(mesh));
    const ScratchFolder folder;
    run_ranks(4, [&](RankContext& context) {
      WideRun run(context, mesh, {"layers.1.weight", "layers.3.weight"});
      run.fill();
      hsdp::save(run.state(), folder / "checkpoint");
      std::vector<double> loads(4, 0);
      for (const auto& file : hsdp::read_manifest("test", folder / "checkpoint").files) {
        const auto at = file.path.find("shard-0000");
        if (at == std::string::npos) continue;
        loads[static_cast<size_t>(file.path[at + 10] - '1')] += static_cast<double>(file.written.bytes);
      }
      const auto [least, most] = std::minmax_element(loads.begin(), loads.end());
      EXPECT_LE(*most - *least, double{kSmall}) << testing::PrintToString(loads);
      WideRun other(context, mesh, {"layers.1.weight", "layers.3.weight"});
      auto state = other.state();
      const auto bytes = of_all_ranks(other.model, hsdp::load(state, folder / "checkpoint").bytes_read);
      const auto [fewest, more] = std::minmax_element(bytes.begin(), bytes.end());
      // The model's whole tensors are shared out, and then those of the optimizer.
      EXPECT_LE(*more - *fewest, 2 * kLayerBytes + 8 * kBlock) << testing::PrintToString(bytes);
      other.expect_filled();
    });
  }
}

}  // namespace checkpoint_layouts_test
