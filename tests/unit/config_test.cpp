#include "apps/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "apps/checkpoint_lookup.h"
#include "dtensor/error.h"

namespace apps {
namespace config_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kMinimal = R"(model:
  vocab_size: 256
  hidden_size: 32
  intermediate_size: 64
  n_layers: 2
  n_heads: 4
  max_sequence_length: 16
data:
  path: tokens.bin
  format: bytes
training:
  steps: 10
  global_batch_size: 4
  sequence_length: 16
optimizer:
  lr: 0.001
metrics:
  folder: runs/test
)";

using Reshard = decltype(ParallelismConfig::reshard_after_forward);

/// kMinimal with one line replaced: `with("  steps: 10", "  steps: x")`.
std::string with(const std::string& line, const std::string& replacement) {
  std::string text = kMinimal;
  const size_t at = text.find(line + "\n");
  EXPECT_NE(at, std::string::npos) << line;
  return text.replace(at, line.size(), replacement);
}

std::string refusal(const std::string& text, const std::vector<std::string>& overrides = {}) {
  try {
    parse_config(text, "c.yaml", overrides);
  } catch (const dtensor::ValueError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Config, ReadsValuesAndFillsInDefaults) {
  const Config config = parse_config(kMinimal, "c.yaml");
  EXPECT_EQ(config.model.hidden_size, 32);
  EXPECT_EQ(config.model.n_kv_heads, 4);
  EXPECT_FALSE(config.model.tie_embeddings);
  EXPECT_EQ(config.data.path, "tokens.bin");
  EXPECT_EQ(config.data.format, TokenFormat::bytes);
  EXPECT_EQ(config.training.steps, 10);
  EXPECT_EQ(config.training.max_norm, 1.0);
  EXPECT_EQ(config.parallelism.shard, -1);
  EXPECT_EQ(config.parallelism.reshard_after_forward, std::nullopt);
  EXPECT_TRUE(config.parallelism.prefetch);
  EXPECT_FALSE(config.metrics.count_memory);
  EXPECT_EQ(config.training.gradient_accumulation, 1);
  EXPECT_TRUE(config.training.activation_checkpoint.empty());
  EXPECT_EQ(config.mixed_precision.param_dtype, std::nullopt);
  EXPECT_FALSE(config.offload.to_host);
  EXPECT_EQ(config.grad_scaler.enabled, std::nullopt);
  EXPECT_EQ(config.optimizer.lr, 0.001);
  EXPECT_EQ(config.checkpoint.folder, "");
  EXPECT_EQ(config.checkpoint.every, 500);
  EXPECT_EQ(config.checkpoint.keep_latest, 10);
  EXPECT_EQ(config.checkpoint.keep_every, 0);
  EXPECT_EQ(config.checkpoint.load, "auto");
  EXPECT_FALSE(config.checkpoint.async);
  EXPECT_EQ(config.checkpoint.weights, "");
  EXPECT_EQ(config.comm.backend, CommBackend::automatic);
}

TEST(Config, ReadsEveryKey) {
  const Config config = parse_config(R"(
model: {vocab_size: 256, hidden_size: 64, intermediate_size: 96, n_layers: 3, n_heads: 8, n_kv_heads: 2,
        max_sequence_length: 128, rope_theta: 5e5, norm_eps: 1e-6, tie_embeddings: true}
data: {path: "a b.bin", format: bytes}
training: {steps: 7, global_batch_size: 6, gradient_accumulation: 3, sequence_length: 100, seed: 3, max_norm: 0,
           activation_checkpoint: [model.layers.0], sample_bytes: 5, sample_prompt: "# ", sample_temperature: 0.5}
parallelism: {replicate: 3, shard: 2, reshard_after_forward: false, prefetch: false}
mixed_precision: {param_dtype: float16, reduce_dtype: float32, output_dtype: bfloat16}
offload: {to_host: true, pin_memory: false}
grad_scaler: {enabled: false, scale: 1024, growth_interval: 5}
optimizer: {name: sgd, lr: 1, weight_decay: 0, no_decay: ["**.bias", table.weight, 'x: "y"'], beta1: 0.8, beta2: 0.9, eps: 1e-7, momentum: 0.9}
lr_schedule: {warmup_steps: 3, decay: linear, min_lr_factor: 0.25}
metrics: {folder: out, log_every: 5, count_memory: true}
checkpoint: {folder: kept, every: 0, keep_latest: 3, keep_every: 100, load: step-300, async: true, weights: model.pt}
comm: {backend: gloo, timeout_seconds: 20}
)",
                                     "c.yaml");
  EXPECT_EQ(config.model.n_kv_heads, 2);
  EXPECT_EQ(config.model.rope_theta, 5e5);
  EXPECT_EQ(config.model.norm_eps, 1e-6);
  EXPECT_TRUE(config.model.tie_embeddings);
  EXPECT_EQ(config.data.path, "a b.bin");
  EXPECT_EQ(config.training.seed, 3);
  EXPECT_EQ(config.training.max_norm, 0.0);
  EXPECT_EQ(config.training.sample_bytes, 5);
  EXPECT_EQ(config.training.sample_prompt, "# ");
  EXPECT_EQ(config.training.sample_temperature, 0.5);
  EXPECT_EQ(config.training.gradient_accumulation, 3);
  EXPECT_EQ(config.training.activation_checkpoint, std::vector<std::string>{"model.layers.0"});
  EXPECT_EQ(config.parallelism.replicate, 3);
  EXPECT_EQ(config.parallelism.shard, 2);
  EXPECT_EQ(config.parallelism.reshard_after_forward, Reshard(false));
  EXPECT_FALSE(config.parallelism.prefetch);
  EXPECT_EQ(config.mixed_precision.param_dtype, c10::ScalarType::Half);
  EXPECT_EQ(config.mixed_precision.reduce_dtype, c10::ScalarType::Float);
  EXPECT_EQ(config.mixed_precision.output_dtype, c10::ScalarType::BFloat16);
  EXPECT_TRUE(config.offload.to_host);
  EXPECT_FALSE(config.offload.pin_memory);
  EXPECT_EQ(config.grad_scaler.enabled, std::optional(false));
  EXPECT_EQ(config.grad_scaler.scale, 1024.0);
  EXPECT_EQ(config.grad_scaler.growth_interval, 5);
  EXPECT_EQ(config.optimizer.name, OptimizerName::sgd);
  EXPECT_EQ(config.optimizer.lr, 1.0);
  EXPECT_EQ(config.optimizer.no_decay, (std::vector<std::string>{"**.bias", "table.weight", "x: \"y\""}));
  EXPECT_EQ(config.optimizer.beta1, 0.8);
  EXPECT_EQ(config.optimizer.beta2, 0.9);
  EXPECT_EQ(config.optimizer.eps, 1e-7);
  EXPECT_EQ(config.optimizer.momentum, 0.9);
  EXPECT_EQ(config.lr_schedule.warmup_steps, 3);
  EXPECT_EQ(config.lr_schedule.decay, LrDecay::linear);
  EXPECT_EQ(config.lr_schedule.min_lr_factor, 0.25);
  EXPECT_EQ(config.metrics.folder, "out");
  EXPECT_EQ(config.metrics.log_every, 5);
  EXPECT_TRUE(config.metrics.count_memory);
  EXPECT_EQ(config.checkpoint.folder, "kept");
  EXPECT_EQ(config.checkpoint.every, 0);
  EXPECT_EQ(config.checkpoint.keep_latest, 3);
  EXPECT_EQ(config.checkpoint.keep_every, 100);
  EXPECT_EQ(config.checkpoint.load, "step-300");
  EXPECT_TRUE(config.checkpoint.async);
  EXPECT_EQ(config.checkpoint.weights, "model.pt");
  EXPECT_EQ(config.comm.backend, CommBackend::gloo);
  EXPECT_EQ(config.comm.timeout_seconds, 20);
}

TEST(Config, TheWrittenConfigurationReadsBackToItself) {
  const std::vector<std::vector<std::string>> cases = {
      {},
      {"training.sample_prompt=a \"b\"\n\t: # \\ é", "data.path=yes", "metrics.folder=012"},
      {"optimizer.lr=1e-30", "model.norm_eps=0.1", "training.max_norm=123456789.125"},
      {"parallelism.reshard_after_forward=true", "model.tie_embeddings=true", "parallelism.shard=3"},
      {"optimizer.name=fused_adamw", R"(optimizer.no_decay=["**.bias", a.b, "012", '"'])"},
      {"optimizer.name=fused_sgd", "optimizer.no_decay=[]"},
      {"optimizer.name=sgd", "lr_schedule.decay=constant", "data.format=llmc", "comm.backend=nccl"},
      {"training.seed=9223372036854775807"},
      {"parallelism.replicate=2", "parallelism.reshard_after_forward=4", "training.gradient_accumulation=8"},
      {"parallelism.reshard_after_forward=false", "training.activation_checkpoint=full", "grad_scaler.enabled=true"},
      {"parallelism.prefetch=false", "metrics.count_memory=true"},
      {R"(training.activation_checkpoint=["**.1", "full"])", "offload.to_host=true", "offload.pin_memory=false"},
      {"mixed_precision.param_dtype=float16", "mixed_precision.reduce_dtype=float32", "grad_scaler.scale=0.5"},
      {"checkpoint.folder=a b", "checkpoint.load=step-0", "checkpoint.weights=none", "checkpoint.async=true"},
      {"checkpoint.load=none", "checkpoint.weights=../w: x"},
  };
  for (const auto& overrides : cases) {
    const std::string yaml = to_yaml(parse_config(kMinimal, "c.yaml", overrides));
    EXPECT_EQ(to_yaml(parse_config(yaml, "again.yaml")), yaml);
  }
  const auto written = to_yaml(
      parse_config(kMinimal, "c.yaml",
                   {"parallelism.reshard_after_forward=4", "training.activation_checkpoint=[\"model.layers.*\"]"}));
  EXPECT_THAT(written, AllOf(HasSubstr("  reshard_after_forward: 4\n"), HasSubstr("  activation_checkpoint: full\n")));
  EXPECT_THAT(to_yaml(parse_config(kMinimal, "c.yaml")),
              AllOf(HasSubstr("parallelism:\n  replicate: 1\n  shard: auto\n  reshard_after_forward: default\n"),
                    HasSubstr("  lr: 0.001\n"), HasSubstr("  path: \"tokens.bin\"\n")));
}

struct BadValue {
  const char* line;
  const char* replacement;
  const char* message;
};

class BadValueTest : public ::testing::TestWithParam<BadValue> {};

TEST_P(BadValueTest, IsRefusedWithItsPlace) {
  const auto& [line, replacement, message] = GetParam();
  EXPECT_EQ(refusal(with(line, replacement)), std::string("[config] ") + message);
}

INSTANTIATE_TEST_SUITE_P(
    Config, BadValueTest,
    ::testing::Values(
        BadValue{"  n_heads: 4", "  n_heads: x", "c.yaml:6:12: model.n_heads: expected int, got 'x'"},
        BadValue{"  steps: 10", "  steps: 1.5", "c.yaml:12:10: training.steps: expected int, got '1.5'"},
        BadValue{"  steps: 10", "  steps: 1e1", "c.yaml:12:10: training.steps: expected int, got '1e1'"},
        BadValue{"  steps: 10", "  steps: 012", "c.yaml:12:10: training.steps: expected int, got '012'"},
        BadValue{"  steps: 10", "  steps: 0x10", "c.yaml:12:10: training.steps: expected int, got '0x10'"},
        BadValue{"  steps: 10", "  steps: +-1", "c.yaml:12:10: training.steps: expected int, got '+-1'"},
        BadValue{"  steps: 10", "  steps: yes", "c.yaml:12:10: training.steps: expected int, got 'yes'"},
        BadValue{"  steps: 10", "  steps: \"10\"", "c.yaml:12:10: training.steps: expected int, got the string '10'"},
        BadValue{"  steps: 10", "  steps: [10]", "c.yaml:12:10: training.steps: expected int, got a list"},
        BadValue{"  steps: 10", "  steps: {a: 1}", "c.yaml:12:10: training.steps: expected int, got a map"},
        BadValue{"  steps: 10", "  steps:", "c.yaml:12:3: training.steps: expected int, got nothing"},
        BadValue{"  steps: 10", "  steps: ~", "c.yaml:12:3: training.steps: expected int, got nothing"},
        BadValue{"  steps: 10", "  steps: 0", "c.yaml:12:10: training.steps: expected int of at least 1, got '0'"},
        BadValue{"  steps: 10", "  steps: 9223372036854775808",
                 "c.yaml:12:10: training.steps: expected int, got '9223372036854775808'"},
        BadValue{"  lr: 0.001", "  lr: fast", "c.yaml:16:7: optimizer.lr: expected number, got 'fast'"},
        BadValue{"  lr: 0.001", "  lr: .nan", "c.yaml:16:7: optimizer.lr: expected number, got '.nan'"},
        BadValue{"  lr: 0.001", "  lr: inf", "c.yaml:16:7: optimizer.lr: expected number, got 'inf'"},
        BadValue{"  lr: 0.001", "  lr: 1e999", "c.yaml:16:7: optimizer.lr: expected number, got '1e999'"},
        BadValue{"  lr: 0.001", "  lr: 01.5", "c.yaml:16:7: optimizer.lr: expected number, got '01.5'"},
        BadValue{"  lr: 0.001", "  lr: 0", "c.yaml:16:7: optimizer.lr: expected number above 0, got '0'"},
        BadValue{"  lr: 0.001", "  lr: 1\n  beta1: 1",
                 "c.yaml:17:10: optimizer.beta1: expected number from 0 to below 1, got '1'"},
        BadValue{"  lr: 0.001", "  lr: 1\n  no_decay: a.bias",
                 "c.yaml:17:13: optimizer.no_decay: expected list of text, got 'a.bias'"},
        BadValue{"  lr: 0.001", "  lr: 1\n  no_decay: \"[a]\"",
                 "c.yaml:17:13: optimizer.no_decay: expected list of text, got the string '[a]'"},
        BadValue{"  lr: 0.001", "  lr: 1\n  no_decay: [a, [b]]",
                 "c.yaml:17:13: optimizer.no_decay: expected list of text, got a list"},
        BadValue{"  lr: 0.001", "  lr: 1\n  no_decay: [a, \"\"]",
                 "c.yaml:17:13: optimizer.no_decay: expected list of text, got a list"},
        BadValue{"  lr: 0.001", "  lr: 1\n  name: fused_adam",
                 "c.yaml:17:9: optimizer.name: expected adamw, fused_adamw, sgd or fused_sgd, got 'fused_adam'"},
        BadValue{"  n_heads: 4", "  n_heads: 4\n  tie_embeddings: yes",
                 "c.yaml:7:19: model.tie_embeddings: expected true or false, got 'yes'"},
        BadValue{"  n_heads: 4", "  n_heads: 4\n  tie_embeddings: \"true\"",
                 "c.yaml:7:19: model.tie_embeddings: expected true or false, got the string 'true'"},
        BadValue{"  format: bytes", "  format: byte",
                 "c.yaml:10:11: data.format: expected bytes, uint16 or llmc, got 'byte'"},
        BadValue{"  path: tokens.bin", "  path: \"\"", "c.yaml:9:9: data.path: expected text, got the string ''"},
        BadValue{"metrics:", "parallelism: {shard: 0}\nmetrics:",
                 "c.yaml:17:22: parallelism.shard: expected int of at least 1, or auto, got '0'"},
        BadValue{"metrics:", "parallelism: {reshard_after_forward: 0}\nmetrics:",
                 "c.yaml:17:38: parallelism.reshard_after_forward: expected default, true, false or int of at least 1, "
                 "got '0'"},
        BadValue{"metrics:", "parallelism: {reshard_after_forward: \"true\"}\nmetrics:",
                 "c.yaml:17:38: parallelism.reshard_after_forward: expected default, true, false or int of at least 1, "
                 "got the string 'true'"},
        BadValue{"metrics:", "mixed_precision: {param_dtype: fp16}\nmetrics:",
                 "c.yaml:17:32: mixed_precision.param_dtype: expected default, float32, bfloat16 or float16, got "
                 "'fp16'"},
        BadValue{"  steps: 10", "  steps: 10\n  activation_checkpoint: all",
                 "c.yaml:13:26: training.activation_checkpoint: expected none, full or list of text, got 'all'"},
        BadValue{"  steps: 10", "  steps: 10\n  activation_checkpoint: \"full\"",
                 "c.yaml:13:26: training.activation_checkpoint: expected none, full or list of text, got the string "
                 "'full'"},
        BadValue{"metrics:", "grad_scaler: {scale: 0}\nmetrics:",
                 "c.yaml:17:22: grad_scaler.scale: expected number above 0, got '0'"},
        BadValue{"metrics:", "checkpoint: {every: -1}\nmetrics:",
                 "c.yaml:17:21: checkpoint.every: expected int of at least 0, got '-1'"},
        BadValue{"metrics:", "checkpoint: {folder: \"\"}\nmetrics:",
                 "c.yaml:17:22: checkpoint.folder: expected text, got the string ''"},
        BadValue{"metrics:", "checkpoint: {weights: [none]}\nmetrics:",
                 "c.yaml:17:23: checkpoint.weights: expected text, got a list"},
        BadValue{"metrics:", "checkpoint: {async: yes}\nmetrics:",
                 "c.yaml:17:21: checkpoint.async: expected true or false, got 'yes'"},
        BadValue{"metrics:", "profile: {trace_folder: \"\"}\nmetrics:",
                 "c.yaml:17:25: profile.trace_folder: expected text, got the string ''"},
        BadValue{"metrics:", "profile: {trace_first_step: 0}\nmetrics:",
                 "c.yaml:17:29: profile.trace_first_step: expected int of at least 1, got '0'"},
        BadValue{"metrics:", "profile: {trace_ranks: []}\nmetrics:",
                 "c.yaml:17:24: profile.trace_ranks: expected all or list of int of at least 0, got a list"},
        BadValue{"metrics:", "profile: {trace_ranks: [0, -1]}\nmetrics:",
                 "c.yaml:17:24: profile.trace_ranks: expected all or list of int of at least 0, got a list"},
        BadValue{"metrics:", "profile: {trace_ranks: [0, 01]}\nmetrics:",
                 "c.yaml:17:24: profile.trace_ranks: expected all or list of int of at least 0, got a list"},
        BadValue{"metrics:", "profile: {trace_ranks: 0}\nmetrics:",
                 "c.yaml:17:24: profile.trace_ranks: expected all or list of int of at least 0, got '0'"},
        BadValue{"metrics:", "profile: {trace_ranks: \"all\"}\nmetrics:",
                 "c.yaml:17:24: profile.trace_ranks: expected all or list of int of at least 0, got the string 'all'"},
        BadValue{"metrics:", "profile: {nvtx: on}\nmetrics:",
                 "c.yaml:17:17: profile.nvtx: expected true or false, got 'on'"},
        BadValue{"metrics:", "profile: {memory_snapshot_step: -1}\nmetrics:",
                 "c.yaml:17:33: profile.memory_snapshot_step: expected int of at least 0, got '-1'"},
        BadValue{"metrics:", "comm: {timeout_seconds: 99999999999}\nmetrics:",
                 "c.yaml:17:25: comm.timeout_seconds: expected int of at most 31622400, got '99999999999'"}));

INSTANTIATE_TEST_SUITE_P(
    ConfigKeys, BadValueTest,
    ::testing::Values(
        BadValue{"  n_heads: 4", "  n_heads: 4\n  n_head: 4",
                 "c.yaml:7:3: model.n_head: unknown key; did you mean model.n_heads?"},
        BadValue{"  steps: 10", "  steps: 10\n  lr: 1",
                 "c.yaml:13:3: training.lr: unknown key; did you mean optimizer.lr?"},
        BadValue{"  folder: runs/test", "  folder: runs/test\n  tensorboard: true",
                 "c.yaml:19:3: metrics.tensorboard: unknown key; metrics has folder, log_every, count_memory"},
        BadValue{
            "metrics:", "modle: {a: 1, b: 2}\nmetrics:", "c.yaml:17:1: modle: unknown section; did you mean model?"},
        BadValue{
            "metrics:", "distributed:\nmetrics:",
            "c.yaml:17:1: distributed: unknown section; there are checkpoint, comm, data, grad_scaler, lr_schedule, "
            "metrics, mixed_precision, model, offload, optimizer, parallelism, profile, training"},
        BadValue{"  steps: 10", "  steps: 10\n  steps: 11",
                 "c.yaml:13:3: training.steps: duplicate key, first given at c.yaml:12:3"},
        BadValue{
            "metrics:", "data: {path: x}\nmetrics:", "c.yaml:17:1: data: duplicate key, first given at c.yaml:8:1"},
        BadValue{"  steps: 10", "  steps: 10\n  <<: {seed: 1}",
                 "c.yaml:13:3: training.<<: unknown key; training has steps, global_batch_size, gradient_accumulation, "
                 "sequence_length, seed, max_norm, activation_checkpoint, sample_bytes, sample_prompt, "
                 "sample_temperature"},
        BadValue{"  steps: 10", "  steps: 10\n  ? [a]\n  : 1", "c.yaml:13:5: training.?: expected a word as key"},
        BadValue{"metrics:", "comm: gloo\nmetrics:", "c.yaml:17:7: comm: expected a section with keys below it"}));

INSTANTIATE_TEST_SUITE_P(
    ConfigTogether, BadValueTest,
    ::testing::Values(
        BadValue{"  hidden_size: 32", "  hidden_size: 36",
                 "c.yaml: model: hidden_size 36 with n_heads 4 gives no even head size, expected hidden_size to be a "
                 "multiple of 8"},
        BadValue{"  n_heads: 4", "  n_heads: 4\n  n_kv_heads: 3",
                 "c.yaml: model: n_heads 4 is not a multiple of n_kv_heads 3, expected the same number of query heads "
                 "for each key head"},
        BadValue{"  sequence_length: 16", "  sequence_length: 17",
                 "c.yaml:14:20: training.sequence_length is 17, expected at most model.max_sequence_length 16"},
        BadValue{"metrics:", "profile: {trace_folder: t, trace_first_step: 11}\nmetrics:",
                 "c.yaml:17:46: profile.trace_first_step 11 and trace_steps 1, expected no step after the last, "
                 "training.steps 10"},
        BadValue{"metrics:", "profile: {trace_folder: t, trace_first_step: 10, trace_steps: 2}\nmetrics:",
                 "c.yaml:17:46: profile.trace_first_step 10 and trace_steps 2, expected no step after the last, "
                 "training.steps 10"},
        BadValue{"metrics:", "profile: {trace_folder: t, trace_steps: 9223372036854775807}\nmetrics:",
                 "c.yaml: profile.trace_first_step 3 and trace_steps 9223372036854775807, expected no step after the "
                 "last, training.steps 10"},
        BadValue{"metrics:", "profile: {memory_snapshot_folder: m, memory_snapshot_step: 11}\nmetrics:",
                 "c.yaml:17:60: profile.memory_snapshot_step is 11, expected at most training.steps 10"},
        BadValue{"metrics:", "profile: {memory_snapshot_step: 2}\nmetrics:",
                 "c.yaml:17:33: profile.memory_snapshot_step is 2, expected profile.memory_snapshot_folder to be set "
                 "for it"},
        BadValue{"metrics:", "checkpoint: {load: step-3}\nmetrics:",
                 "c.yaml:17:20: checkpoint.load is step-3, expected checkpoint.folder to be set, since it names one "
                 "there; a path has a slash"}));

TEST(Config, RefusesATextSampleOfTokensThatAreNoBytes) {
  const std::string message =
      "training.sample_bytes is 5, expected 0 unless data.format is bytes and "
      "model.vocab_size is 256";
  EXPECT_EQ(refusal(kMinimal, {"training.sample_bytes=5", "data.format=uint16"}), "[config] --set: " + message);
  EXPECT_EQ(refusal(kMinimal, {"training.sample_bytes=5", "model.vocab_size=300"}), "[config] --set: " + message);
  EXPECT_EQ(refusal(kMinimal, {"training.sample_bytes=5"}), "accepted");
}

TEST(Config, ReportsEveryProblemOnItsOwnLine) {
  const std::string message = refusal(with("  n_heads: 4", "  n_heads: x\n  n_layer: 3"), {"training.steps=y"});
  EXPECT_EQ(message,
            "[config] c.yaml:6:12: model.n_heads: expected int, got 'x'\n"
            "[config] c.yaml:7:3: model.n_layer: unknown key; did you mean model.n_layers?\n"
            "[config] --set: training.steps: expected int, got 'y'");
}

TEST(Config, NamesEveryMissingKey) {
  EXPECT_EQ(refusal(with("  steps: 10", "")), "[config] c.yaml: training.steps: missing, expected a value");
  for (const char* empty : {"", "# nothing\n", "model:\ntraining:\n"}) {
    EXPECT_THAT(refusal(empty), AllOf(HasSubstr("c.yaml: model.vocab_size: missing"),
                                      HasSubstr("c.yaml: metrics.folder: missing"), Not(HasSubstr("max_norm"))));
  }
}

TEST(Config, RefusesWhatIsNoYamlWithItsPlace) {
  EXPECT_EQ(refusal("model:\n  a: *b\n"), "[config] c.yaml:2:6: not valid YAML: the referenced anchor is not defined");
  EXPECT_EQ(refusal("model:\n\ta: 1\n"), "[config] c.yaml:2:3: not valid YAML: illegal map value");
  EXPECT_THAT(refusal("model: {a: 1\n"), HasSubstr("not valid YAML"));
  EXPECT_EQ(refusal("- a\n- b\n"), "[config] c.yaml:1:1: expected sections such as 'model:' at the top level");
  EXPECT_EQ(refusal("just words"), "[config] c.yaml:1:1: expected sections such as 'model:' at the top level");
  EXPECT_THAT(refusal("model: " + std::string(100000, '[')), HasSubstr("nested too deeply"));
  EXPECT_THAT(refusal(std::string(kMinimal) + "---\nmodel: {}\n"), HasSubstr("a second YAML document, expected one"));
}

TEST(Config, AcceptsAByteOrderMarkAndWindowsLineEnds) {
  std::string text = "\xef\xbb\xbf";
  for (const char* c = kMinimal; *c != '\0'; ++c) text += *c == '\n' ? std::string("\r\n") : std::string(1, *c);
  EXPECT_EQ(to_yaml(parse_config(text, "c.yaml")), to_yaml(parse_config(kMinimal, "c.yaml")));
}

TEST(Config, OverridesReplaceValuesAndTheLastOneWins) {
  const Config config = parse_config(
      kMinimal, "c.yaml", {"training.steps=20", "data.path=a=b c", "training.steps=30", "comm.backend=gloo"});
  EXPECT_EQ(config.training.steps, 30);
  EXPECT_EQ(config.data.path, "a=b c");
  EXPECT_EQ(config.comm.backend, CommBackend::gloo);
}

TEST(Config, AnOverrideSpellsAListAsYaml) {
  const Config config = parse_config(kMinimal, "c.yaml", {R"(optimizer.no_decay=["**.bias", "**norm**"])"});
  EXPECT_EQ(config.optimizer.no_decay, (std::vector<std::string>{"**.bias", "**norm**"}));
  const std::string expected = "[config] --set: optimizer.no_decay: expected list of text, got ";
  for (const char* text : {"a", "[a", "[**.bias]", "[a]b", "[a] [b]"}) {
    EXPECT_EQ(refusal(kMinimal, {std::string("optimizer.no_decay=") + text}), expected + "'" + text + "'");
  }
}

TEST(Config, OverridesAreCheckedLikeTheFile) {
  EXPECT_EQ(refusal(kMinimal, {"training.steps=012"}), "[config] --set: training.steps: expected int, got '012'");
  EXPECT_EQ(refusal(kMinimal, {"training.step=1"}),
            "[config] --set: training.step: unknown key; did you mean training.steps?");
  EXPECT_EQ(refusal(kMinimal, {"trainig.steps=1"}),
            "[config] --set: trainig.steps: unknown key; did you mean training.steps?");
  EXPECT_EQ(refusal(kMinimal, {"data.path="}), "[config] --set: data.path: expected text, got ''");
  for (const char* shapeless : {"training.steps", "steps=1", "=1", ".steps=1", "training.=1"}) {
    EXPECT_EQ(refusal(kMinimal, {shapeless}),
              std::string("[config] --set: '") + shapeless + "', expected section.key=value");
  }
}

TEST(Config, ReshardAfterForwardIsAWordOrANumberOfRanks) {
  const auto read = [](const std::string& text) {
    return parse_config(kMinimal, "c.yaml", {"parallelism.reshard_after_forward=" + text})
        .parallelism.reshard_after_forward;
  };
  EXPECT_EQ(read("default"), Reshard());
  EXPECT_EQ(read("true"), Reshard(true));
  EXPECT_EQ(read("1"), Reshard(int64_t(1)));
  EXPECT_EQ(read("8"), Reshard(int64_t(8)));
}

TEST(Config, FullActivationCheckpointIsEveryBlock) {
  const auto read = [](const std::string& text) {
    return parse_config(kMinimal, "c.yaml", {"training.activation_checkpoint=" + text}).training.activation_checkpoint;
  };
  EXPECT_EQ(read("full"), std::vector<std::string>{"model.layers.*"});
  EXPECT_EQ(read("[\"model.layers.1\", a]"), (std::vector<std::string>{"model.layers.1", "a"}));
  EXPECT_TRUE(read("none").empty());
  EXPECT_TRUE(read("[]").empty());
}

TEST(Config, RanksOfATraceAreAllOrAList) {
  const auto read = [](const std::string& text) {
    const auto config = parse_config(kMinimal, "c.yaml", {"profile.trace_ranks=" + text});
    EXPECT_EQ(parse_config(to_yaml(config), "again.yaml").profile.trace_ranks, config.profile.trace_ranks);
    return config.profile.trace_ranks;
  };
  EXPECT_TRUE(read("all").empty());
  EXPECT_EQ(read("[0]"), std::vector<int64_t>{0});
  EXPECT_EQ(read("[8, 0]"), (std::vector<int64_t>{8, 0}));
  // Steps that nobody traces may be any.
  EXPECT_EQ(refusal(kMinimal, {"profile.trace_steps=1000"}), "accepted");
  EXPECT_EQ(refusal(kMinimal, {"profile.trace_folder=t", "profile.trace_first_step=10"}), "accepted");
}

TEST(Config, NoneIsNoCheckpointAndInQuotesAName) {
  const auto read = [](const std::string& folder) {
    return parse_config(with("metrics:", "checkpoint: {folder: " + folder + "}\nmetrics:"), "c.yaml").checkpoint.folder;
  };
  EXPECT_EQ(read("none"), "");
  EXPECT_EQ(read("\"none\""), "none");
  EXPECT_EQ(read("runs/a"), "runs/a");
  const auto written = [](const std::string& folder) {
    Config config = parse_config(kMinimal, "c.yaml");
    config.checkpoint.folder = folder;
    return to_yaml(config);
  };
  EXPECT_THAT(written(""), HasSubstr("checkpoint:\n  folder: none\n"));
  EXPECT_THAT(written("none"), HasSubstr("checkpoint:\n  folder: \"none\"\n"));
  EXPECT_EQ(parse_config(written("none"), "c.yaml").checkpoint.folder, "none");
}

TEST(Config, AStepIsNamedByItsFolderAlone) {
  EXPECT_EQ(step_in("step-0"), std::optional<int64_t>(0));
  EXPECT_EQ(step_in("step-300"), std::optional<int64_t>(300));
  EXPECT_EQ(step_in(""), std::nullopt);
  for (const char* text : {"auto", "none", "step-", "step-03", "step-+3", "step--3", "step-3x", "./step-3",
                           "runs/step-3", "Step-3", "step-3 ", "step-9223372036854775808"}) {
    EXPECT_EQ(step_in(text), std::nullopt) << text;
    EXPECT_EQ(refusal(kMinimal, {std::string("checkpoint.load=") + text}), "accepted");
  }
}

TEST(Config, RefusesPathsThatAreNoFiles) {
  const auto folder = std::filesystem::path(::testing::TempDir());
  const auto message = [](const std::string& path) -> std::string {
    try {
      read_config(path);
    } catch (const dtensor::ValueError& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(message(folder.string()), "[config] " + folder.string() + " is a folder, expected a YAML file");
  EXPECT_EQ(message("no/such.yaml"),
            "[config] no/such.yaml cannot be opened: No such file or directory, expected a YAML file");
  EXPECT_EQ(message("/dev/null"), "[config] /dev/null is not a regular file, expected a YAML file");

  const auto large = folder / ("large_" + std::to_string(getpid()) + ".yaml");
  std::ofstream(large) << std::string((1 << 20) + 1, '#');
  EXPECT_THAT(message(large.string()), HasSubstr("has 1048577 bytes, expected a YAML file"));
  std::ofstream(large, std::ios::trunc).close();
  EXPECT_THAT(message(large.string()), HasSubstr("model.vocab_size: missing"));
  std::filesystem::remove(large);
}

TEST(ShardRanks, FillTheWorldOrAreRefused) {
  EXPECT_EQ(shard_ranks({.shard = -1}, 1), 1);
  EXPECT_EQ(shard_ranks({.shard = -1}, 6), 6);
  EXPECT_EQ(shard_ranks({.shard = 4}, 4), 4);
  EXPECT_EQ(shard_ranks({.replicate = 2}, 6), 3);
  EXPECT_EQ(shard_ranks({.replicate = 2, .shard = 1}, 2), 1);
  const auto message = [](const ParallelismConfig& parallelism, int64_t world_size) -> std::string {
    try {
      shard_ranks(parallelism, world_size);
    } catch (const dtensor::ValueError& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(message({.shard = 4}, 2),
            "[parallelism] replicate 1 x shard 4 = 4 ranks, launched with 2; launch that many or set "
            "parallelism.shard to auto");
  EXPECT_EQ(message({.replicate = 2, .shard = 2}, 2),
            "[parallelism] replicate 2 x shard 2 = 4 ranks, launched with 2; launch that many or set "
            "parallelism.shard to auto");
  EXPECT_EQ(message({.replicate = 2}, 3),
            "[parallelism] replicate 2 x shard 1 = 2 ranks, launched with 3; launch a multiple of "
            "parallelism.replicate");
}

}  // namespace config_test
}  // namespace apps
