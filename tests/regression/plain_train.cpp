// Trains as libtorch alone does, in one process: the plain module with libtorch's optimizers and clipping. It reads the
// configuration of hsdp_train and writes the same metrics, and is what hsdp_train is held to. `parallelism` says
// nothing to one process; other settings that it does not honour are refused.

#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <exception>
#include <fstream>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "apps/config.h"
#include "apps/data_loader.h"
#include "apps/failure.h"
#include "apps/lr_schedule.h"
#include "apps/metrics.h"
#include "apps/optimizer_over.h"
#include "dtensor/error.h"
#include "hsdp/launch/device.h"
#include "hsdp/launch/launcher_env.h"
#include "models/transformer.h"

namespace {

using Clock = std::chrono::steady_clock;

/// Settings that are not honoured, each with the values that ask for nothing.
const std::map<std::string, std::vector<std::string>> kOff = {
    {"training.activation_checkpoint", {"none"}},
    {"training.sample_bytes", {"0"}},
    {"mixed_precision.param_dtype", {"default", "float32"}},
    {"mixed_precision.reduce_dtype", {"default", "float32"}},
    {"mixed_precision.output_dtype", {"default", "float32"}},
    {"offload.to_host", {"false"}},
    {"grad_scaler.enabled", {"auto", "false"}},
    {"checkpoint.folder", {"none"}},
    {"checkpoint.load", {"\"auto\"", "\"none\""}},
};

void refuse_what_is_not_honoured(const apps::Config& config) {
  std::vector<std::string> problems;
  size_t known = 0;
  for (const auto& [name, value] : apps::config_values(config)) {
    known += kOff.count(name);
    const auto off = kOff.find(name);
    if (off == kOff.end() || std::find(off->second.begin(), off->second.end(), value) != off->second.end()) continue;
    problems.push_back(c10::str("[plain_train] ", name, " is ", value, ", expected ", c10::Join(" or ", off->second),
                                ": it trains one plain module in float32; hsdp_train does what this asks for"));
  }
  TORCH_INTERNAL_ASSERT(known == kOff.size(), "a setting that is refused has another name now");
  const auto ranks = hsdp::read_launcher_env(hsdp::process_env).world_size;
  if (ranks != 1) {
    problems.push_back(c10::str("[plain_train] launched with ", ranks, " ranks, expected one process"));
  }
  if (!problems.empty()) throw dtensor::ValueError(std::string(c10::Join("\n", problems)));
}

torch::Device device_of(apps::CommBackend backend) {
  const bool is_there = torch::cuda::is_available();
  if (backend == apps::CommBackend::nccl && !is_there) {
    dtensor::raise<dtensor::ValueError>("plain_train",
                                        "comm.backend is nccl and no CUDA device is visible, expected "
                                        "one; set comm.backend to gloo or auto");
  }
  return is_there && backend != apps::CommBackend::gloo ? torch::Device(torch::kCUDA, 0) : torch::Device(torch::kCPU);
}

/// Fills the parameters from a .safetensors file that has all of them, in float32, and nothing else.
void read_weights(const std::string& path, torch::nn::Module& model) {
  const auto refuse = [&](const auto&... what) { dtensor::raise<dtensor::ValueError>("plain_train", path, what...); };
  if (!path.ends_with(".safetensors")) refuse(" as checkpoint.weights, expected one .safetensors file");
  std::ifstream file(path, std::ios::binary);
  uint64_t length = 0;
  if (!file.read(reinterpret_cast<char*>(&length), sizeof(length))) refuse(" cannot be read");
  if (length > (uint64_t(1) << 27)) refuse(" has a header of ", length, " bytes, expected a .safetensors file");
  std::string text(length, ' ');
  if (!file.read(text.data(), std::streamsize(length))) refuse(" is cut short");
  auto header = nlohmann::json::parse(text);
  header.erase("__metadata__");
  const torch::NoGradGuard no_grad;
  for (const auto& item : model.named_parameters()) {
    const auto& parameter = item.value();
    const auto found = header.find(item.key());
    if (found == header.end()) refuse(" lacks ", item.key());
    if (found->at("dtype") != "F32" || found->at("shape").get<std::vector<int64_t>>() != parameter.sizes()) {
      refuse(": ", item.key(), " is ", found->dump(), ", expected F32 of shape ", parameter.sizes());
    }
    auto values = torch::empty(parameter.sizes());
    file.seekg(std::streamoff(sizeof(length) + length + found->at("data_offsets").at(0).get<uint64_t>()));
    if (!file.read(static_cast<char*>(values.data_ptr()), std::streamsize(values.nbytes()))) refuse(" is cut short");
    parameter.copy_(values);
    header.erase(found);
  }
  if (!header.empty()) refuse(" has ", header.begin().key(), ", which the model lacks");
}

/// The fused optimizers are to give the numbers of the stock ones.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(const apps::OptimizerConfig& config,
                                                        const torch::nn::Module& model) {
  if (config.name == apps::OptimizerName::sgd || config.name == apps::OptimizerName::fused_sgd) {
    return apps::optimizer_over<torch::optim::SGD>(
        model, config.no_decay,
        torch::optim::SGDOptions(config.lr).momentum(config.momentum).weight_decay(config.weight_decay));
  }
  return apps::optimizer_over<torch::optim::AdamW>(model, config.no_decay,
                                                   torch::optim::AdamWOptions(config.lr)
                                                       .betas({config.beta1, config.beta2})
                                                       .eps(config.eps)
                                                       .weight_decay(config.weight_decay));
}

void train(const apps::Config& config) {
  refuse_what_is_not_honoured(config);
  if (config.metrics.count_memory) hsdp::count_host_memory();
  const auto& training = config.training;
  const auto device = device_of(config.comm.backend);
  const apps::DataLoader data(apps::TokenFile(config.data.path, config.data.format),
                              {.global_batch_size = training.global_batch_size,
                               .sequence_length = training.sequence_length,
                               .vocab_size = config.model.vocab_size,
                               .seed = training.seed,
                               .micro_batches = training.gradient_accumulation});
  torch::manual_seed(uint64_t(training.seed));
  models::Transformer model(config.model);
  if (!config.checkpoint.weights.empty()) read_weights(config.checkpoint.weights, *model);
  model->to(device);
  const auto parameters = model->parameters();
  const auto optimizer = make_optimizer(config.optimizer, *model);
  apps::RunFolder folder(config);

  const double max_norm = training.max_norm > 0.0 ? training.max_norm : std::numeric_limits<double>::infinity();
  const int64_t tokens_per_step = training.global_batch_size * training.sequence_length;
  const auto start = Clock::now();
  int64_t logged_step = 0;
  double logged_seconds = 0.0;
  hsdp::reset_peak_memory(device);
  for (int64_t step = 1; step <= training.steps; ++step) {
    apps::StepMetrics metrics{.step = step, .tokens = step * tokens_per_step};
    metrics.lr = config.optimizer.lr * apps::lr_factor(config.lr_schedule, step - 1, training.steps);
    for (auto& group : optimizer->param_groups()) group.options().set_lr(metrics.lr);
    optimizer->zero_grad();
    const auto batch = data.batch(step - 1);
    const auto inputs = batch.inputs.chunk(training.gradient_accumulation);
    const auto targets = batch.targets.chunk(training.gradient_accumulation);
    for (size_t i = 0; i < inputs.size(); ++i) {
      const auto logits = model->forward(inputs[i].to(device));
      const auto loss = torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets[i].to(device).flatten()) /
                        training.gradient_accumulation;
      loss.backward();
      metrics.loss += loss.item<double>();
    }
    metrics.grad_norm = torch::nn::utils::clip_grad_norm_(parameters, max_norm);
    const bool finite = std::isfinite(metrics.loss) && std::isfinite(metrics.grad_norm);
    if (finite) optimizer->step();
    if (!finite || step == 1 || step == training.steps || step % config.metrics.log_every == 0) {
      metrics.peak_memory_bytes = hsdp::peak_memory_bytes(device);
      hsdp::reset_peak_memory(device);
      metrics.seconds = std::chrono::duration<double>(Clock::now() - start).count();
      metrics.tokens_per_second = double((step - logged_step) * tokens_per_step) / (metrics.seconds - logged_seconds);
      logged_step = step;
      logged_seconds = metrics.seconds;
      folder.append(metrics);
      std::cout << apps::to_console(metrics, training.steps) << std::endl;
    }
    if (!finite) {
      dtensor::raise<apps::NonFiniteError>("plain_train", "step ", step, ": loss is ", metrics.loss,
                                           " and grad_norm is ", metrics.grad_norm, ", expected finite numbers");
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::string path;
  std::vector<std::string> overrides;
  CLI::App app("Trains a transformer language model in one process with libtorch alone.", "plain_train");
  app.add_option("--config", path, "YAML file with the settings of the run")->required();
  app.add_option("--set", overrides, "section.key=value, laid over the file; may be repeated")->allow_extra_args(false);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& request) {
    return app.exit(request);
  } catch (const CLI::ParseError& error) {
    std::cerr << "[command line] " << error.what() << "; plain_train --help lists the options" << std::endl;
    return int(apps::ExitCode::user_mistake);
  }
  try {
    train(apps::read_config(path, overrides));
  } catch (...) {
    return int(apps::report(std::current_exception(), /*rank=*/0, apps::Teller::first));
  }
  return int(apps::ExitCode::success);
}
