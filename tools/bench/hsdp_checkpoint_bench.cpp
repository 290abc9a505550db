// Times checkpoints and prints one JSON line. docs/benchmarks.md says what the keys mean.
//   build/release/tools/bench/hsdp_checkpoint_bench files --ranks 2 --megabytes 1024

#include <malloc.h>
#include <torch/torch.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "dtensor/mesh_collectives.h"
#include "hsdp/hsdp.h"
#include "tools/bench/gpt.h"
#include "tools/bench/median.h"
#include "tools/bench/plain_files.h"
#include "tools/bench/ranks.h"
#include "tools/bench/temporary_folder.h"

namespace bench {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

// Larger pieces of memory come from the system each time, so that whoever reads into new memory pays for it.
constexpr int kFreshMemoryBytes = 1 << 20;
// Not counted: memory is touched for the first time and the order of units is learnt.
constexpr int64_t kWarmupSteps = 3;

struct Arguments {
  std::string mode, folder = ".";
  int64_t ranks = 2;
  // files
  int64_t megabytes = 1024, features = 2048, repeats = 3;
  bool drop_cache = false;
  // async
  int64_t width = 512, layers = 4, batch = 2, sequence = 128, steps = 40, every = 10;
};

/// Linear layers that are saved and never run.
class LayersImpl : public torch::nn::Module {
 public:
  explicit LayersImpl(const Arguments& arguments) : layers_(register_module("layers", torch::nn::ModuleList())) {
    const auto bytes = arguments.megabytes << 20, bytes_each = 4 * arguments.features * arguments.features;
    for (int64_t i = 0; i < std::max<int64_t>(1, bytes / bytes_each); ++i) {
      layers_->push_back(torch::nn::Linear(arguments.features, arguments.features));
    }
  }

 private:
  torch::nn::ModuleList layers_;
};
TORCH_MODULE(Layers);

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// Of each value the largest of all ranks.
std::vector<double> slowest(const hsdp::Environment& environment, const std::vector<double>& values) {
  auto tensor = torch::tensor(values, torch::kDouble);
  dtensor::all_reduce(*environment.mesh(), tensor, dtensor::ReduceOp::max, {"all_reduce", "slowest"});
  const auto* begin = tensor.const_data_ptr<double>();
  return {begin, begin + values.size()};
}

Json spread(const std::vector<double>& values) {
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  return {{"median", median(values)}, {"least", *least}, {"most", *most}};
}

// ---- saving and loading beside plain files ----

/// On meta.
hsdp::FullySharded<LayersImpl> sharded_layers(const Arguments& arguments, const hsdp::Environment& environment) {
  auto net = hsdp::meta_init([&] { return Layers(arguments); });
  return hsdp::fully_shard(net, {.mesh = environment.mesh(), .units = hsdp::each<torch::nn::Linear>()});
}

/// This rank's parts.
std::vector<at::Tensor> locals_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> locals;
  for (const auto& parameter : module.parameters()) locals.push_back(dtensor::DTensor(parameter).to_local());
  return locals;
}

void check_equal(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    if (!at::equal(tensors.at(i), expected[i])) throw std::runtime_error("what was read is not what was written");
  }
}

/// Saving against writing and loading against reading, in turn. Files that are read have just been written, so that the
/// system has them in memory unless they are dropped from there.
void run_files(const Arguments& arguments, const hsdp::Environment& environment, Json& line) {
  const bool leads = environment.rank() == 0;
  torch::manual_seed(0);
  auto model = sharded_layers(arguments, environment);
  model.materialize(environment.device());
  const auto locals = locals_of(model.module());
  int64_t parameters = 0;
  for (const auto& parameter : model.module().parameters()) parameters += parameter.numel();
  line["parameters"] = parameters;
  line["bytes"] = parameters * 4;

  const auto checkpoint = (fs::path(arguments.folder) / "checkpoint").string(),
             plain = (fs::path(arguments.folder) / "plain").string(),
             mine = (fs::path(plain) / ("rank-" + std::to_string(environment.rank()) + ".bin")).string();
  std::map<std::string, std::vector<double>> seconds;
  // The first repeat is not counted: ranks connect, and memory is touched for the first time.
  for (int64_t repeat = 0; repeat <= arguments.repeats; ++repeat) {
    const auto timed = [&](const std::string& name, const std::function<void()>& work) {
      // Nobody writes out what somebody else has left.
      if (leads) ::sync();
      environment.barrier();
      const auto start = Clock::now();
      work();
      const auto taken = slowest(environment, {seconds_since(start)}).front();
      if (repeat > 0) seconds[name].push_back(taken);
    };
    // Whoever goes first has the machine as the repeat before left it.
    const auto in_turn = [&](const auto& first, const auto& second) {
      if (repeat % 2 == 0) {
        first();
        second();
      } else {
        second();
        first();
      }
    };
    if (leads) fs::create_directory(plain);
    in_turn([&] { timed("save", [&] { hsdp::save({.model = model.core()}, checkpoint); }); },
            [&] { timed("write", [&] { write_plain(mine, locals); }); });
    if (arguments.drop_cache && leads) drop_cache(arguments.folder);
    in_turn(
        [&] {
          auto fresh = sharded_layers(arguments, environment);
          hsdp::TrainingState state{.model = fresh.core()};
          timed("load", [&] { hsdp::load(state, checkpoint); });
          check_equal(locals_of(fresh.module()), locals);
        },
        [&] {
          std::vector<at::Tensor> fresh;
          timed("read", [&] { fresh = read_plain(mine, locals); });
          check_equal(fresh, locals);
        });
    environment.barrier();
    if (leads) {
      fs::remove_all(checkpoint);
      fs::remove_all(plain);
    }
  }
  const auto add_ratios = [&](const char* key, const char* name, const char* other) {
    std::vector<double> ratios;
    for (size_t i = 0; i < seconds[name].size(); ++i) ratios.push_back(seconds[name][i] / seconds[other][i]);
    line[key] = spread(ratios);
  };
  for (const char* name : {"save", "write", "load", "read"}) line[std::string(name) + "_s"] = seconds[name];
  add_ratios("save_to_write", "save", "write");
  add_ratios("load_to_read", "load", "read");
}

// ---- steps during a save ----

void run_async(const Arguments& arguments, const hsdp::Environment& environment, Json& line) {
  torch::manual_seed(0);
  const GptConfig config{.width = arguments.width, .layers = arguments.layers, .sequence = arguments.sequence};
  auto net = hsdp::meta_init([&] { return Gpt(config); });
  auto model = hsdp::fully_shard(net, {.mesh = environment.mesh(), .units = hsdp::each<GptBlock>()});
  model.materialize(environment.device());
  hsdp::FusedAdamW optimizer(model.module().parameters(), torch::optim::AdamWOptions(1e-3));
  int64_t parameters = 0;
  for (const auto& parameter : model.module().parameters()) parameters += parameter.numel();
  line["parameters"] = parameters;
  line["bytes"] = parameters * 4 * 3;  // with two moments each

  hsdp::CheckpointFolder folder(environment, arguments.folder, {.keep_latest = 1, .async = true});
  hsdp::TrainingState state{.model = model.core(), .optimizers = {&optimizer}};
  torch::manual_seed(environment.rank());
  std::vector<double> steps, copies;
  std::vector<bool> overlapping;
  bool saving = false;
  for (int64_t step = 0; step < kWarmupSteps + arguments.steps; ++step) {
    const auto ids = torch::randint(kVocab, {arguments.batch, arguments.sequence}, torch::kLong);
    environment.barrier();
    const bool overlaps = saving;
    const auto start = Clock::now();
    loss_of([&](const at::Tensor& tokens) { return model->forward(tokens); }, ids).backward();
    optimizer.step();
    optimizer.zero_grad();
    ++state.progress.step;
    // A part of the step: what completes a save is not free either.
    if (folder.poll()) saving = false;
    const auto taken = seconds_since(start);
    if (step < kWarmupSteps) continue;
    steps.push_back(taken);
    overlapping.push_back(overlaps);
    if (steps.size() % static_cast<size_t>(arguments.every) != 0) continue;
    folder.finish();
    environment.barrier();
    const auto copying = Clock::now();
    folder.save(state);
    copies.push_back(seconds_since(copying));
    saving = true;
  }
  folder.finish();
  steps = slowest(environment, steps);
  copies = slowest(environment, copies);
  std::vector<double> during, others;
  for (size_t i = 0; i < steps.size(); ++i) (overlapping[i] ? during : others).push_back(steps[i] * 1e3);
  line["saves"] = copies.size();
  line["overlapping_steps"] = during.size();
  line["other_steps"] = others.size();
  line["overlapping_step_ms"] = median(during);
  line["other_step_ms"] = median(others);
  line["overlapping_to_others"] = median(during) / median(others);
  line["copy_ms"] = median(copies) * 1e3;
  line["copy_to_step"] = median(copies) * 1e3 / median(others);
}

void run_mode(const Arguments& arguments, const Rank& rank) {
  const auto environment = hsdp::init_from(rank.store, rank.rank, rank.ranks, {.backend = "gloo"});
  Json line = {{"mode", arguments.mode}, {"ranks", arguments.ranks}};
  if (arguments.mode == "files") {
    run_files(arguments, environment, line);
  } else {
    run_async(arguments, environment, line);
  }
  if (rank.rank == 0) std::cout << line.dump() << std::endl;
  hsdp::shutdown();
}

int run(Arguments arguments) {
  ::mallopt(M_MMAP_THRESHOLD, kFreshMemoryBytes);
  const TemporaryFolder folder(arguments.folder);
  arguments.folder = folder.path();
  return run_ranks(arguments.ranks, [&](const Rank& rank) { run_mode(arguments, rank); }) ? 0 : 1;
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  bench::Arguments arguments;
  CLI::App app("Times checkpoints and prints one JSON line.", "hsdp_checkpoint_bench");
  app.require_subcommand(1);
  const auto add_mode = [&](const char* name, const char* text) {
    auto* mode = app.add_subcommand(name, text);
    mode->add_option("--folder", arguments.folder, "where files are written, and removed again")
        ->check(CLI::ExistingDirectory)
        ->capture_default_str();
    return mode;
  };
  const auto number = [&](CLI::App* mode, const char* name, int64_t& value, const char* text) {
    mode->add_option(name, value, text)->check(CLI::Range(int64_t(1), int64_t(1) << 20))->capture_default_str();
  };
  auto* files = add_mode("files", "saving and loading beside plain files of the same bytes");
  number(files, "--ranks", arguments.ranks, "processes, of one thread each");
  number(files, "--megabytes", arguments.megabytes, "of all parameters, in MiB");
  number(files, "--width", arguments.features, "features of each linear layer");
  number(files, "--repeats", arguments.repeats, "counted, after one to warm up");
  files->add_flag("--drop-cache", arguments.drop_cache, "read from the disk, and not from the system's memory");
  auto* async = add_mode("async", "steps during a save in the background beside others");
  number(async, "--ranks", arguments.ranks, "processes, of one thread each");
  number(async, "--width", arguments.width, "features of the model");
  number(async, "--layers", arguments.layers, "blocks, each a unit");
  number(async, "--batch", arguments.batch, "sequences a rank and step");
  number(async, "--sequence", arguments.sequence, "tokens of a sequence");
  number(async, "--steps", arguments.steps, "counted steps, after a few to warm up");
  number(async, "--every", arguments.every, "steps from save to save; fewer than --steps");
  CLI11_PARSE(app, argc, argv);
  arguments.mode = app.get_subcommands().front()->get_name();
  if (arguments.mode == "async" && arguments.every >= arguments.steps) {
    std::cerr << "--every " << arguments.every << ", expected less than --steps " << arguments.steps << std::endl;
    return 1;
  }
  try {
    return bench::run(arguments);
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
