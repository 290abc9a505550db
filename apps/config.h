#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "apps/lr_schedule.h"
#include "apps/token_file.h"
#include "models/transformer_config.h"

namespace apps {

struct DataConfig {
  /// Relative to the working directory.
  std::string path;
  TokenFormat format = TokenFormat::bytes;
};

struct TrainingConfig {
  int64_t steps = 0;
  /// Sequences in a step, over all ranks and micro-batches.
  int64_t global_batch_size = 0;
  /// Micro-batches that each rank cuts its part of the global batch into; gradients are reduced with the last one.
  int64_t gradient_accumulation = 1;
  int64_t sequence_length = 0;
  /// Weights, order of the data and the text sample follow from it.
  int64_t seed = 0;
  /// Gradients are scaled down to this global norm; 0: they are not.
  double max_norm = 1.0;
  /// Patterns of names of blocks that are computed again in backward (`none` and `full` in YAML: no block, all).
  std::vector<std::string> activation_checkpoint = {};
  /// Length of the text that is sampled after training; 0: none. Needs data.format bytes and model.vocab_size 256.
  int64_t sample_bytes = 0;
  std::string sample_prompt = "def ";
  /// 0: always the most likely byte.
  double sample_temperature = 0.8;
};

struct ParallelismConfig {
  /// Copies of the parameters.
  int64_t replicate = 1;
  /// Ranks that share one copy; -1 (`auto` in YAML): as many as are left.
  int64_t shard = -1;
  /// See hsdp::ReshardAfterForward. Empty (`default` in YAML): every unit but the root.
  std::optional<std::variant<bool, int64_t>> reshard_after_forward = std::nullopt;
  /// See hsdp::FullyShardOptions.
  bool prefetch = true;
};

/// See hsdp::MixedPrecisionPolicy. Empty: `default` in YAML.
struct MixedPrecisionConfig {
  std::optional<c10::ScalarType> param_dtype = std::nullopt;
  std::optional<c10::ScalarType> reduce_dtype = std::nullopt;
  /// Of the logits, and so of the loss.
  std::optional<c10::ScalarType> output_dtype = c10::ScalarType::Float;
};

/// See hsdp::OffloadPolicy.
struct OffloadConfig {
  bool to_host = false;
  bool pin_memory = true;
};

/// See hsdp::GradScaler.
struct GradScalerConfig {
  /// Empty (`auto` in YAML): where mixed_precision.param_dtype is float16.
  std::optional<bool> enabled = std::nullopt;
  /// To begin with.
  double scale = 65536.0;
  int64_t growth_interval = 2000;
};

enum class OptimizerName { adamw, fused_adamw, sgd, fused_sgd };

struct OptimizerConfig {
  OptimizerName name = OptimizerName::adamw;
  double lr = 0.0;
  double weight_decay = 0.01;
  /// Patterns of names of parameters without weight decay; each must fit some.
  std::vector<std::string> no_decay = {};
  /// adamw and fused_adamw only.
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  /// sgd and fused_sgd only.
  double momentum = 0.0;
};

struct MetricsConfig {
  /// Run folder: metrics.jsonl and the resolved config.yaml.
  std::string folder;
  /// The first and the last step are always logged.
  int64_t log_every = 10;
  /// On the host: peak_memory_bytes is counted in tensors rather than the process's size.
  bool count_memory = false;
};

struct CheckpointConfig {
  /// Of the run's checkpoints, `step-N` each, on a file system that all ranks see; empty (`none` in YAML): no
  /// checkpoints.
  std::string folder;
  /// Steps between two of them. The end of training and a signal always save. 0: these alone.
  int64_t every = 500;
  /// See hsdp::CheckpointFolderOptions.
  int64_t keep_latest = 10, keep_every = 0;
  /// What to go on from: `auto`, `none`, `step-N` of the folder, or the path of a checkpoint. See checkpointing.h.
  std::string load = "auto";
  bool async = false;
  /// Whole weights to begin with where there is no checkpoint to go on from; empty (`none` in YAML): initial values.
  std::string weights;
};

/// See hsdp/profiling.h.
struct ProfileConfig {
  /// Of the traces; empty (`none` in YAML): none is recorded.
  std::string trace_folder;
  int64_t trace_first_step = 3, trace_steps = 1;
  /// Ranks that record; empty: all.
  std::vector<int64_t> trace_ranks;
  /// See hsdp::TraceOptions.
  bool record_shapes = false, profile_memory = false;
  bool nvtx = false;
  /// Of the snapshots of device memory, written when memory runs out; empty (`none` in YAML): none is.
  std::string memory_snapshot_folder;
  /// At the end of this step there is one, too; 0: there is not.
  int64_t memory_snapshot_step = 0;
};

enum class CommBackend { automatic, gloo, nccl };

struct CommConfig {
  CommBackend backend = CommBackend::automatic;
  /// How long a collective may take before the ranks that wait for it give up.
  int64_t timeout_seconds = 300;
};

/// Everything a training run is told, one struct a section of the YAML file, members named as its keys.
struct Config {
  models::TransformerConfig model;
  DataConfig data;
  TrainingConfig training;
  ParallelismConfig parallelism;
  MixedPrecisionConfig mixed_precision;
  OffloadConfig offload;
  OptimizerConfig optimizer;
  GradScalerConfig grad_scaler;
  LrScheduleConfig lr_schedule;
  MetricsConfig metrics;
  CheckpointConfig checkpoint;
  ProfileConfig profile;
  CommConfig comm;
};

/// Reads a configuration file and lays overrides `section.key=value` (the later one wins) over it.
///
/// Strict: an unknown, repeated, missing, mistyped or out-of-range key is refused, and so are the spellings that YAML
/// reads as something else (`012`, `0x10`, `yes`). Throws dtensor::ValueError with one line a problem,
/// `[config] file:line:column: section.key: expected int, got 'x'`, with `--set` as the place of an override.
Config read_config(const std::string& path, const std::vector<std::string>& overrides = {});

/// The same for a text; `name` stands for the file in places.
Config parse_config(const std::string& text, const std::string& name, const std::vector<std::string>& overrides = {});

/// The whole configuration, defaults included, as YAML that reads back to the same configuration.
std::string to_yaml(const Config& config);

/// `section.key` and its value as YAML text, in the order of to_yaml.
struct ConfigValue {
  std::string name, value;
};
std::vector<ConfigValue> config_values(const Config& config);

/// Number of ranks on the shard axis when launched with `world_size` ranks. Throws dtensor::ValueError when
/// replicate x shard is another number.
int64_t shard_ranks(const ParallelismConfig& parallelism, int64_t world_size);

}  // namespace apps
