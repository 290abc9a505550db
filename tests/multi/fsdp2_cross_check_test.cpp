// The same cases trained here and by the Python torch whose libraries these are, with its fully_shard and DDP: what
// each rank sees at each step is compared.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <ostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "dtensor/dtensor.h"
#include "hsdp/hsdp.h"
#include "tests/testing/multi_process.h"
#include "tests/testing/process.h"

namespace {

namespace fs = std::filesystem;
using namespace testing_support;

// ---- the cases, for both sides ----

/// One way to train. Values are FSDP2's, dtypes under their names in Python.
struct Case {
  std::string name;
  std::vector<int64_t> mesh = {2};
  int64_t vocabulary = 16, width = 8, hidden = 24;
  bool tied = false;  // the head is the embedding's weight
  std::string param_dtype = "", reduce_dtype = "", output_dtype = "";
  nlohmann::json reshard_after_forward = nullptr;
  int64_t shard_dim = 0;        // of the parameters that have it
  bool norm_with_head = false;  // one unit of these two
  bool data_parallel = false;   // the peer is DDP
  double divide_factor = 0;
  bool summed_loss = false;
  int64_t micro_batches = 1;
  std::string sync = "each";  // which backwards of a step communicate: "each", "last", or "last all-reduce"
  double max_norm = 0;
  std::string optimizer = "FusedAdamW";
  int64_t steps = 3;

  int ranks() const { return static_cast<int>(c10::multiply_integers(mesh)); }
  /// Allowed differences, of the largest entry of a tensor. Both sides run the same kernels, and sums over two ranks
  /// have one order only: there a bit of low precision that differs is a fault as well.
  double tolerance() const {
    const bool is_low_precision = !param_dtype.empty() || !reduce_dtype.empty();
    return is_low_precision && *std::max_element(mesh.begin(), mesh.end()) > 2 ? 1.6e-2 : 1e-6;
  }
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

nlohmann::json to_json(const Case& c) {
  return {{"name", c.name},
          {"ranks", c.ranks()},
          {"mesh", c.mesh},
          {"vocabulary", c.vocabulary},
          {"width", c.width},
          {"hidden", c.hidden},
          {"tied", c.tied},
          {"param_dtype", c.param_dtype},
          {"reduce_dtype", c.reduce_dtype},
          {"output_dtype", c.output_dtype},
          {"reshard_after_forward", c.reshard_after_forward},
          {"shard_dim", c.shard_dim},
          {"norm_with_head", c.norm_with_head},
          {"data_parallel", c.data_parallel},
          {"divide_factor", c.divide_factor},
          {"summed_loss", c.summed_loss},
          {"micro_batches", c.micro_batches},
          {"sync", c.sync},
          {"max_norm", c.max_norm},
          {"optimizer", c.optimizer},
          {"steps", c.steps}};
}

const std::string kBfloat16 = "bfloat16", kFloat16 = "float16", kFloat32 = "float32";

const std::vector<Case> kCases = {
    {.name = "OneAxisOfTwo"},
    {.name = "OneAxisOfFour", .mesh = {4}},
    {.name = "TwoByTwo", .mesh = {2, 2}},
    {.name = "Sgd", .optimizer = "SGD"},
    {.name = "SgdOnFour", .mesh = {4}, .optimizer = "SGD"},
    {.name = "AdamW", .optimizer = "AdamW"},
    {.name = "UnevenRows", .vocabulary = 3, .width = 7, .hidden = 5},
    {.name = "UnevenRowsOnFour", .mesh = {4}, .vocabulary = 3, .width = 7, .hidden = 5},
    {.name = "UnevenRowsTwoByTwo", .mesh = {2, 2}, .vocabulary = 3, .width = 7, .hidden = 5, .max_norm = 0.1},
    {.name = "TiedHead", .tied = true},
    {.name = "TiedHeadUnevenOnFour", .mesh = {4}, .vocabulary = 3, .width = 7, .hidden = 5, .tied = true},
    {.name = "UnitOfNormAndHead", .norm_with_head = true},
    {.name = "ReshardTrue", .reshard_after_forward = true},
    {.name = "ReshardFalse", .reshard_after_forward = false},
    {.name = "ReshardTwoOfFour", .mesh = {4}, .vocabulary = 3, .width = 7, .hidden = 5, .reshard_after_forward = 2},
    {.name = "ReshardFalseTwoByTwo", .mesh = {2, 2}, .reshard_after_forward = false},
    {.name = "ShardDimOne", .shard_dim = 1},
    {.name = "ShardDimOneTwoByTwo", .mesh = {2, 2}, .shard_dim = 1},
    {.name = "Clipped", .max_norm = 0.1},
    {.name = "ClippedOnFour", .mesh = {4}, .vocabulary = 3, .width = 7, .hidden = 5, .max_norm = 0.1},
    {.name = "DivideFactorAndSums", .divide_factor = 3, .summed_loss = true},
    {.name = "DivideFactorAndSumsTwoByTwo", .mesh = {2, 2}, .divide_factor = 7, .summed_loss = true, .max_norm = 5},
    {.name = "Accumulated", .micro_batches = 3},
    {.name = "AccumulatedWithoutSync", .micro_batches = 3, .sync = "last"},
    {.name = "AccumulatedWithoutSyncTwoByTwo", .mesh = {2, 2}, .micro_batches = 3, .sync = "last", .max_norm = 0.1},
    {.name = "AccumulatedThenAllReduced", .mesh = {2, 2}, .micro_batches = 3, .sync = "last all-reduce"},
    {.name = "DataParallel", .mesh = {2, 1}, .data_parallel = true, .max_norm = 0.1},
    {.name = "DataParallelOnFour", .mesh = {4, 1}, .tied = true, .data_parallel = true},
    {.name = "DataParallelWithoutSync", .mesh = {2, 1}, .data_parallel = true, .micro_batches = 3, .sync = "last"},
    {.name = "Bf16ReducedInFp32", .param_dtype = kBfloat16, .reduce_dtype = kFloat32},
    {.name = "Bf16ReducedInFp32OnFour",
     .mesh = {4},
     .vocabulary = 3,
     .width = 7,
     .hidden = 5,
     .tied = true,
     .param_dtype = kBfloat16,
     .reduce_dtype = kFloat32},
    {.name = "Bf16ReducedInFp32TwoByTwo", .mesh = {2, 2}, .param_dtype = kBfloat16, .reduce_dtype = kFloat32},
    {.name = "Bf16WithoutSync", .param_dtype = kBfloat16, .reduce_dtype = kFloat32, .micro_batches = 3, .sync = "last"},
    {.name = "Bf16ThenAllReduced",
     .mesh = {2, 2},
     .param_dtype = kBfloat16,
     .reduce_dtype = kFloat32,
     .micro_batches = 3,
     .sync = "last all-reduce"},
    {.name = "Bf16WithFp32Output", .param_dtype = kBfloat16, .reduce_dtype = kFloat32, .output_dtype = kFloat32},
    {.name = "Bf16ShardDimOne", .param_dtype = kBfloat16, .reduce_dtype = kFloat32, .shard_dim = 1},
    {.name = "Bf16ReducedInBf16", .param_dtype = kBfloat16, .reduce_dtype = kBfloat16},
    {.name = "Bf16ReducedInBf16TwoByTwo", .mesh = {2, 2}, .param_dtype = kBfloat16, .reduce_dtype = kBfloat16},
    {.name = "Bf16ReducedInBf16OnFour", .mesh = {4}, .param_dtype = kBfloat16, .reduce_dtype = kBfloat16, .steps = 1},
    {.name = "Bf16Accumulated", .param_dtype = kBfloat16, .reduce_dtype = kBfloat16, .micro_batches = 3},
    {.name = "Bf16Alone", .param_dtype = kBfloat16, .micro_batches = 2, .sync = "last"},
    {.name = "ReducedInBf16", .reduce_dtype = kBfloat16},
    {.name = "Fp16", .param_dtype = kFloat16, .reduce_dtype = kFloat16},
    {.name = "Fp16TwoByTwo", .mesh = {2, 2}, .param_dtype = kFloat16, .reduce_dtype = kFloat16},
    {.name = "Fp16OnFour", .mesh = {4}, .param_dtype = kFloat16, .reduce_dtype = kFloat16},
};

// ---- the model, the batches: as in fsdp2_peer.py ----

// torch::nn::Linear rounds the product of a batch of sequences before it adds the bias, and Python's does not.
torch::Tensor affine(torch::nn::Linear& linear, const torch::Tensor& x) {
  return torch::linear(x, linear->weight, linear->bias);
}

struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t width, int64_t hidden)
      : norm1(register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        qkv(register_module("qkv", torch::nn::Linear(torch::nn::LinearOptions(width, 3 * width).bias(false)))),
        out(register_module("out", torch::nn::Linear(width, width))),
        norm2(register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up(register_module("up", torch::nn::Linear(width, hidden))),
        down(register_module("down", torch::nn::Linear(hidden, width))) {}
  torch::Tensor forward(torch::Tensor x) {
    const auto parts = affine(qkv, norm1(x)).chunk(3, -1);
    x = x + affine(out, at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true));
    return x + affine(down, torch::gelu(affine(up, norm2(x))));
  }
  torch::nn::LayerNorm norm1{nullptr};
  torch::nn::Linear qkv{nullptr}, out{nullptr};
  torch::nn::LayerNorm norm2{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  explicit NetImpl(const Case& c)
      : embedding(register_module("embedding", torch::nn::Embedding(c.vocabulary, c.width))),
        features(register_module("features", torch::nn::Linear(4, c.width))),
        blocks(register_module("blocks", torch::nn::ModuleList(Block(c.width, c.hidden), Block(c.width, c.hidden)))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({c.width})))) {
    if (c.tied) return;
    head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(c.width, c.vocabulary).bias(false)));
  }
  torch::Tensor forward(torch::Tensor tokens, torch::Tensor more) {
    auto x = embedding(tokens) + affine(features, more);
    for (auto& block : *blocks) x = block->as<Block>()->forward(x);
    x = norm(x);
    return head.is_empty() ? torch::linear(x, embedding->weight) : affine(head, x);
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Linear features{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Net);

struct Batch {
  Batch(const Case& c, int64_t rank, int64_t step, int64_t micro) {
    const auto start = 7 * rank + 11 * step + 5 * micro;
    const auto index = torch::arange(3 * 4) + start;
    tokens = (index * index % c.vocabulary).view({3, 4});
    targets = ((3 * index + 1) % c.vocabulary).view({3, 4});
    features = torch::sin(torch::arange(3 * 4 * 4, torch::kDouble) * 0.37 + start).to(torch::kFloat).view({3, 4, 4});
  }
  torch::Tensor tokens, features, targets;
};

// ---- the other side ----

using Tensors = std::map<std::string, torch::Tensor>;

/// What the Python side wrote; it runs once, for all cases.
class Peer : public ::testing::Environment {
 public:
  void SetUp() override {
    folder_ = (fs::temp_directory_path() / "hsdp_fsdp2_cross_check_XXXXXX").string();
    if (!mkdtemp(folder_.data())) {
      failure_ = "no temporary folder " + folder_;
      return;
    }
    auto cases = nlohmann::json::array();
    for (auto& c : kCases) cases.push_back(to_json(c));
    std::ofstream(folder_ + "/cases.json") << cases;
    const auto result =
        run_process({.command = {HSDP_TORCH_PYTHON, HSDP_SOURCE_DIR "/tests/multi/fsdp2_peer.py", folder_},
                     .environment = {{"PYTHONDONTWRITEBYTECODE", "1"}},
                     .timeout = std::chrono::seconds(1200)});
    if (result.exit_code != 0) failure_ = to_string(result);
  }
  void TearDown() override { fs::remove_all(folder_); }

  /// Why the Python side has nothing to compare with; empty when it has. Each case fails of it: cases behind a failed
  /// environment would count as skipped.
  const std::string& failure() const { return failure_; }
  std::string weights(const Case& c) const { return folder_ + "/" + c.name + "/weights.pt"; }
  Tensors of_rank(const Case& c, int rank) const {
    const auto path = folder_ + "/" + c.name + "/" + std::to_string(rank) + ".pt";
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error("the Python side wrote no " + path);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    Tensors tensors;
    const auto dictionary = torch::pickle_load(bytes).toGenericDict();
    for (auto& entry : dictionary) tensors[entry.key().toStringRef()] = entry.value().toTensor();
    return tensors;
  }

 private:
  std::string folder_, failure_;
};

Peer* const peer = static_cast<Peer*>(::testing::AddGlobalTestEnvironment(new Peer));

double largest_entry(const torch::Tensor& tensor) {
  return tensor.numel() == 0 ? 0 : tensor.detach().abs().max().item<double>();
}

/// Holds what this rank sees against what its peer saw: each tensor of the peer's exactly once.
class Comparison {
 public:
  Comparison(Tensors expected, double tolerance) : expected_(std::move(expected)), tolerance_(tolerance) {}

  /// Differences count relative to the largest entry, or to `scale` where that is larger.
  void see(const std::string& kind, const std::string& name, const torch::Tensor& ours, double scale = 0) {
    const auto found = expected_.find(name);
    if (found == expected_.end()) {
      ADD_FAILURE() << name << ": FSDP2's side has none";
      return;
    }
    const auto theirs = found->second;
    expected_.erase(found);
    ASSERT_EQ(ours.sizes(), theirs.sizes()) << name;
    ASSERT_EQ(ours.scalar_type(), theirs.scalar_type()) << name;
    if (theirs.numel() == 0) return;
    const auto difference = largest_entry(ours.detach().to(torch::kDouble) - theirs.to(torch::kDouble));
    scale = std::max(scale, largest_entry(theirs));
    EXPECT_TRUE(difference <= tolerance_ * scale)
        << name << " differs from FSDP2's by " << difference << ", its scale is " << scale << " (" << difference / scale
        << " of it), expected at most " << tolerance_ << " of it";
    auto& measured = measured_[kind];
    measured = std::max(measured, scale == 0 ? difference : difference / scale);
  }
  /// Over all tensors of the peer whose name starts so.
  double largest_entry_of(const std::string& start) const {
    double largest = 0;
    for (auto& [name, tensor] : expected_) {
      if (name.starts_with(start)) largest = std::max(largest, largest_entry(tensor));
    }
    return largest;
  }
  void finish(const std::string& name, bool prints) {
    for (auto& [rest, tensor] : expected_) ADD_FAILURE() << rest << ": only FSDP2's side has it";
    if (!prints) return;
    std::printf("[ measured ] %s: largest differences of rank 0, relative:", name.c_str());
    for (auto& [kind, value] : measured_) std::printf(" %s %.1e", kind.c_str(), value);
    std::printf("\n");
  }

 private:
  Tensors expected_;
  double tolerance_;
  std::map<std::string, double> measured_;
};

// ---- this side ----

std::optional<at::ScalarType> dtype_of(const std::string& name) {
  if (name.empty()) return std::nullopt;
  return std::map<std::string, at::ScalarType>{
      {kBfloat16, at::kBFloat16}, {kFloat16, at::kHalf}, {kFloat32, at::kFloat}}
      .at(name);
}

hsdp::FullyShardOptions options_of(const Case& c, const hsdp::Environment& env) {
  hsdp::FullyShardOptions options{
      .mesh = c.mesh.size() == 1 ? env.mesh() : env.make_mesh(c.mesh, {"replicate", "shard"}),
      .units = hsdp::each("blocks.*"),
      .mixed_precision = {.param_dtype = dtype_of(c.param_dtype),
                          .reduce_dtype = dtype_of(c.reduce_dtype),
                          .output_dtype = dtype_of(c.output_dtype)}};
  if (c.norm_with_head) options.units = options.units | hsdp::together(hsdp::each("norm") | hsdp::each("head"));
  const auto& reshard = c.reshard_after_forward;
  if (reshard.is_boolean()) options.reshard_after_forward = reshard.get<bool>();
  if (reshard.is_number()) options.reshard_after_forward = reshard.get<int64_t>();
  if (c.shard_dim != 0) {
    options.shard_placement_fn = [dim = c.shard_dim](const std::string&, const at::Tensor& parameter) {
      return parameter.dim() > dim ? std::optional<int64_t>(dim) : std::nullopt;
    };
  }
  return options;
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Case& c, const std::vector<torch::Tensor>& parameters) {
  // An eps of the size of gradients lets their scale show in the parameters, and rounding not.
  const auto adamw = torch::optim::AdamWOptions(0.01).eps(1e-3).weight_decay(0.1);
  if (c.optimizer == "AdamW") return std::make_unique<torch::optim::AdamW>(parameters, adamw);
  if (c.optimizer == "FusedAdamW") return std::make_unique<hsdp::FusedAdamW>(parameters, adamw);
  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
}

void train(RankContext& context, const Case& c) {
  const auto& env = context.environment();
  Comparison comparison(peer->of_rank(c, context.rank()), c.tolerance());
  auto net = hsdp::meta_init([&] { return Net(c); });
  auto model = hsdp::fully_shard(net, options_of(c, env));
  hsdp::load(model, peer->weights(c));
  if (c.divide_factor != 0) model.set_gradient_divide_factor(c.divide_factor);
  const auto optimizer = make_optimizer(c, model->parameters());
  const auto& named = net->named_parameters();
  for (int64_t step = 0; step < c.steps; ++step) {
    const auto at = std::to_string(step) + " ";
    optimizer->zero_grad();
    for (int64_t micro = 0; micro < c.micro_batches; ++micro) {
      const Batch batch(c, context.rank(), step, micro);
      const bool is_last = micro + 1 == c.micro_batches;
      if (c.sync == "last") model.set_requires_gradient_sync(is_last);
      if (c.sync == "last all-reduce") model.set_requires_all_reduce(is_last);
      const auto logits = model(batch.tokens, batch.features);
      const auto reduction = c.summed_loss ? at::Reduction::Sum : at::Reduction::Mean;
      const auto loss =
          at::cross_entropy_loss(logits.to(torch::kFloat).flatten(0, 1), batch.targets.flatten(), {}, reduction);
      loss.backward();
      comparison.see("logits", at + "logits " + std::to_string(micro), logits);
      comparison.see("loss", at + "loss " + std::to_string(micro), loss);
    }
    // What is left of terms that cancel carries their rounding: small gradients beside large ones.
    const auto scale = 0.1 * comparison.largest_entry_of(at + "gradient ");
    for (auto& entry : named) {
      comparison.see("gradient", at + "gradient " + entry.key(), hsdp::unsharded(entry.value().grad()), scale);
    }
    if (c.max_norm != 0) {
      const auto norm = hsdp::clip_grad_norm_(model->parameters(), c.max_norm);
      comparison.see("norm", at + "norm", torch::tensor(static_cast<float>(norm)));
    }
    optimizer->step();
    for (auto& entry : named) {
      comparison.see("parameter", at + "parameter " + entry.key(), hsdp::unsharded(entry.value()));
    }
  }
  for (auto& entry : named) {
    const auto scale = largest_entry(hsdp::unsharded(entry.value()));
    comparison.see("shard", "shard " + entry.key(), dtensor::DTensor(entry.value()).to_local(), scale);
  }
  comparison.finish(c.name, context.rank() == 0);
}

class Fsdp2 : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(CrossCheck, Fsdp2, ::testing::ValuesIn(kCases),
                         [](const auto& which) { return which.param.name; });

TEST_P(Fsdp2, SeesTheSameOnEveryRankAtEveryStep) {
  ASSERT_EQ(peer->failure(), "") << "FSDP2's side failed";
  run_ranks(GetParam().ranks(), [](RankContext& context) { train(context, GetParam()); });
}

}  // namespace
