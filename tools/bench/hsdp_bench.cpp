// Times training steps of a byte-level GPT and prints one JSON line. docs/benchmarks.md says what the keys mean.
//   build/release/tools/bench/hsdp_bench hsdp --ranks 2 --width 256 --layers 4

#include <sys/resource.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "dtensor/error.h"
#include "hsdp/hsdp.h"
#include "hsdp/launch/device.h"
#include "tools/bench/gpt.h"
#include "tools/bench/median.h"
#include "tools/bench/ranks.h"

namespace bench {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

constexpr double kMebi = 1024.0 * 1024.0;
// Not counted: memory is touched for the first time and the order of units is learnt.
constexpr int64_t kWarmupSteps = 3;
const torch::optim::AdamWOptions kAdamW(1e-3);

struct Arguments {
  std::string mode;
  int64_t ranks = 1, width = 64, layers = 2, batch = 1, sequence = 32, steps = 20;
  bool memory = false;
};

/// Of all threads of this process.
double processor_ms() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto ms = [](const timeval& time) { return double(time.tv_sec) * 1e3 + double(time.tv_usec) * 1e-3; };
  return ms(usage.ru_utime) + ms(usage.ru_stime);
}

int64_t peak_rss_mib() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss / 1024;
}

/// Adds what the counted steps took to the line. `warmed_up` runs before the first of them.
template <class Forward, class WarmedUp>
void run_steps(Json& line, const Arguments& arguments, const Rank& rank, hsdp::FusedAdamW& optimizer,
               const Forward& forward, const WarmedUp& warmed_up) {
  torch::manual_seed(rank.rank);
  std::vector<double> times;
  double processor = 0;
  for (int64_t step = 0; step < kWarmupSteps + arguments.steps; ++step) {
    const auto ids = torch::randint(kVocab, {arguments.batch, arguments.sequence}, torch::kLong);
    if (step == kWarmupSteps) {
      rank.meet("timing");
      warmed_up();
      processor = processor_ms();
    }
    const auto start = Clock::now();
    loss_of(forward, ids).backward();
    optimizer.step();
    optimizer.zero_grad();
    if (step >= kWarmupSteps) {
      times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
    }
  }
  const double step = median(times);
  line["step_ms"] = step;
  line["fastest_step_ms"] = *std::min_element(times.begin(), times.end());
  line["processor_ms"] = (processor_ms() - processor) / double(times.size());
  line["tokens_per_second"] = double(arguments.ranks * arguments.batch * arguments.sequence) / step * 1e3;
}

/// Every rank has the whole model and knows of no other.
void run_alone(const Arguments& arguments, const GptConfig& config, const Rank& rank, Json& line) {
  line["start_rss_mib"] = peak_rss_mib();
  torch::manual_seed(0);
  Gpt net(config);
  hsdp::FusedAdamW optimizer(net->parameters(), kAdamW);
  int64_t parameters = 0;
  for (const auto& parameter : net->parameters()) parameters += parameter.numel();
  line["parameters"] = parameters;
  const auto forward = [&](const at::Tensor& ids) { return net->forward(ids); };
  run_steps(line, arguments, rank, optimizer, forward, [] {});
  line["peak_rss_mib"] = peak_rss_mib();
  if (!arguments.memory) return;
  // Gradients are there already, so that what comes on top are activations and what operators need for a moment.
  const auto ids = torch::randint(kVocab, {arguments.batch, arguments.sequence}, torch::kLong);
  loss_of(forward, ids).backward();
  const auto before = hsdp::memory_bytes(at::kCPU);
  hsdp::reset_peak_memory(at::kCPU);
  loss_of(forward, ids).backward();
  line["activation_mib"] = double(hsdp::peak_memory_bytes(at::kCPU) - before) / kMebi;
}

void add_counts(Json& line, const Arguments& arguments) {
  const auto counts = dtensor::collective_counts();
  const auto a_step = [&](int64_t count) { return double(count) / double(arguments.steps); };
  line["collectives_a_step"] = {{"all_gathers", a_step(counts.all_gathers)},
                                {"reduce_scatters", a_step(counts.reduce_scatters)},
                                {"all_reduces", a_step(counts.all_reduces)},
                                {"all_gather_mib", a_step(counts.all_gather_bytes) / kMebi},
                                {"reduce_scatter_mib", a_step(counts.reduce_scatter_bytes) / kMebi},
                                {"all_reduce_mib", a_step(counts.all_reduce_bytes) / kMebi}};
}

/// Fully sharded or, for hsdp-ddp, replicated on every rank; a unit a block and the rest in the root, as the peer does.
void run_sharded(const Arguments& arguments, const GptConfig& config, const Rank& rank, Json& line) {
  const auto environment = hsdp::init_from(rank.store, rank.rank, rank.ranks, {.backend = "gloo"});
  line["start_rss_mib"] = peak_rss_mib();
  torch::manual_seed(0);
  auto net = hsdp::meta_init([&] { return Gpt(config); });
  const auto mesh = arguments.mode == "hsdp-ddp" ? environment.make_mesh({rank.ranks, 1}, {"replicate", "shard"})
                                                 : environment.mesh();
  auto model = hsdp::fully_shard(net, {.mesh = mesh, .units = hsdp::each<GptBlock>()});
  model.materialize(environment.device());
  hsdp::FusedAdamW optimizer(model.module().parameters(), kAdamW);

  const auto& units = model.core()->units();
  auto scheduler = model.core()->scheduler();
  int64_t parameters = 0, shard_bytes = 0;
  std::vector<int64_t> unit_bytes;
  for (const auto& unit : units) {
    unit_bytes.push_back(unit->unsharded_bytes());
    for (const auto& parameter : unit->parameters()) {
      parameters += parameter.tensor().numel();
      shard_bytes += static_cast<int64_t>(parameter.padded_shard().nbytes());
    }
  }
  std::sort(unit_bytes.rbegin(), unit_bytes.rend());
  line["parameters"] = parameters;
  run_steps(
      line, arguments, rank, optimizer, [&](const at::Tensor& ids) { return model->forward(ids); },
      [&] {
        dtensor::reset_collective_counts();
        scheduler->reset_peaks();
        hsdp::reset_peak_memory(at::kCPU);
      });
  line["peak_rss_mib"] = peak_rss_mib();
  line["units"] = units.size();
  line["peak_gathered_mib"] = double(scheduler->peaks().bytes) / kMebi;
  line["peak_gathered_units"] = scheduler->peaks().units;
  line["shard_mib"] = double(shard_bytes) / kMebi;
  line["two_units_mib"] = double(unit_bytes[0] + (unit_bytes.size() > 1 ? unit_bytes[1] : 0)) / kMebi;
  if (arguments.memory) line["peak_tensor_mib"] = double(hsdp::peak_memory_bytes(at::kCPU)) / kMebi;
  add_counts(line, arguments);
  hsdp::shutdown();
}

void run_mode(const Arguments& arguments, const Rank& rank) {
  if (arguments.width > 64 && arguments.width % 64 != 0) {
    dtensor::raise<dtensor::ValueError>("hsdp_bench", "width ", arguments.width,
                                        ", expected at most 64, or a multiple of it: heads have 64 features");
  }
  const GptConfig config{.width = arguments.width, .layers = arguments.layers, .sequence = arguments.sequence};
  Json line = {{"mode", arguments.mode},     {"ranks", arguments.ranks}, {"width", arguments.width},
               {"layers", arguments.layers}, {"batch", arguments.batch}, {"sequence", arguments.sequence}};
  if (arguments.mode == "alone") {
    run_alone(arguments, config, rank, line);
  } else {
    run_sharded(arguments, config, rank, line);
  }
  if (rank.rank == 0) std::cout << line.dump() << std::endl;
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  bench::Arguments arguments;
  CLI::App app("Times training steps and prints one JSON line.", "hsdp_bench");
  app.add_option("mode", arguments.mode,
                 "hsdp: fully sharded; hsdp-ddp: replicated; alone: unconnected copies of the plain module")
      ->required()
      ->check(CLI::IsMember({"hsdp", "hsdp-ddp", "alone"}));
  const auto number = [&](const char* name, int64_t& value, const char* text) {
    app.add_option(name, value, text)->check(CLI::Range(int64_t(1), int64_t(1) << 20))->capture_default_str();
  };
  number("--ranks", arguments.ranks, "processes, of one thread each");
  number("--width", arguments.width, "features of the model");
  number("--layers", arguments.layers, "blocks, each a unit");
  number("--batch", arguments.batch, "sequences a rank and step");
  number("--sequence", arguments.sequence, "tokens of a sequence");
  number("--steps", arguments.steps, "counted steps, after a few to warm up");
  app.add_flag("--memory", arguments.memory, "count the bytes of tensors as well");
  CLI11_PARSE(app, argc, argv);
  if (arguments.memory) hsdp::count_host_memory();
  const bool fine =
      bench::run_ranks(arguments.ranks, [&](const bench::Rank& rank) { bench::run_mode(arguments, rank); });
  return fine ? 0 : 1;
}
