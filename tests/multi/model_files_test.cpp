// Whole models out of a sharded one and back: Hugging Face files and folders, and checkpoints of which the model
// counts.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "dtensor/communicator.h"
#include "dtensor/error.h"
#include "hsdp/hsdp.h"
#include "hsdp/launch/device.h"
#include "tests/testing/checkpoint_run.h"
#include "tests/testing/expect.h"
#include "tests/testing/multi_process.h"
#include "tests/testing/scratch_folder.h"
#include "tests/testing/stored_files.h"

namespace model_files_test {

namespace fs = std::filesystem;
using namespace testing_support;
using dtensor::StateError;
using dtensor::ValueError;
using Values = std::map<std::string, torch::Tensor>;

/// Parameters and buffers of a plain net, tied ones once.
Values values_of(const torch::nn::Module& module) {
  Values values;
  for (auto& entry : module.named_parameters()) values[entry.key()] = entry.value().detach().clone();
  for (auto& entry : module.named_buffers()) values[entry.key()] = entry.value().clone();
  values.erase("embedding.weight");
  return values;
}

CheckpointNet filled_net() {
  torch::manual_seed(7);
  CheckpointNet net;
  fill(*net, 3);
  return net;
}

/// A sharded model with the values of filled_net.
CheckpointRun filled_run(RankContext& context, const CheckpointRunOptions& options = {}) {
  CheckpointRun run(context, options);
  run.model.materialize(at::kCPU);
  hsdp::copy_values(run.model, filled_net());
  return run;
}

void expect_loaded(CheckpointRun& run) {
  auto values = run.values();
  values.erase("embedding.weight");
  expect_same_values(values, values_of(*filled_net()));
  EXPECT_TRUE(run.net->head.is_same(run.net->embedding->weight));
  EXPECT_TRUE(run.model.core()->tensors_without_values().empty());
}

std::set<std::string> names_in(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename().string());
  return names;
}

class ModelFiles : public ::testing::TestWithParam<int> {
 protected:
  static void on_ranks(const std::function<void(RankContext&)>& body) { run_ranks(GetParam(), body); }
  /// What was loaded before and after materialize is the same.
  static void expect_loads(RankContext& context, const std::string& path) {
    CheckpointRun on_meta(context);
    hsdp::load(on_meta.model, path);
    expect_loaded(on_meta);
    CheckpointRun trained(context);
    trained.model.materialize(at::kCPU);
    trained.train(1);
    trained.optimizer->state().clear();
    hsdp::load(trained.model, path);
    expect_loaded(trained);
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, ModelFiles, ::testing::Values(1, 2, 3));

TEST_P(ModelFiles, HaveTheValuesOfTheModel) {
  const ScratchFolder folder;
  on_ranks([&](RankContext& context) {
    auto run = filled_run(context);
    const auto path = folder / "model";
    hsdp::export_hf(run.model, path);
    expect_loads(context, path);
    expect_loads(context, path + "/model.safetensors");
    expect_loaded(run);
  });
  EXPECT_EQ(names_in(folder / "model"), std::set<std::string>{"model.safetensors"});
  auto values = values_in(folder / "model");
  expect_same_values(values, values_of(*filled_net()));
  EXPECT_EQ(values["table"].scalar_type(), torch::kInt);
  EXPECT_EQ(values["body.norm.num_batches_tracked"].dim(), 0);
  EXPECT_EQ(values["body.norm.num_batches_tracked"].scalar_type(), torch::kLong);
}

TEST_P(ModelFiles, MayBeSeveral) {
  const ScratchFolder folder;
  on_ranks([&](RankContext& context) {
    auto run = filled_run(context);
    hsdp::export_hf(run.model, folder / "model", {.max_file_bytes = 150});
    expect_loads(context, folder / "model");
  });
  const auto names = names_in(folder / "model");
  EXPECT_TRUE(names.contains("model.safetensors.index.json"));
  EXPECT_GE(names.size(), 4u);
  expect_same_values(values_in(folder / "model"), values_of(*filled_net()));
}

TEST_P(ModelFiles, MayHaveAnotherDtype) {
  const ScratchFolder folder;
  auto expected = values_of(*filled_net());
  for (auto& [name, tensor] : expected) {
    if (tensor.is_floating_point()) tensor = tensor.to(torch::kBFloat16);
  }
  on_ranks([&](RankContext& context) {
    auto run = filled_run(context);
    hsdp::export_hf(run.model, folder / "model", {.dtype = torch::kBFloat16});
    CheckpointRun other(context);
    hsdp::load(other.model, folder / "model");
    auto values = other.values(), rounded = expected;
    values.erase("embedding.weight");
    for (auto& [name, tensor] : rounded) {
      if (tensor.is_floating_point()) tensor = tensor.to(torch::kFloat);
    }
    expect_same_values(values, rounded);
  });
  expect_same_values(values_in(folder / "model"), expected);
}

// Of which the model counts.
TEST_P(ModelFiles, MayBeACheckpoint) {
  const ScratchFolder folder;
  run_ranks(2, [&](RankContext& context) {
    auto run = filled_run(context);
    run.save(folder / "checkpoint");
  });
  on_ranks([&](RankContext& context) { expect_loads(context, folder / "checkpoint"); });
  hsdp::consolidate(folder / "checkpoint", folder / "model");
  expect_same_values(values_in(folder / "model"), values_of(*filled_net()));
  on_ranks([&](RankContext& context) { expect_loads(context, folder / "model"); });
}

// By any name of a tied parameter, or by both where they are equal.
TEST_P(ModelFiles, MayNameTiedParametersOtherwise) {
  on_ranks([](RankContext& context) {
    auto values = values_of(*filled_net());
    const auto write = [&](const std::string& name) {
      if (context.rank() != 0) return;
      std::vector<FilePart> parts;
      std::string bytes;
      for (const auto& [key, tensor] : values) {
        parts.push_back(whole_part(key, tensor.scalar_type(), tensor.sizes().vec()));
        const auto host = tensor.contiguous();
        bytes.append(static_cast<const char*>(host.const_data_ptr()), host.nbytes());
      }
      auto file = safetensors_bytes(parts, false);
      file.replace(file.size() - bytes.size(), bytes.size(), bytes);
      write_bytes(name, file);
    };
    const auto path = context.directory() + "/model.safetensors";
    values["embedding.weight"] = values["head"];
    write(path);
    expect_loads(context, path);
    values.erase("head");
    write(path + ".2.safetensors");
    expect_loads(context, path + ".2.safetensors");
    values["head"] = values["embedding.weight"].clone();
    values["head"][10][4] += 1;
    write(path + ".3.safetensors");
    auto run = filled_run(context);
    expect_error<ValueError>([&] { hsdp::load(run.model, path + ".3.safetensors"); },
                             "[load] unlike values for \"head\" and \"embedding.weight\", expected equal ones");
    expect_loaded(run);
    values["head"] = values["embedding.weight"].to(torch::kDouble);
    write(path + ".4.safetensors");
    expect_error<ValueError>([&] { hsdp::load(run.model, path + ".4.safetensors"); },
                             "[load] unlike dtypes for \"head\" and \"embedding.weight\", expected equal ones");
    expect_loaded(run);
  });
}

TEST_P(ModelFiles, AreNotMixedWithOthers) {
  const ScratchFolder folder;
  on_ranks([&](RankContext& context) {
    auto run = filled_run(context);
    hsdp::export_hf(run.model, folder / "model");
    run.train(1);
    const auto former = read_bytes(folder / "model/model.safetensors");
    expect_error<ValueError>([&] { hsdp::export_hf(run.model, folder / "model"); },
                             "[export_hf] " + (folder / "model") + " has model.safetensors, expected no model files");
    expect_error<ValueError>([&] { hsdp::export_hf(run.model, folder / "model/model.safetensors/sub"); },
                             "[export_hf] ", "cannot be made: ");
    expect_error<ValueError>([&] { hsdp::export_hf(run.model, folder / "other", {.max_file_bytes = 0}); },
                             "[export_hf] max_file_bytes 0, expected a positive number");
    expect_error<ValueError>([&] { hsdp::export_hf(run.model, folder / "other", {.dtype = torch::kInt}); },
                             "[HuggingFaceOptions] dtype Int, expected one of floating-point numbers");
    EXPECT_EQ(read_bytes(folder / "model/model.safetensors"), former);
    EXPECT_EQ(folder.names(), std::set<std::string>{"model"});
    run.train(1);
  });
}

TEST_P(ModelFiles, NeedValues) {
  on_ranks([](RankContext& context) {
    CheckpointRun run(context);
    expect_error<StateError>([&] { hsdp::export_hf(run.model, context.directory() + "/model"); }, "[export_hf] ",
                             " tensors have no values");
    EXPECT_FALSE(fs::exists(context.directory() + "/model"));
  });
}

TEST_P(ModelFiles, ThatDoNotFitChangeNothing) {
  on_ranks([](RankContext& context) {
    auto run = filled_run(context);
    const auto folder = context.directory();
    const auto write = [&](const std::string& name, const std::vector<FilePart>& parts) {
      if (context.rank() == 0) write_bytes(folder + "/" + name, safetensors_bytes(parts, false));
    };
    const auto refused = [&](const std::string& name, const auto&... parts) {
      expect_error<ValueError>([&] { hsdp::load(run.model, folder + "/" + name); }, "[load] ", parts...);
      expect_loaded(run);
    };
    write("part.safetensors", {whole_part("gate", torch::kFloat, {1}), whole_part("scale", torch::kFloat, {3}),
                               whole_part("other", torch::kFloat, {2})});
    refused("part.safetensors", folder + "/part.safetensors does not fit the module: missing \"head\"",
            ", unexpected \"other\", \"scale\" of shape [3], expected [3, 1]");
    refused("none.safetensors", folder + "/none.safetensors cannot be opened: No such file or directory");
    if (context.rank() == 0) {
      fs::create_directory(folder + "/empty");
      write_bytes(folder + "/text.safetensors", "not a model");
    }
    refused("empty", folder + "/empty has no .safetensors files");
    refused("text.safetensors", folder + "/text.safetensors");
    run.train(1);
  });
}

// Each rank reads its own parts: none has the model.
TEST(ModelFilesMemory, IsThatOfTheShards) {
  constexpr int64_t kWidth = 512, kLayers = 12, kLayer = kWidth * kWidth * 4, kSlack = 128 * 1024;
  struct Layers : torch::nn::Module {
    Layers() {
      for (int64_t i = 0; i < kLayers; ++i) {
        register_module("layer" + std::to_string(i),
                        torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
      }
    }
  };
  const ScratchFolder folder;
  std::vector<FilePart> parts;
  for (int64_t i = 0; i < kLayers; ++i) {
    parts.push_back(whole_part("layer" + std::to_string(i) + ".weight", torch::kFloat, {kWidth, kWidth}));
  }
  write_bytes(folder / "model.safetensors", safetensors_bytes(parts, false));
  run_ranks(2, [&](RankContext& context) {
    hsdp::count_host_memory();
    auto net = hsdp::meta_init([] { return std::make_shared<Layers>(); });
    auto model = hsdp::fully_shard(net, {.mesh = context.environment().mesh()});
    const auto shards = kLayers * kLayer / 2;
    const auto peak_of = [&](const std::function<void()>& call) {
      const auto start = hsdp::memory_bytes(at::kCPU);
      hsdp::reset_peak_memory(at::kCPU);
      call();
      return hsdp::peak_memory_bytes(at::kCPU) - start;
    };
    EXPECT_LE(peak_of([&] { hsdp::load(model, folder.path()); }), shards + kSlack);
    // Over values that must stay until all others are there.
    EXPECT_LE(peak_of([&] { hsdp::load(model, folder.path()); }), shards + kSlack);
    // One whole tensor at a time: what ranks send, what was gathered of it, and as it is in the file. Far from all, and
    // some room for what the group's own thread might hold.
    EXPECT_LE(peak_of([&] { hsdp::export_hf(model, folder / "same"); }), 5 * kLayer);
    EXPECT_LE(peak_of([&] { hsdp::export_hf(model, folder / "half", {.dtype = torch::kBFloat16}); }), 5 * kLayer);
  });
  // Not all of them are numbers.
  auto values = values_in(folder / "same");
  for (const auto& [name, expected] : values_in(folder / "model.safetensors")) {
    EXPECT_TRUE(torch::equal(values[name].view(torch::kInt), expected.view(torch::kInt))) << name;
  }
}

}  // namespace model_files_test
