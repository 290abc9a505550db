// Checkpoints and whole-model files between this library and the Python torch whose libraries these are: what one side
// writes the other loads, by itself and through tools/dcp.py. checkpoint_peer.py is the other side.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "hsdp/hsdp.h"
#include "tests/testing/multi_process.h"
#include "tests/testing/process.h"
#include "tests/testing/scratch_folder.h"

namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using namespace testing_support;
using Tensors = std::map<std::string, torch::Tensor>;

constexpr auto kTool = HSDP_SOURCE_DIR "/tools/dcp.py";

// ---- what both sides compute: as in checkpoint_peer.py ----

/// Parameters that some ranks have nothing of, and buffers of many dtypes.
struct ValuesImpl : torch::nn::Module {
  ValuesImpl() {
    register_module("embedding", torch::nn::Embedding(11, 5));
    linear = register_module("linear", torch::nn::Linear(5, 7));
    register_module("norm", torch::nn::BatchNorm1d(7));
    register_module("head", torch::nn::Linear(torch::nn::LinearOptions(7, 3).bias(false)));
    register_parameter("scale", torch::zeros({1}));
    register_buffer("codes", torch::zeros({2, 3}, torch::kInt));
    register_buffer("positions", torch::zeros({3}, torch::kLong));
    register_buffer("bytes", torch::zeros({4}, torch::kByte));
    register_buffer("mask", torch::zeros({5}, torch::kBool));
    register_buffer("small", torch::zeros({3}, torch::kHalf));
    register_buffer("brain", torch::zeros({3, 2}, torch::kBFloat16));
    register_buffer("wide", torch::zeros({2}, torch::kDouble));
    register_buffer("number", torch::zeros({}, torch::kFloat));
  }
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Values);

/// Exact in every dtype, and other values for each name.
torch::Tensor closed_form(const std::string& name, const torch::Tensor& like) {
  int64_t sum = 0;
  for (const char letter : name) sum += letter;
  auto base = (torch::arange(like.numel()) + sum) % 120;
  if (like.scalar_type() == torch::kBool) {
    base = base % 2;
  } else if (like.is_floating_point()) {
    base = (base - 60).to(torch::kDouble) / 8;
  } else if (like.scalar_type() != torch::kByte) {
    base = base - 60;
  }
  return base.to(like.scalar_type()).view(like.sizes());
}

void fill(torch::nn::Module& module) {
  torch::NoGradGuard no_grad;
  for (auto& entry : module.named_parameters()) entry.value().copy_(closed_form(entry.key(), entry.value()));
  for (auto& entry : module.named_buffers()) entry.value().copy_(closed_form(entry.key(), entry.value()));
}

struct NetImpl : torch::nn::Module {
  NetImpl()
      : first(register_module("first", torch::nn::Linear(6, 9))),
        second(register_module("second", torch::nn::Linear(9, 9))),
        third(register_module("third", torch::nn::Linear(9, 2))) {}
  torch::Tensor forward(const torch::Tensor& x) { return third(torch::tanh(second(torch::tanh(first(x))))); }
  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
};
TORCH_MODULE(Net);

/// Every rank has the whole batch, so that the number of ranks does not matter.
void train_step(const hsdp::FullySharded<NetImpl>& model, torch::optim::Optimizer& optimizer, int64_t step) {
  const auto ramp = [&](int64_t width, double factor) {
    return torch::arange(12 * width, torch::kDouble) * factor + static_cast<double>(step);
  };
  const auto inputs = torch::sin(ramp(6, 0.37)).to(torch::kFloat).view({12, 6});
  const auto targets = torch::cos(ramp(2, 0.53)).to(torch::kFloat).view({12, 2});
  optimizer.zero_grad();
  torch::mse_loss(model(inputs), targets).backward();
  optimizer.step();
}

hsdp::FullySharded<NetImpl> sharded_net(RankContext& context) {
  auto net = hsdp::meta_init([] { return Net(); });
  return hsdp::fully_shard(net, {.mesh = context.environment().mesh(), .units = hsdp::each("second")});
}

/// AdamW of two groups, biases do not decay; and the other kinds with all that their state may hold.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& kind,
                                                        const hsdp::FullySharded<NetImpl>& model) {
  using namespace torch::optim;
  const auto parameters = model.module().parameters();
  if (kind == "Adam") {
    return std::make_unique<Adam>(parameters, AdamOptions(0.01).eps(1e-3).weight_decay(0.1).amsgrad(true));
  }
  if (kind == "SGD") {
    return std::make_unique<SGD>(parameters, SGDOptions(0.1).momentum(0.9).dampening(0.1).weight_decay(0.1));
  }
  if (kind == "RMSprop") {
    return std::make_unique<RMSprop>(parameters, RMSpropOptions(0.01).eps(1e-3).momentum(0.5).centered(true));
  }
  if (kind == "Adagrad") return std::make_unique<Adagrad>(parameters, AdagradOptions(0.1).lr_decay(0.01));
  std::vector<torch::Tensor> weights, biases;
  for (auto& entry : model.module().named_parameters()) {
    (entry.key().ends_with(".weight") ? weights : biases).push_back(entry.value());
  }
  const auto options = AdamWOptions(0.01).betas({0.8, 0.95}).eps(1e-3).weight_decay(0.1);
  return std::make_unique<AdamW>(
      std::vector<OptimizerParamGroup>{{weights, std::make_unique<AdamWOptions>(options)},
                                       {biases, std::make_unique<AdamWOptions>(AdamWOptions(options).weight_decay(0))}},
      options);
}

Tensors whole_parameters(const hsdp::FullySharded<NetImpl>& model) {
  Tensors result;
  for (auto& entry : model.module().named_parameters()) result[entry.key()] = hsdp::unsharded(entry.value());
  return result;
}

/// A dict that torch.save has written.
Tensors read_tensors(const std::string& path) {
  const auto text = read_bytes(path);
  const auto dictionary = torch::pickle_load({text.begin(), text.end()}).toGenericDict();
  Tensors tensors;
  for (auto& entry : dictionary) tensors[entry.key().toStringRef()] = entry.value().toTensor();
  return tensors;
}

// ---- the exchange ----

/// This side writes, Python reads and writes, and then each test holds what came back against what should have.
class Exchange : public ::testing::Environment {
 public:
  void SetUp() override {
    folder_ = std::make_unique<ScratchFolder>();
    failure_ = failures_of_ranks(4, [this](RankContext& context) { write_values(context); });
    if (failure_.empty()) failure_ = failures_of_ranks(3, [this](RankContext& context) { write_trained(context); });
    if (!failure_.empty()) return;
    hsdp::consolidate(*this / "mesh_4/step-1", *this / "consolidated");
    hsdp::consolidate(*this / "mesh_2x2/step-1", *this / "consolidated_small", {.max_file_bytes = 150});
    const auto result = run_process(
        {.command = {HSDP_TORCH_PYTHON, HSDP_SOURCE_DIR "/tests/multi/checkpoint_peer.py", folder_->path(), kTool},
         .environment = {{"PYTHONDONTWRITEBYTECODE", "1"}},
         .timeout = std::chrono::seconds(400)});
    if (result.exit_code != 0) failure_ = to_string(result);
    if (failure_.empty()) checks_ = nlohmann::json::parse(read_bytes(*this / "checks.json"));
  }
  void TearDown() override { folder_ = nullptr; }

  /// Why there is nothing to compare; empty when there is. Each test fails of it: those behind a failed environment
  /// would count as skipped.
  const std::string& failure() const { return failure_; }
  /// Why a check of Python's failed; empty when it did not.
  std::string check(const std::string& name) const {
    if (!failure_.empty()) return failure_;
    return checks_.contains(name) ? checks_[name].get<std::string>() : "Python has not made this check";
  }
  std::string operator/(const std::string& name) const { return *folder_ / name; }

 private:
  void write_values(RankContext& context) const {
    const auto& environment = context.environment();
    Values plain;
    fill(*plain);
    for (const bool flat : {true, false}) {
      auto net = hsdp::meta_init([] { return Values(); });
      auto model = hsdp::fully_shard(
          net, {.mesh = flat ? environment.mesh() : environment.make_mesh({2, 2}, {"replicate", "shard"}),
                .units = hsdp::each("linear")});
      model.materialize(at::kCPU);
      hsdp::copy_values(model, plain);
      hsdp::save({.model = model.core()}, *this / (flat ? "mesh_4/step-1" : "mesh_2x2/step-1"));
      hsdp::export_hf(model, *this / (flat ? "exported" : "exported_small"),
                      {.max_file_bytes = flat ? uint64_t{1} << 30 : 150});
    }
  }
  /// Two steps, saved, and the third.
  void write_trained(RankContext& context) const {
    Net plain;
    fill(*plain);
    {
      torch::NoGradGuard no_grad;
      for (auto& parameter : plain->parameters()) parameter.div_(30);
    }
    auto model = sharded_net(context);
    model.materialize(at::kCPU);
    hsdp::copy_values(model, plain);
    const auto optimizer = make_optimizer("AdamW", model);
    for (int64_t step = 0; step < 2; ++step) train_step(model, *optimizer, step);
    hsdp::save({.model = model.core(),
                .optimizers = {optimizer.get()},
                .progress = {.step = 2, .tokens = 288, .data_position = 24},
                .values = {{"seed", int64_t{5}}}},
               *this / "trained/step-2");
    train_step(model, *optimizer, 2);
    hsdp::export_hf(model, *this / "ours_third");
  }

  std::unique_ptr<ScratchFolder> folder_;
  std::string failure_;
  nlohmann::json checks_;
};

Exchange& exchange = *static_cast<Exchange*>(::testing::AddGlobalTestEnvironment(new Exchange));

// ---- Python reads ----

class PythonCheck : public ::testing::TestWithParam<std::string> {};

TEST_P(PythonCheck, Passes) { EXPECT_EQ(exchange.check(GetParam()), ""); }

// Into FSDP2 models over other meshes with HuggingFaceStorageReader, and with safetensors.
INSTANTIATE_TEST_SUITE_P(Model, PythonCheck,
                         ::testing::Values("ShardsOnto2", "ShardsOnto2x2", "Consolidated", "ConsolidatedSmall",
                                           "Exported", "ExportedSmall"),
                         [](const auto& which) { return which.param; });
// Through tools/dcp.py: an FSDP2 model goes on with what was exported, and kinds of optimizers there and back.
INSTANTIATE_TEST_SUITE_P(Dcp, PythonCheck,
                         ::testing::Values("ToPython", "ToOneFile", "TrainedInPython", "KindAdam", "KindSGD",
                                           "KindRMSprop", "KindAdagrad"),
                         [](const auto& which) { return which.param; });

// ---- Python has written ----

struct Written {
  std::string test, check, path;
};
void PrintTo(const Written& written, std::ostream* out) { *out << written.path; }

class PythonWrote : public ::testing::TestWithParam<Written> {};

TEST_P(PythonWrote, TheModelThatOurShardsLoad) {
  ASSERT_EQ(exchange.check(GetParam().check), "");
  run_ranks(3, [](RankContext& context) {
    auto net = hsdp::meta_init([] { return Values(); });
    auto model = hsdp::fully_shard(net, {.mesh = context.environment().mesh(), .units = hsdp::each("linear")});
    hsdp::load(model, exchange / GetParam().path);
    const auto expect = [](const std::string& name, const torch::Tensor& tensor) {
      const auto expected = closed_form(name, tensor);
      EXPECT_EQ(tensor.scalar_type(), expected.scalar_type()) << name;
      EXPECT_TRUE(torch::equal(tensor, expected)) << name << " is " << tensor << ", expected " << expected;
    };
    for (auto& entry : net->named_parameters()) expect(entry.key(), hsdp::unsharded(entry.value()));
    for (auto& entry : net->named_buffers()) expect(entry.key(), entry.value());
  });
}

INSTANTIATE_TEST_SUITE_P(Files, PythonWrote,
                         ::testing::Values(Written{"OneFile", "WholeFilesForOurs", "whole.safetensors"},
                                           Written{"TwoFilesAndAnIndex", "WholeFilesForOurs", "two_files"},
                                           Written{"ShardsOfTwoRanks", "ShardsForOurs", "python_shards"}),
                         [](const auto& which) { return which.param.test; });

struct Imported {
  std::string kind, check, folder, third;
  hsdp::TrainingProgress progress;
};
void PrintTo(const Imported& imported, std::ostream* out) { *out << imported.folder; }

class ImportedTraining : public ::testing::TestWithParam<Imported> {};

TEST_P(ImportedTraining, GoesOnAsInPython) {
  const auto& c = GetParam();
  ASSERT_EQ(exchange.check(c.check), "");
  run_ranks(3, [&c](RankContext& context) {
    auto model = sharded_net(context);
    const auto optimizer = make_optimizer(c.kind, model);
    for (auto& group : optimizer->param_groups()) group.options().set_lr(0.5);  // the checkpoint's replaces it
    hsdp::TrainingState state{.model = model.core(), .optimizers = {optimizer.get()}};
    hsdp::load(state, exchange / c.folder);
    EXPECT_EQ(state.progress.step, c.progress.step);
    EXPECT_EQ(state.progress.tokens, c.progress.tokens);
    train_step(model, *optimizer, 2);
    const auto expected = read_tensors(exchange / c.third);
    const auto ours = whole_parameters(model);
    ASSERT_EQ(ours.size(), expected.size());
    for (auto& [name, tensor] : ours) {
      const auto difference = (tensor - expected.at(name)).abs().max().item<double>();
      EXPECT_LE(difference, 1e-6) << name;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Dcp, ImportedTraining,
    ::testing::Values(Imported{"AdamW", "FromPython", "imported_flat", "python_third.pt", {2, 288, 0}},
                      Imported{"AdamW", "FromPython", "imported_nested", "python_third.pt", {2, 0, 0}},
                      Imported{"Adam", "KindAdam", "imported_Adam", "Adam_third.pt", {2, 0, 0}},
                      // Neither torchtitan's progress nor a step of the optimizer says how far it is.
                      Imported{"SGD", "KindSGD", "imported_SGD", "SGD_third.pt", {0, 0, 0}},
                      Imported{"RMSprop", "KindRMSprop", "imported_RMSprop", "RMSprop_third.pt", {2, 0, 0}},
                      Imported{"Adagrad", "KindAdagrad", "imported_Adagrad", "Adagrad_third.pt", {2, 0, 0}}),
    [](const auto& which) { return which.param.folder.substr(std::string("imported_").size()) + which.param.kind; });

// ---- what the tool refuses ----

/// Starts the tool and expects one line on stderr, exit code 2, and nothing where the result would be.
class Refusal : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(exchange.failure(), ""); }

  template <class Matcher>
  void expect_refused(const std::string& command, const std::string& source, const Matcher& matcher,
                      std::vector<std::string> options = {}) const {
    const auto before = folder_.names();
    options.insert(options.begin(), {HSDP_TORCH_PYTHON, kTool, command, source, folder_ / "out"});
    const auto result = run_process(
        {.command = options, .environment = {{"PYTHONDONTWRITEBYTECODE", "1"}}, .timeout = std::chrono::seconds(300)});
    EXPECT_EQ(result.exit_code, 2) << to_string(result);
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
    EXPECT_THAT(result.err, AllOf(StartsWith("[dcp] "), matcher));
    EXPECT_EQ(folder_.names(), before);
  }
  /// A checkpoint of ours to damage.
  std::string copy() const {
    fs::copy(exchange / "trained/step-2", folder_ / "step-2", fs::copy_options::recursive);
    return folder_ / "step-2";
  }
  /// A folder of DCP with this pickle.
  std::string metadata(const std::string& pickle) const {
    fs::create_directory(folder_ / "dcp");
    write_bytes(folder_ / "dcp/.metadata", pickle);
    return folder_ / "dcp";
  }

  ScratchFolder folder_;
  static constexpr auto kShard = "shard-00002-model-00001-of-00001.safetensors";
};

TEST_F(Refusal, OutThatExists) {
  fs::create_directory(folder_ / "out");
  write_bytes(folder_ / "out/precious", "");
  expect_refused("export", exchange / "trained/step-2", HasSubstr("/out exists, expected a path for a new folder"));
  EXPECT_TRUE(fs::exists(folder_ / "out/precious"));
}

TEST_F(Refusal, FoldersThatAreNoCheckpoints) {
  expect_refused("export", folder_ / "nothing", HasSubstr("/nothing is missing, expected a checkpoint of hsdp"));
  expect_refused("export", exchange / "whole.safetensors", HasSubstr("is no folder, expected a checkpoint of hsdp"));
  expect_refused("export", exchange / "two_files", HasSubstr("two_files has no manifest.json, expected a complete"));
  expect_refused("import", exchange / "two_files", HasSubstr("two_files has no .metadata, expected a complete"));
}

TEST_F(Refusal, ManifestsThatAreNone) {
  const auto folder = copy();
  const auto path = folder + "/manifest.json";
  const auto manifest = nlohmann::json::parse(read_bytes(path));
  write_bytes(path, "{");
  expect_refused("export", folder, HasSubstr("manifest.json is no JSON"));
  auto changed = manifest;
  changed["version"] = 2;
  write_bytes(path, changed.dump());
  expect_refused("export", folder, HasSubstr("version 2, expected 'hsdp-checkpoint', version 1"));
  changed = manifest;
  changed["files"][0]["path"] = "../elsewhere";
  write_bytes(path, changed.dump());
  expect_refused("export", folder, HasSubstr("../elsewhere"));
  changed = manifest;
  changed.erase("optimizer");
  write_bytes(path, changed.dump());
  expect_refused("export", folder, HasSubstr("is no complete manifest (KeyError: 'optimizer')"));
}

TEST_F(Refusal, DamagedFiles) {
  const auto folder = copy();
  const auto path = folder + "/" + kShard;
  auto bytes = read_bytes(path);
  bytes.back() ^= 1;
  write_bytes(path, bytes);
  expect_refused("export", folder, AllOf(HasSubstr(kShard), HasSubstr(" has checksum "), HasSubstr("by the manifest")));
  fs::resize_file(path, bytes.size() - 1);
  expect_refused("export", folder,
                 AllOf(HasSubstr(kShard), HasSubstr(" has " + std::to_string(bytes.size() - 1) + " bytes, expected " +
                                                    std::to_string(bytes.size()))));
  fs::remove(path);
  expect_refused("export", folder, AllOf(HasSubstr(kShard), HasSubstr("No such file")));
}

// Unpickled, each would make the folder `ran`.
TEST_F(Refusal, PicklesThatRunSomething) {
  const auto ran = folder_ / "ran";
  expect_refused("import", metadata("cos\nmkdir\n(S'" + ran + "'\ntR."), HasSubstr("it names os.mkdir"));
  expect_refused("import", metadata("cbuiltins\neval\n(S'__import__(\"os\").mkdir(\"" + ran + "\")'\ntR."),
                 HasSubstr("it names builtins.eval"));
  expect_refused("import", metadata("ctorch\nload\n(S'" + ran + "'\ntR."), HasSubstr("it names torch.load"));
  // In protocol 4 names may have dots.
  expect_refused("import", metadata(std::string("\x80\x04\x8c\x05torch\x8c\x0aSize.mkdir\x93.", 23)),
                 HasSubstr("it names torch.Size.mkdir"));
  // Some versions of Python write an enumeration's member so; nothing else may be asked for in this way.
  const std::string getattr =
      "\x80\x04\x8c\x08"
      "builtins\x8c\x07getattr\x93\x8c\x05torch\x8c\x04Size\x93\x8c\x05mkdir\x86R.";
  expect_refused("import", metadata(getattr), HasSubstr("it asks builtins.getattr for more than a memory format"));
  EXPECT_FALSE(fs::exists(ran));
  ASSERT_EQ(exchange.check("EvilPayload"), "");
  expect_refused("import", exchange / "evil_payload",
                 AllOf(HasSubstr("'optimizer.param_groups.weight.lr'"), HasSubstr("it names posix.mkdir")));
  EXPECT_FALSE(fs::exists(exchange / "evil_ran"));
}

TEST_F(Refusal, MetadataThatIsNone) {
  ASSERT_EQ(exchange.check("FromPython"), "");
  expect_refused("import", metadata(""), HasSubstr(".metadata is no metadata of dcp.save (EOFError"));
  expect_refused("import", metadata("N."), HasSubstr("the metadata is not as dcp.save writes it"));
  const auto pickle = read_bytes(exchange / "python_flat/.metadata");
  expect_refused("import", metadata(pickle.substr(0, pickle.size() / 2)), HasSubstr(".metadata is no metadata"));
  // The files that it speaks of are not there.
  expect_refused("import", metadata(pickle), HasSubstr(".distcp: No such file"));
}

TEST_F(Refusal, PrefixesThatNothingHas) {
  ASSERT_EQ(exchange.check("FromPython"), "");
  expect_refused("import", exchange / "python_nested",
                 AllOf(HasSubstr("no model tensors under the prefix ''"), HasSubstr("has 'model', 'optim'")));
  expect_refused("import", exchange / "python_nested", HasSubstr("prefix 'model', expected none, or one that ends"),
                 {"--model-prefix", "model"});
}

}  // namespace
