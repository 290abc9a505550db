// Times training steps of a byte-level GPT and prints one JSON line. docs/benchmarks.md says what the keys mean.
//   build/release/tools/bench/hsdp_bench hsdp --ranks 2 --width 256 --layers 4

#include <sys/resource.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "dtensor/error.h"
#include "hsdp/hsdp.h"
#include "hsdp/launch/device.h"
#include "tools/bench/bench_device.h"
#include "tools/bench/gpt.h"
#include "tools/bench/median.h"
#include "tools/bench/ranks.h"

namespace bench {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kMebi = 1024.0 * 1024.0;
// Not counted: memory is touched for the first time and the order of units is learnt.
constexpr int64_t kWarmupSteps = 3;
const torch::optim::AdamWOptions kAdamW(1e-3);

struct Arguments {
  std::string mode;
  int64_t ranks = 1, width = 64, layers = 2, batch = 1, sequence = 32, vocabulary = kVocab, steps = 20;
  bool memory = false, bf16 = false, on_gpu = false;
};

/// Models that GPUs are measured with: the shapes of GPT-3's with an untied head, and a batch that fits into 80 GB with
/// the whole state on one GPU.
struct Size {
  int64_t width, layers, batch;
};
const std::map<std::string, Size> kSizes = {
    {"small", {768, 12, 16}}, {"medium", {1024, 24, 16}}, {"large", {2048, 24, 8}}};
constexpr int64_t kSizedSequence = 1024, kSizedVocabulary = 50304;

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

at::Tensor random_tokens(const Arguments& arguments, c10::Device device) {
  return torch::randint(arguments.vocabulary, {arguments.batch, arguments.sequence},
                        at::TensorOptions(device).dtype(at::kLong));
}

/// Floating point operations of a step of one rank, in the usual way of counting: six a token and parameter that is
/// multiplied with, so not those of embeddings, and attention over the whole sequence, of which a causal one computes
/// half.
double model_flops(const Arguments& arguments, int64_t parameters) {
  const auto tokens = double(arguments.batch * arguments.sequence);
  const auto multiplied = parameters - (arguments.vocabulary + arguments.sequence) * arguments.width;
  return tokens * (6.0 * double(multiplied) + 12.0 * double(arguments.layers * arguments.width * arguments.sequence));
}

/// Adds what the counted steps took to the line, which has the number of parameters. `warmed_up` runs before the first
/// of them.
template <class Forward, class WarmedUp>
void run_steps(Json& line, const Arguments& arguments, const Rank& rank, c10::Device device,
               hsdp::FusedAdamW& optimizer, const Forward& forward, const WarmedUp& warmed_up) {
  torch::manual_seed(rank.rank);
  StepTimes steps(device);
  double processor = 0;
  for (int64_t step = 0; step < kWarmupSteps + arguments.steps; ++step) {
    const auto ids = random_tokens(arguments, device);
    if (step == kWarmupSteps) {
      synchronize(device);
      rank.meet("timing");
      warmed_up();
      processor = processor_ms();
    }
    if (step >= kWarmupSteps) steps.begin();
    loss_of(forward, ids).backward();
    optimizer.step();
    optimizer.zero_grad();
    if (step >= kWarmupSteps) steps.end();
  }
  const auto times = steps.milliseconds();
  const double step = median(times);
  line["step_ms"] = step;
  line["fastest_step_ms"] = *std::min_element(times.begin(), times.end());
  line["processor_ms"] = (processor_ms() - processor) / double(times.size());
  line["tokens_per_second"] = double(arguments.ranks * arguments.batch * arguments.sequence) / step * 1e3;
  line["model_tflops_a_rank"] = model_flops(arguments, line.at("parameters").get<int64_t>()) / step * 1e-9;
}

/// What the device's allocator counted since the last reset.
void add_device_memory(Json& line, c10::Device device) {
  if (device.is_cpu()) return;
  line["peak_allocated_mib"] = double(hsdp::peak_memory_bytes(device)) / kMebi;
  line["peak_reserved_mib"] = double(peak_reserved_bytes(device)) / kMebi;
}

/// On the host without talking to anybody; on a GPU of its own.
hsdp::Environment join(const Arguments& arguments, const Rank& rank) {
  auto environment =
      hsdp::init_from(rank.store, rank.rank, rank.ranks, {.backend = arguments.on_gpu ? "nccl" : "gloo"});
  if (arguments.on_gpu) allow_tf32();
  return environment;
}

/// Every rank has the whole model and knows of no other.
void run_alone(const Arguments& arguments, const GptConfig& config, const Rank& rank, Json& line) {
  c10::Device device = at::kCPU;
  if (arguments.on_gpu) device = join(arguments, rank).device();
  line["device_name"] = device_name(device);
  line["start_rss_mib"] = peak_rss_mib();
  torch::manual_seed(0);
  Gpt net(config);
  net->to(device);
  hsdp::FusedAdamW optimizer(net->parameters(), kAdamW);
  int64_t parameters = 0;
  for (const auto& parameter : net->parameters()) parameters += parameter.numel();
  line["parameters"] = parameters;
  const auto forward = [&](const at::Tensor& ids) { return net->forward(ids); };
  run_steps(line, arguments, rank, device, optimizer, forward, [&] { hsdp::reset_peak_memory(device); });
  line["peak_rss_mib"] = peak_rss_mib();
  add_device_memory(line, device);
  if (!arguments.memory) return;
  // Gradients are there already, so that what comes on top are activations and what operators need for a moment.
  const auto ids = random_tokens(arguments, device);
  loss_of(forward, ids).backward();
  const auto before = hsdp::memory_bytes(device);
  hsdp::reset_peak_memory(device);
  loss_of(forward, ids).backward();
  line["activation_mib"] = double(hsdp::peak_memory_bytes(device) - before) / kMebi;
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
  const auto environment = join(arguments, rank);
  const auto device = environment.device();
  line["device_name"] = device_name(device);
  line["start_rss_mib"] = peak_rss_mib();
  torch::manual_seed(0);
  auto net = hsdp::meta_init([&] { return Gpt(config); });
  const auto mesh = arguments.mode == "hsdp-ddp" ? environment.make_mesh({rank.ranks, 1}, {"replicate", "shard"})
                                                 : environment.mesh();
  hsdp::FullyShardOptions options;
  options.mesh = mesh;
  options.units = hsdp::each<GptBlock>();
  if (arguments.bf16) options.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  auto model = hsdp::fully_shard(net, options);
  if (arguments.on_gpu) {
    // Any values do, and the host would take longer to make them than the steps take.
    model.to_empty(device);
    torch::NoGradGuard no_grad;
    for (auto& parameter : model.module().parameters()) torch::nn::init::normal_(parameter, 0.0, 0.02);
  } else {
    model.materialize(device);
  }
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
      line, arguments, rank, device, optimizer, [&](const at::Tensor& ids) { return model->forward(ids); },
      [&] {
        dtensor::reset_collective_counts();
        scheduler->reset_peaks();
        hsdp::reset_peak_memory(device);
      });
  line["peak_rss_mib"] = peak_rss_mib();
  add_device_memory(line, device);
  line["units"] = units.size();
  line["peak_gathered_mib"] = double(scheduler->peaks().bytes) / kMebi;
  line["peak_gathered_units"] = scheduler->peaks().units;
  line["shard_mib"] = double(shard_bytes) / kMebi;
  line["two_units_mib"] = double(unit_bytes[0] + (unit_bytes.size() > 1 ? unit_bytes[1] : 0)) / kMebi;
  if (arguments.memory) line["peak_tensor_mib"] = double(hsdp::peak_memory_bytes(device)) / kMebi;
  add_counts(line, arguments);
  hsdp::shutdown();
}

void run_mode(const Arguments& arguments, const Rank& rank) {
  if (arguments.width > 64 && arguments.width % 64 != 0) {
    dtensor::raise<dtensor::ValueError>("hsdp_bench", "width ", arguments.width,
                                        ", expected at most 64, or a multiple of it: heads have 64 features");
  }
  if (arguments.bf16 && arguments.mode == "alone") {
    dtensor::raise<dtensor::ValueError>("hsdp_bench",
                                        "--bf16 with alone, expected a sharded mode: the plain module has no "
                                        "mixed precision");
  }
  const GptConfig config{.width = arguments.width,
                         .layers = arguments.layers,
                         .sequence = arguments.sequence,
                         .vocabulary = arguments.vocabulary};
  Json line = {{"mode", arguments.mode},
               {"ranks", arguments.ranks},
               {"width", arguments.width},
               {"layers", arguments.layers},
               {"batch", arguments.batch},
               {"sequence", arguments.sequence},
               {"vocabulary", arguments.vocabulary},
               {"device", arguments.on_gpu ? "cuda" : "host"},
               {"bf16", arguments.bf16}};
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
    return app.add_option(name, value, text)->check(CLI::Range(int64_t(1), int64_t(1) << 20))->capture_default_str();
  };
  number("--ranks", arguments.ranks, "processes, of one thread each; with cuda each on a GPU of its own");
  const auto* width = number("--width", arguments.width, "features of the model");
  const auto* layers = number("--layers", arguments.layers, "blocks, each a unit");
  const auto* batch = number("--batch", arguments.batch, "sequences a rank and step");
  const auto* sequence = number("--sequence", arguments.sequence, "tokens of a sequence");
  const auto* vocabulary = number("--vocabulary", arguments.vocabulary, "different tokens");
  number("--steps", arguments.steps, "counted steps, after a few to warm up");
  std::string size, device = "host";
  app.add_option("--size", size, "small, medium or large: a model by name; what other options say counts")
      ->check(CLI::IsMember({"small", "medium", "large"}));
  app.add_option("--device", device, "host or cuda")->check(CLI::IsMember({"host", "cuda"}))->capture_default_str();
  app.add_flag("--bf16", arguments.bf16, "compute in bf16, reduce in fp32");
  app.add_flag("--memory", arguments.memory, "count the bytes of tensors as well");
  CLI11_PARSE(app, argc, argv);
  if (!size.empty()) {
    const auto& named = bench::kSizes.at(size);
    const auto unless_given = [](const CLI::Option* option, int64_t& value, int64_t by_name) {
      if (option->count() == 0) value = by_name;
    };
    unless_given(width, arguments.width, named.width);
    unless_given(layers, arguments.layers, named.layers);
    unless_given(batch, arguments.batch, named.batch);
    unless_given(sequence, arguments.sequence, bench::kSizedSequence);
    unless_given(vocabulary, arguments.vocabulary, bench::kSizedVocabulary);
  }
  arguments.on_gpu = device == "cuda";
  if (arguments.memory && !arguments.on_gpu) hsdp::count_host_memory();
  const bool fine =
      bench::run_ranks(arguments.ranks, [&](const bench::Rank& rank) { bench::run_mode(arguments, rank); });
  return fine ? 0 : 1;
}
