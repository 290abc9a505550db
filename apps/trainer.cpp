#include "apps/trainer.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <iostream>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <variant>

#include "apps/agreement.h"
#include "apps/checkpointing.h"
#include "apps/failure.h"
#include "apps/optimizer_over.h"
#include "apps/profiling.h"
#include "hsdp/hsdp.h"
#include "hsdp/launch/device.h"
#include "models/transformer.h"

namespace apps {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

hsdp::FullyShardOptions sharding(const Config& config, const hsdp::Environment& environment) {
  hsdp::FullyShardOptions options;
  const auto& [replicate, shard, reshard, prefetch] = config.parallelism;
  options.mesh = environment.mesh();
  if (replicate > 1) {
    options.mesh = environment.make_mesh({replicate, shard_ranks(config.parallelism, environment.world_size())},
                                         {"replicate", "shard"});
  }
  options.units = hsdp::each<models::TransformerBlock>();
  if (reshard) {
    std::visit([&](auto value) { options.reshard_after_forward = hsdp::ReshardAfterForward(value); }, *reshard);
  }
  options.prefetch = prefetch;
  options.mixed_precision.param_dtype = config.mixed_precision.param_dtype;
  options.mixed_precision.reduce_dtype = config.mixed_precision.reduce_dtype;
  options.mixed_precision.output_dtype = config.mixed_precision.output_dtype;
  options.offload = {.to_host = config.offload.to_host, .pin_memory = config.offload.pin_memory};
  for (const auto& pattern : config.training.activation_checkpoint) {
    options.activation_checkpoint = options.activation_checkpoint | hsdp::each(pattern);
  }
  return options;
}

hsdp::GradScaler make_grad_scaler(const Config& config) {
  hsdp::GradScalerState state;
  state.scale = config.grad_scaler.scale;
  state.growth_interval = config.grad_scaler.growth_interval;
  return hsdp::GradScaler(state,
                          config.grad_scaler.enabled.value_or(config.mixed_precision.param_dtype == torch::kHalf));
}

template <class Model>
std::unique_ptr<torch::optim::Optimizer> make_optimizer(const OptimizerConfig& config, const Model& model) {
  const auto adamw = torch::optim::AdamWOptions(config.lr)
                         .betas({config.beta1, config.beta2})
                         .eps(config.eps)
                         .weight_decay(config.weight_decay);
  const auto sgd = torch::optim::SGDOptions(config.lr).momentum(config.momentum).weight_decay(config.weight_decay);
  switch (config.name) {
    case OptimizerName::adamw:
      return optimizer_over<torch::optim::AdamW>(model, config.no_decay, adamw);
    case OptimizerName::fused_adamw:
      return optimizer_over<hsdp::FusedAdamW>(model, config.no_decay, adamw);
    case OptimizerName::sgd:
      return optimizer_over<torch::optim::SGD>(model, config.no_decay, sgd);
    case OptimizerName::fused_sgd:
      return optimizer_over<hsdp::FusedSGD>(model, config.no_decay, sgd);
  }
  TORCH_INTERNAL_ASSERT(false, "optimizer ", int(config.name));
}

void set_lr(torch::optim::Optimizer& optimizer, double lr) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(lr);
}

torch::Tensor as_scalar(const hsdp::Environment& environment, double value) {
  return torch::full({1}, value, torch::dtype(torch::kFloat64).device(environment.device()));
}

/// Numbers combined over all ranks, on the host.
torch::Tensor all_reduced(const hsdp::Environment& environment, const torch::Tensor& values, dtensor::ReduceOp op,
                          const char* subject) {
  environment.communicator()->all_reduce(values, op, {"all_reduce", subject})->wait();
  return values.cpu();
}

/// Adds what was communicated since the last reset.
void add_collectives(dtensor::CollectiveCounts& sums) {
  const auto counts = dtensor::collective_counts();
  sums.all_gathers += counts.all_gathers;
  sums.reduce_scatters += counts.reduce_scatters;
  sums.all_reduces += counts.all_reduces;
  sums.broadcasts += counts.broadcasts;
  sums.barriers += counts.barriers;
  sums.all_gather_bytes += counts.all_gather_bytes;
  sums.reduce_scatter_bytes += counts.reduce_scatter_bytes;
  sums.all_reduce_bytes += counts.all_reduce_bytes;
}

/// 1 where this rank was told to stop.
torch::Tensor as_scalar(const hsdp::Environment& environment, const StopSignal* stop) {
  return as_scalar(environment, stop && stop->received() ? 1.0 : 0.0);
}

/// Forwards and backwards of this rank's part of the global batch. Returns the mean loss over it.
template <class Model>
torch::Tensor accumulate_gradients(Model& model, hsdp::GradScaler& scaler, const Batch& batch, int64_t micro_batches,
                                   torch::Device device) {
  auto total = torch::zeros({1}, torch::dtype(torch::kFloat64).device(device));
  const auto inputs = batch.inputs.chunk(micro_batches), targets = batch.targets.chunk(micro_batches);
  for (int64_t i = 0; i < micro_batches; ++i) {
    model.set_requires_gradient_sync(i + 1 == micro_batches);
    const torch::Tensor logits = model(inputs[size_t(i)].to(device));
    const torch::Tensor loss =
        torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets[size_t(i)].to(device).flatten()) /
        micro_batches;
    scaler.scale(loss).backward();
    total += loss.detach();
  }
  return total;
}

/// Bytes as text: what a terminal cannot show becomes '?'.
std::string printable(const torch::Tensor& ids) {
  std::string text;
  for (int64_t i = 0; i < ids.numel(); ++i) {
    const auto byte = ids[i].item<int64_t>();
    const bool shown = (byte >= 0x20 && byte < 0x7f) || byte == '\n' || byte == '\t';
    text += shown ? char(byte) : '?';
  }
  return text;
}

/// Samples the configured number of bytes after the prompt. The model's parameters are gathered as they are read, so
/// every rank takes part and draws the same bytes.
template <class Model>
std::string sample(const TrainingConfig& config, Model& model, torch::Device device) {
  const auto& prompt = config.sample_prompt;
  std::vector<int64_t> ids;
  for (const char c : prompt) ids.push_back(int64_t(static_cast<unsigned char>(c)));
  const torch::Tensor start = torch::tensor(ids, torch::kInt64).unsqueeze(0).to(device);
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t(config.seed));
  return printable(
      model->generate(start, config.sample_bytes, config.sample_temperature, generator).squeeze(0).to(torch::kCPU));
}

}  // namespace

void train(const Config& config, const hsdp::Environment& environment, const DataLoader& data,
           const OpenRunFolder& open_folder, const StopSignal* stop) {
  const auto& training = config.training;
  const torch::Device device = environment.device();
  std::optional<Profiling> profiling;
  agree(environment, [&] { profiling.emplace(config.profile, environment); });
  torch::manual_seed(uint64_t(training.seed));
  auto net = hsdp::meta_init([&] { return models::Transformer(config.model); });
  auto model = hsdp::fully_shard(net, sharding(config, environment));
  const auto parameters = model->parameters();
  const auto optimizer = make_optimizer(config.optimizer, model);
  auto scaler = make_grad_scaler(config);

  Checkpointing checkpoints(config, environment, data);
  hsdp::TrainingState state{.model = model.core(), .optimizers = {optimizer.get()}, .grad_scaler = &scaler};
  checkpoints.start(state);
  auto& progress = state.progress;
  const auto folder = open_folder(progress.step);
  if (folder) {
    int64_t count = 0;
    for (const auto& parameter : parameters) count += parameter.numel();
    std::cout << "model: " << count << " parameters on " << model.core()->mesh()->to_string()
              << "\ndata: " << data.file().path() << ", " << data.file().size() << " tokens, " << data.steps_per_epoch()
              << " steps an epoch\nrun folder: " << config.metrics.folder;
    if (folder->replaced()) std::cout << ", replacing the metrics of a former run";
    if (folder->kept_lines() > 0) std::cout << ", after " << folder->kept_lines() << " lines of metrics";
    std::cout << std::endl;
    if (progress.step >= training.steps) {
      std::cout << "training: nothing to do, training.steps is " << training.steps << " and step " << progress.step
                << " is done" << std::endl;
    }
  }

  const double max_norm = training.max_norm > 0.0 ? training.max_norm : std::numeric_limits<double>::infinity();
  const int64_t tokens_per_step = training.global_batch_size * training.sequence_length;
  const double former_seconds = folder ? folder->kept_seconds() : 0.0;
  const auto start = Clock::now();
  double logged_seconds = former_seconds;
  int64_t logged_tokens = progress.tokens;
  bool stopping =
      stop &&
      all_reduced(environment, as_scalar(environment, stop), dtensor::ReduceOp::max, "stop signal").item<double>() >
          0.0;
  hsdp::reset_peak_memory(device);
  while (progress.step < training.steps && !stopping) {
    StepMetrics metrics;
    metrics.step = progress.step + 1;
    profiling->begin(metrics.step);
    metrics.ranks = environment.world_size();
    metrics.lr = config.optimizer.lr * lr_factor(config.lr_schedule, progress.step, training.steps);
    set_lr(*optimizer, metrics.lr);

    dtensor::reset_collective_counts();
    optimizer->zero_grad();
    const auto total =
        accumulate_gradients(model, scaler, data.batch(progress.data_position), training.gradient_accumulation, device);
    scaler.unscale_(*optimizer);
    metrics.grad_norm = hsdp::clip_grad_norm_(parameters, max_norm);
    add_collectives(metrics.collectives);
    const auto sums =
        all_reduced(environment, torch::cat({total, as_scalar(environment, stop)}), dtensor::ReduceOp::sum, "loss");
    // Every rank has as many tokens, so the mean over ranks is the mean over the global batch.
    metrics.loss = sums[0].item<double>() / double(environment.world_size());
    stopping = sums[1].item<double>() > 0.0;

    // Gradients that their scale made infinite are the scaler's affair: it skips the step and lowers the scale.
    const bool scaled_too_far = scaler.enabled() && scaler.get_scale() > 1.0;
    const bool finite = std::isfinite(metrics.loss) && (std::isfinite(metrics.grad_norm) || scaled_too_far);
    const bool first_or_last = metrics.step == 1 || metrics.step == training.steps;
    if (finite) {
      dtensor::reset_collective_counts();
      scaler.step(*optimizer);
      scaler.update();
      add_collectives(metrics.collectives);
      progress = {metrics.step, progress.tokens + tokens_per_step, progress.data_position + 1};
    }
    if (!finite || first_or_last || metrics.step % config.metrics.log_every == 0) {
      const auto peak = as_scalar(environment, double(hsdp::peak_memory_bytes(device)));
      metrics.peak_memory_bytes =
          int64_t(all_reduced(environment, peak, dtensor::ReduceOp::max, "peak_memory_bytes").item<double>());
      hsdp::reset_peak_memory(device);
      metrics.seconds = former_seconds + seconds_since(start);
      metrics.tokens = metrics.step * tokens_per_step;
      metrics.tokens_per_second = double(metrics.tokens - logged_tokens) / (metrics.seconds - logged_seconds);
      logged_seconds = metrics.seconds;
      logged_tokens = metrics.tokens;
      if (folder) {
        folder->append(metrics);
        std::cout << to_console(metrics, training.steps) << std::endl;
      }
    }
    if (!finite) {
      checkpoints.wait();
      dtensor::raise<NonFiniteError>("training", "step ", metrics.step, ": loss is ", metrics.loss,
                                     " and grad_norm is ", metrics.grad_norm,
                                     ", expected finite numbers; stopped before the optimizer's step; a lower "
                                     "optimizer.lr or a longer lr_schedule.warmup_steps may help");
    }
    checkpoints.step_done(state);
    profiling->end();
  }
  profiling->finish();
  checkpoints.save(state);
  checkpoints.wait();

  if (stopping) {
    if (folder) {
      std::cout << "checkpoint: stopped by a signal after step " << progress.step
                << "; checkpoint.load auto goes on from there" << std::endl;
    }
  } else if (training.sample_bytes > 0) {
    const std::string text = sample(training, model, device);
    if (folder) std::cout << "sample:\n" << text << std::endl;
  }
}

}  // namespace apps
