#include "apps/trainer.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <iostream>
#include <limits>
#include <memory>
#include <string>

#include "apps/failure.h"
#include "hsdp/launch/device.h"
#include "hsdp/hsdp.h"
#include "models/transformer.h"

namespace apps {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const OptimizerConfig& config,
                                                        const std::vector<torch::Tensor>& parameters) {
  switch (config.name) {
    case OptimizerName::adamw:
      return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(config.lr)
                                                                   .betas({config.beta1, config.beta2})
                                                                   .eps(config.eps)
                                                                   .weight_decay(config.weight_decay));
    case OptimizerName::sgd:
      return std::make_unique<torch::optim::SGD>(
          parameters, torch::optim::SGDOptions(config.lr).momentum(config.momentum).weight_decay(config.weight_decay));
  }
  TORCH_INTERNAL_ASSERT(false, "optimizer ", int(config.name));
}

void set_lr(torch::optim::Optimizer& optimizer, double lr) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(lr);
}

/// One number combined over all ranks.
double all_reduced(const hsdp::Environment& environment, torch::Tensor value, dtensor::ReduceOp op,
                   const char* subject) {
  environment.communicator()->all_reduce(value, op, {"all_reduce", subject})->wait();
  return value.item<double>();
}

torch::Tensor as_scalar(const hsdp::Environment& environment, double value) {
  return torch::full({1}, value, torch::dtype(torch::kFloat64).device(environment.device()));
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

void train(const Config& config, const hsdp::Environment& environment, const DataLoader& data, RunFolder* folder) {
  const auto& training = config.training;
  const torch::Device device = environment.device();
  const bool tells = environment.rank() == 0;

  torch::manual_seed(uint64_t(training.seed));
  auto net = hsdp::meta_init([&] { return models::Transformer(config.model); });
  auto model = hsdp::fully_shard(net, {.mesh = environment.mesh(),
                                       .units = hsdp::each<models::TransformerBlock>(),
                                       .reshard_after_forward = config.parallelism.reshard_after_forward});
  model.materialize(device);
  const auto parameters = model->parameters();
  const auto optimizer = make_optimizer(config.optimizer, parameters);

  if (tells) {
    int64_t count = 0;
    for (const auto& parameter : parameters) count += parameter.numel();
    std::cout << "model: " << count << " parameters\ndata: " << data.file().path() << ", " << data.file().size()
              << " tokens, " << data.steps_per_epoch() << " steps an epoch\nrun folder: " << config.metrics.folder
              << (folder->replaced() ? ", replacing the metrics of a former run" : "") << std::endl;
  }

  const double max_norm = training.max_norm > 0.0 ? training.max_norm : std::numeric_limits<double>::infinity();
  const int64_t tokens_per_step = training.global_batch_size * training.sequence_length;
  const auto start = Clock::now();
  double logged_seconds = 0.0;
  int64_t logged_step = 0;
  for (int64_t index = 0; index < training.steps; ++index) {
    StepMetrics metrics;
    metrics.step = index + 1;
    metrics.lr = config.optimizer.lr * lr_factor(config.lr_schedule, index, training.steps);
    set_lr(*optimizer, metrics.lr);

    const Batch batch = data.batch(index);
    optimizer->zero_grad();
    const torch::Tensor logits = model->forward(batch.inputs.to(device));
    const torch::Tensor loss =
        torch::nn::functional::cross_entropy(logits.flatten(0, 1), batch.targets.to(device).flatten());
    loss.backward();
    metrics.grad_norm = hsdp::clip_grad_norm_(parameters, max_norm);
    // Every rank has as many tokens, so the mean over ranks is the mean over the global batch.
    const torch::Tensor total = loss.detach().to(torch::kFloat64).reshape({1});
    metrics.loss = all_reduced(environment, total, dtensor::ReduceOp::sum, "loss") / double(environment.world_size());

    const bool finite = std::isfinite(metrics.loss) && std::isfinite(metrics.grad_norm);
    const bool first_or_last = index == 0 || metrics.step == training.steps;
    if (finite) optimizer->step();
    if (!finite || first_or_last || metrics.step % config.metrics.log_every == 0) {
      const auto peak = as_scalar(environment, double(hsdp::peak_memory_bytes(device)));
      metrics.peak_memory_bytes = int64_t(all_reduced(environment, peak, dtensor::ReduceOp::max, "peak_memory_bytes"));
      metrics.seconds = seconds_since(start);
      metrics.tokens = metrics.step * tokens_per_step;
      metrics.tokens_per_second =
          double((metrics.step - logged_step) * tokens_per_step) / (metrics.seconds - logged_seconds);
      logged_seconds = metrics.seconds;
      logged_step = metrics.step;
      if (tells) {
        folder->append(metrics);
        std::cout << to_console(metrics, training.steps) << std::endl;
      }
    }
    if (!finite) {
      dtensor::raise<NonFiniteError>("training", "step ", metrics.step, ": loss is ", metrics.loss,
                                     " and grad_norm is ", metrics.grad_norm,
                                     ", expected finite numbers; stopped before the optimizer's step; a lower "
                                     "optimizer.lr or a longer lr_schedule.warmup_steps may help");
    }
  }

  if (training.sample_bytes > 0) {
    const std::string text = sample(training, model, device);
    if (tells) std::cout << "sample:\n" << text << std::endl;
  }
}

}  // namespace apps
