// Checkpoints that are whole but do not fit the program: other names, shapes, dtypes, optimizers, schedules and random
// generators. What differs is listed, refused alike on all ranks, and nothing of the program changes; what a program
// allows is in the report.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "hsdp/hsdp.h"
#include "tests/testing/checkpointed_training.h"
#include "tests/testing/damaged_checkpoint.h"
#include "tests/testing/multi_process.h"
#include "tests/testing/scratch_folder.h"

namespace checkpoint_misfit_test {

namespace fs = std::filesystem;
using namespace testing_support;

constexpr uint64_t kSavedSeed = 7, kOtherSeed = 9;
constexpr int64_t kSavedSteps = 4, kOtherSteps = 3;

using Parts = std::vector<std::string>;
using Change = std::function<void(const std::string& folder)>;

class CheckpointThatDoesNotFit : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    scratch_ = std::make_unique<ScratchFolder>();
    on_two_ranks([](RankContext& context) {
      CheckpointedTraining training(context, kSavedSeed, kSavedSteps);
      hsdp::save(training.state, intact());
    });
  }
  static void TearDownTestSuite() { scratch_.reset(); }
  static std::string intact() { return *scratch_ / "intact"; }

  /// A copy, changed, with a manifest that fits.
  static std::string changed(RankContext& context, const Change& change) {
    const auto folder = context.directory() + "/step-4";
    on_rank_0(context, [&] {
      fs::remove_all(folder);
      fs::copy(intact(), folder, fs::copy_options::recursive);
      change(folder);
      seal(folder);
    });
    return folder;
  }
  /// Loading throws, and changes nothing.
  static void expect_refused(RankContext& context, CheckpointedTraining& training, const std::string& folder,
                             const Parts& parts, const hsdp::LoadOptions& options = {}) {
    const auto before = training.snapshot();
    expect_parts(value_error_of(context, [&] { hsdp::load(training.state, folder, options); }), parts);
    expect_same_snapshots(training.snapshot(), before);
  }

 private:
  static inline std::unique_ptr<ScratchFolder> scratch_;
};

/// Each once, tied ones too.
std::vector<torch::Tensor> parameters_of(const CheckpointedTraining& training) {
  std::vector<torch::Tensor> parameters;
  for (const auto& entry : training.run.net->named_parameters()) {
    if (entry.key() != "head") parameters.push_back(entry.value());
  }
  return parameters;
}

/// Changes a tensor of the model in all files, and what the manifest says of it.
void change_tensor(const std::string& folder, const std::string& name,
                   const std::function<at::Tensor(const at::Tensor&)>& change,
                   const std::function<void(hsdp::TensorFacts&)>& change_facts) {
  const bool of_optimizer = name.starts_with("state.");
  for (int rank = 0; rank < 2; ++rank) {
    const auto path = folder + "/" + (of_optimizer ? optimizer_shard_name(rank) : shard_name(rank));
    change_pieces(path, [&](Pieces& pieces) {
      for (auto& each : pieces) {
        if (each.name == name) each.values = change(each.values);
      }
    });
  }
  seal(folder, [&](auto& manifest) { change_facts((of_optimizer ? manifest.optimizer : manifest.model).at(name)); });
}

void change_dtype(const std::string& folder, const std::string& name, at::ScalarType dtype) {
  change_tensor(
      folder, name, [&](const auto& values) { return values.to(dtype); }, [&](auto& facts) { facts.dtype = dtype; });
}

void add_tensor(const std::string& folder, const std::string& name, const at::Tensor& values) {
  const std::vector<int64_t> origin(values.sizes().size(), 0);
  change_pieces(folder + "/" + shard_name(0), [&](Pieces& pieces) { pieces.push_back({name, values, origin}); });
  seal(folder, [&](auto& manifest) { manifest.model[name] = {values.scalar_type(), values.sizes().vec()}; });
}

void drop_tensor(const std::string& folder, const std::string& name) {
  for (int rank = 0; rank < 2; ++rank) {
    change_pieces(folder + "/" + shard_name(rank),
                  [&](Pieces& pieces) { std::erase_if(pieces, [&](const auto& each) { return each.name == name; }); });
  }
  seal(folder, [&](auto& manifest) { manifest.model.erase(name); });
}

// ---- names ----

TEST_F(CheckpointThatDoesNotFit, Names) {
  on_two_ranks([](RankContext& context) {
    const auto folder = changed(context, [](const std::string& copy) {
      drop_tensor(copy, "out.bias");
      drop_tensor(copy, "table");
      drop_piece(copy + "/" + rank_file_name(1), "own.table");
      add_tensor(copy, "output.bias", at::arange(5, at::kFloat));
      add_tensor(copy, "count", at::arange(2));
    });
    CheckpointedTraining training(context, kOtherSeed, kOtherSteps);
    const Parts parts = {"[load] ", " does not fit the module: missing \"out.bias\", \"table\", unexpected \"count\", ",
                         "\"output.bias\""};
    expect_refused(context, training, folder, parts);
    auto before = training.snapshot();
    expect_parts(value_error_of(context, [&] { hsdp::load(training.run.model, folder); }), parts);
    expect_same_snapshots(training.snapshot(), before);

    const auto report = hsdp::load(training.state, folder, {.strict = false});
    EXPECT_EQ(report.missing, (std::vector<std::string>{"out.bias", "table"}));
    EXPECT_EQ(report.unexpected, (std::vector<std::string>{"count", "output.bias"}));
    EXPECT_TRUE(report.same_ranks);
    CheckpointedTraining saved(context, kSavedSeed, kSavedSteps);
    auto expected = saved.run.values();
    expected["out.bias"] = before.values["out.bias"];
    expected["table"] = before.values["table"];
    expect_same_values(training.run.values(), expected);
    EXPECT_EQ(training.state.progress, saved.state.progress);
    EXPECT_EQ(training.state.values, saved.state.values);

    // On meta what is missing begins as it was constructed.
    CheckpointedTraining on_meta(context, kOtherSeed), constructed(context, kOtherSeed);
    hsdp::load(on_meta.state, folder, {.strict = false});
    constructed.run.model.materialize(at::kCPU);
    expected["out.bias"] = whole_of(constructed.run.net->out->bias);
    expected["table"] = constructed.run.net->table;
    expect_same_values(on_meta.run.values(), expected);
  });
}

TEST_F(CheckpointThatDoesNotFit, NamesOfOptimizerState) {
  on_two_ranks([](RankContext& context) {
    // What trains fewer parameters.
    const auto smaller = context.directory() + "/smaller";
    CheckpointedTraining partly(context, kSavedSeed, 0);
    torch::optim::AdamW optimizer({partly.run.net->gate}, torch::optim::AdamWOptions(0.5));
    partly.state.optimizers = {&optimizer};
    hsdp::save(partly.state, smaller);
    CheckpointedTraining training(context, kOtherSeed, kOtherSteps);
    expect_refused(context, training, smaller,
                   {"[load] " + smaller + "'s optimizer state does not fit: missing ", "\"state.out.weight.*\""});
    auto before = training.snapshot();
    const auto report = hsdp::load(training.state, smaller, {.strict = false, .optimizer_options = false});
    EXPECT_EQ(report.missing.size(), parameters_of(training).size() - 1);
    EXPECT_TRUE(report.unexpected.empty());
    auto after = training.run.values();
    EXPECT_TRUE(torch::equal(after["state.out.weight.exp_avg"], before.values["state.out.weight.exp_avg"]));
    EXPECT_FALSE(after.contains("state.gate.exp_avg"));  // it was never stepped there

    // And the reverse.
    CheckpointedTraining narrow(context, kOtherSeed, 0);
    torch::optim::AdamW of_gate({narrow.run.net->gate}, torch::optim::AdamWOptions(0.5));
    narrow.state.optimizers = {&of_gate};
    expect_refused(context, narrow, intact(),
                   {"[load] " + intact() + "'s optimizer state does not fit: unexpected ", "\"state.out.weight.*\""});
    const auto other_report = hsdp::load(narrow.state, intact(), {.strict = false});
    EXPECT_EQ(other_report.unexpected.size(), parameters_of(narrow).size() - 1);
    EXPECT_TRUE(other_report.missing.empty());
    EXPECT_EQ(of_gate.state().size(), 1u);
  });
}

TEST_F(CheckpointThatDoesNotFit, TiedParametersOfTwoValues) {
  on_two_ranks([](RankContext& context) {
    const auto folder = changed(context, [](const std::string& copy) {
      add_tensor(copy, "embedding.weight", at::ones({11, 5}, at::kFloat));
    });
    CheckpointedTraining training(context, kOtherSeed, kOtherSteps);
    const Parts parts = {"[load] unlike values for \"", "\"embedding.weight\"", "\"head\"",
                         ", expected equal ones, since the module ties them"};
    expect_refused(context, training, folder, parts);
    expect_refused(context, training, folder, parts, {.strict = false});
    auto before = training.snapshot();
    expect_parts(value_error_of(context, [&] { hsdp::load(training.run.model, folder); }), parts);
    expect_same_snapshots(training.snapshot(), before);
  });
}

// ---- shapes and dtypes ----

TEST_F(CheckpointThatDoesNotFit, Shapes) {
  on_two_ranks([](RankContext& context) {
    const auto folder = changed(context, [](const std::string& copy) {
      change_tensor(
          copy, "gate", [](const auto&) { return at::ones({2}, at::kFloat); }, [](auto& facts) { facts.sizes = {2}; });
      change_tensor(
          copy, "table",
          [](const auto&) {
            return at::ones({3, 2}, at::kInt);
          },
          [](auto& facts) {
            facts.sizes = {3, 2};
          });
      drop_piece(copy + "/" + rank_file_name(1), "own.table");
    });
    CheckpointedTraining training(context, kOtherSeed, kOtherSteps);
    const Parts parts = {"[load] ", "\"gate\" of shape [2], expected [1]",
                         "\"table\" of shape [3, 2], expected [2, 3]"};
    expect_refused(context, training, folder, parts);
    expect_refused(context, training, folder, parts, {.strict = false, .convert_dtypes = true});
    auto before = training.snapshot();
    expect_parts(value_error_of(context, [&] { hsdp::load(training.run.model, folder); }), parts);
    expect_same_snapshots(training.snapshot(), before);
  });
}

TEST_F(CheckpointThatDoesNotFit, ShapesOfOptimizerState) {
  on_two_ranks([](RankContext& context) {
    const auto folder = changed(context, [](const std::string& copy) {
      change_tensor(
          copy, "state.gate.exp_avg", [](const auto&) { return at::ones({2}, at::kFloat); },
          [](auto& facts) { facts.sizes = {2}; });
    });
    CheckpointedTraining training(context, kOtherSeed, kOtherSteps);
    const Parts parts = {"[load] ", "\"state.gate.exp_avg\" of shape [2], expected [1]"};
    expect_refused(context, training, folder, parts);
    expect_refused(context, training, folder, parts, {.strict = false, .convert_dtypes = true});
  });
}

TEST_F(CheckpointThatDoesNotFit, Dtypes) {
  on_two_ranks([](RankContext& context) {
    const auto folder = changed(context, [](const std::string& copy) {
      change_dtype(copy, "out.bias", at::kDouble);
      change_dtype(copy, "table", at::kLong);
      change_pieces(copy + "/" + rank_file_name(1), [](Pieces& pieces) {
        auto& table = piece(pieces, "own.table");
        table.values = table.values.to(at::kLong);
      });
    });
    CheckpointedTraining training(context, kOtherSeed, kOtherSteps);
    const Parts parts = {"[load] ", "\"out.bias\" of dtype Double, expected Float",
                         "\"table\" of dtype Long, expected Int"};
    expect_refused(context, training, folder, parts);
    expect_refused(context, training, folder, parts, {.strict = false});
    hsdp::load(training.state, folder, {.convert_dtypes = true});
    CheckpointedTraining saved(context, kSavedSeed, kSavedSteps);
    expect_same_values(training.run.values(), saved.run.values());
    // Weights alone are always converted.
    CheckpointedTraining other(context, kOtherSeed, kOtherSteps);
    hsdp::load(other.run.model, folder);
    EXPECT_TRUE(torch::equal(hsdp::unsharded(other.run.net->out->bias), hsdp::unsharded(saved.run.net->out->bias)));
  });
}

TEST_F(CheckpointThatDoesNotFit, ComplexValuesForRealTensors) {
  on_two_ranks([](RankContext& context) {
    const auto folder =
        changed(context, [](const std::string& copy) { change_dtype(copy, "out.weight", at::kComplexFloat); });
    CheckpointedTraining training(context, kOtherSeed, kOtherSteps);
    const Parts parts = {"[load] ", "\"out.weight\" of dtype ComplexFloat, expected Float"};
    expect_refused(context, training, folder, parts);
    expect_refused(context, training, folder, parts, {.strict = false, .convert_dtypes = true});
    auto before = training.snapshot();
    expect_parts(value_error_of(context, [&] { hsdp::load(training.run.model, folder); }), parts);
    expect_same_snapshots(training.snapshot(), before);
  });
}

TEST_F(CheckpointThatDoesNotFit, DtypesOfOptimizerState) {
  on_two_ranks([](RankContext& context) {
    for (const auto dtype : {at::kLong, at::kComplexFloat}) {
      const auto folder =
          changed(context, [&](const std::string& copy) { change_dtype(copy, "state.out.bias.exp_avg", dtype); });
      CheckpointedTraining training(context, kOtherSeed, kOtherSteps);
      const Parts parts = {"[load] ", "\"state.out.bias.exp_avg\" of dtype " + std::string(c10::toString(dtype))};
      expect_refused(context, training, folder, parts);
      expect_refused(context, training, folder, parts, {.strict = false, .convert_dtypes = true});
    }
  });
}

// ---- optimizers, schedules, scalers ----

TEST_F(CheckpointThatDoesNotFit, OptimizerOfAnotherKind) {
  on_two_ranks([](RankContext& context) {
    CheckpointedTraining training(context, kOtherSeed, kOtherSteps);
    torch::optim::SGD optimizer(parameters_of(training), torch::optim::SGDOptions(0.5).momentum(0.25));
    optimizer.step();
    training.state.optimizers = {&optimizer};
    const Parts parts = {" comes with the state of an AdamW optimizer, expected SGD, which trains it"};
    for (const bool strict : {true, false}) {
      expect_refused(context, training, intact(), parts, {.strict = strict, .optimizer_options = strict});
    }
    EXPECT_EQ(static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[0].options()).lr(), 0.5);
  });
}

TEST_F(CheckpointThatDoesNotFit, OptimizerOfAnotherKindOnOneRankAlone) {
  on_two_ranks([](RankContext& context) {
    for (const int odd : {0, 1}) {
      CheckpointedTraining training(context, kOtherSeed, kOtherSteps);
      torch::optim::SGD optimizer(parameters_of(training), torch::optim::SGDOptions(0.5).momentum(0.25));
      if (context.rank() == odd) training.state.optimizers = {&optimizer};
      expect_refused(context, training, intact(),
                     {" comes with the state of an AdamW optimizer, expected SGD, which trains it"});
    }
  });
}

TEST_F(CheckpointThatDoesNotFit, GroupsOfOtherOptions) {
  on_two_ranks([](RankContext& context) {
    CheckpointedTraining training(context, kOtherSeed, kOtherSteps);
    torch::optim::AdamW optimizer(parameters_of(training), torch::optim::AdamWOptions(0.5));
    training.state.optimizers = {&optimizer};
    expect_refused(context, training, intact(),
                   {"parameters \"", "are in one group but come with ", "lr", "keep the program's options"});
    hsdp::load(training.state, intact(), {.optimizer_options = false});
    EXPECT_EQ(static_cast<torch::optim::AdamWOptions&>(optimizer.param_groups()[0].options()).lr(), 0.5);
    EXPECT_EQ(optimizer.state().size(), parameters_of(training).size());
  });
}

TEST_F(CheckpointThatDoesNotFit, SchedulesAndScaler) {
  on_two_ranks([](RankContext& context) {
    {
      CheckpointedTraining training(context, kOtherSeed, kOtherSteps);
      training.state.lr_schedulers.clear();
      expect_refused(context, training, intact(), {"[load] the checkpoint has 1 learning-rate schedules, expected 0"});
    }
    {
      CheckpointedTraining training(context, kOtherSeed, kOtherSteps);
      torch::optim::ReduceLROnPlateauScheduler plateau(*training.run.optimizer);
      training.state.lr_schedulers = {&plateau};
      expect_refused(context, training, intact(), {"[load] learning-rate schedule 0 comes with step_count, expected "});
    }
    {
      CheckpointedTraining training(context, kOtherSeed, kOtherSteps);
      training.state.grad_scaler = nullptr;
      expect_refused(context, training, intact(),
                     {"[load] the checkpoint has a gradient scaler and the program none, expected both or neither"});
    }
    {
      // On one rank alone.
      CheckpointedTraining training(context, kOtherSeed, kOtherSteps);
      if (context.rank() == 1) training.state.grad_scaler = nullptr;
      expect_refused(context, training, intact(),
                     {"[load] the checkpoint has a gradient scaler and the program none, expected both or neither"});
    }
    {
      // Without an optimizer, a schedule still counts.
      CheckpointedTraining training(context, kOtherSeed, kOtherSteps);
      training.state.optimizers.clear();
      torch::optim::ReduceLROnPlateauScheduler plateau(*training.run.optimizer);
      training.state.lr_schedulers = {&plateau};
      expect_refused(context, training, intact(), {"[load] learning-rate schedule 0 comes with step_count, expected "});
    }
  });
}

// ---- training_state.json, with a checksum that fits ----

struct Text {
  const char* name;
  std::string from, to;
  Parts message;
};
void PrintTo(const Text& text, std::ostream* out) { *out << text.name; }

class TrainingStateThatDoesNotFit : public CheckpointThatDoesNotFit, public ::testing::WithParamInterface<Text> {};

TEST_P(TrainingStateThatDoesNotFit, IsRefusedAndChangesNothing) {
  on_two_ranks([](RankContext& context) {
    const auto folder = changed(context, [](const std::string& copy) {
      replace_in(copy + "/training_state.json", GetParam().from, GetParam().to);
    });
    CheckpointedTraining training(context, kOtherSeed, kOtherSteps);
    expect_refused(context, training, folder, GetParam().message);
    // It does not matter to a model.
    hsdp::load(training.run.model, folder);
  });
}

const Text kTexts[] = {
    {"NoJson",
     "\"progress\":{",
     "\"progress\":[",
     {"step-4/training_state.json is not a training state: it is no JSON"}},
    {"AnotherVersion",
     "\"version\":1",
     "\"version\":2",
     {"step-4/training_state.json is not a training state: its version is 2, expected 1"}},
    {"NoTokens", "\"tokens\":48,", "", {"step-4/training_state.json is not a training state: ", "lacks \"tokens\""}},
    {"StepThatIsNoNumber",
     "\"step\":4,\"tokens\"",
     "\"step\":4.5,\"tokens\"",
     {"step-4/training_state.json is not a training state: ", "progress.step", "4.5, expected "}},
    {"ScaleOfNothing",
     "\"scale\":7168.0",
     "\"scale\":0.0",
     {"step-4/training_state.json is not a training state: grad_scaler", "scale"}},
    {"OptimizerTensorThatIsNotStored",
     "\"gate\":{\"kind\":\"AdamW\"",
     "\"new\":{\"kind\":\"AdamW\"",
     {"step-4's optimizer state does not fit: missing \"state.gate.*\", unexpected \"state.new.*\""}},
};
INSTANTIATE_TEST_SUITE_P(Texts, TrainingStateThatDoesNotFit, ::testing::ValuesIn(kTexts),
                         [](const auto& which) { return std::string(which.param.name); });

TEST_F(CheckpointThatDoesNotFit, OptimizerTensorThatIsListedAndNotStored) {
  on_two_ranks([](RankContext& context) {
    const auto folder = changed(context, [](const std::string& copy) {
      for (int rank = 0; rank < 2; ++rank) {
        change_pieces(copy + "/" + optimizer_shard_name(rank), [&](Pieces& pieces) {
          std::erase_if(pieces, [&](const auto& each) { return each.name == "state.out.bias.exp_avg_sq"; });
        });
      }
      seal(copy, [](auto& manifest) { manifest.optimizer.erase("state.out.bias.exp_avg_sq"); });
    });
    CheckpointedTraining training(context, kOtherSeed, kOtherSteps);
    expect_refused(
        context, training, folder,
        {"[load] the checkpoint has no tensor \"state.out.bias.exp_avg_sq\", which its training_state.json lists"});
  });
}

// ---- the ranks' own files ----

struct OwnFile {
  const char* name;
  int rank;
  std::function<void(Pieces&)> change;
  Parts message;
};
void PrintTo(const OwnFile& file, std::ostream* out) { *out << file.name; }

class RankFileThatDoesNotFit : public CheckpointThatDoesNotFit, public ::testing::WithParamInterface<OwnFile> {};

TEST_P(RankFileThatDoesNotFit, IsRefusedAndChangesNothing) {
  on_two_ranks([](RankContext& context) {
    const auto folder = changed(context, [](const std::string& copy) {
      change_pieces(copy + "/" + rank_file_name(GetParam().rank), GetParam().change);
    });
    CheckpointedTraining training(context, kOtherSeed, kOtherSteps);
    expect_refused(context, training, folder, GetParam().message);
    expect_refused(context, training, folder, GetParam().message, {.strict = false, .convert_dtypes = true});
    hsdp::load(training.run.model, folder);
  });
}

const OwnFile kOwnFiles[] = {
    {"BufferOfAnotherShape",
     1,
     [](auto& pieces) { piece(pieces, "own.table").values = at::ones({3}, at::kInt); },
     {"[load] ", "/" + rank_file_name(1), "\"own.table\"", "[3]", "expected ", "[2, 3]"}},
    // Which a copy would broadcast.
    {"BufferOfOneElement",
     1,
     [](auto& pieces) {
       piece(pieces, "own.table").values = at::ones({1}, at::kInt);
       piece(pieces, "own.table").offsets = {0};
     },
     {"[load] ", "/" + rank_file_name(1), "\"own.table\"", "[1]", "expected ", "[2, 3]"}},
    {"BufferOfAnotherDtype",
     1,
     [](auto& pieces) {
       piece(pieces, "own.table").values = at::ones({2, 3}, at::kComplexFloat);
     },
     {"[load] ", "/" + rank_file_name(1), "\"own.table\"", "ComplexFloat", "expected Int"}},
    {"BufferThatNobodyHas",
     1,
     [](auto& pieces) {
       pieces.push_back({"own.nothing", at::ones({1}), {0}});
     },
     {"[load] ", "/" + rank_file_name(1), "\"own.nothing\""}},
    {"GeneratorOfAnotherSize",
     1,
     [](auto& pieces) { piece(pieces, "generator.host").values = at::zeros({8}, at::kByte); },
     {"\"host\"", "[8]", "expected "}},
    {"GeneratorOfAnotherSizeOnRank0",
     0,
     [](auto& pieces) { piece(pieces, "generator.host").values = at::zeros({8}, at::kByte); },
     {"\"host\"", "[8]", "expected "}},
    {"GeneratorOfNumbersThatNoneHas",
     1,
     [](auto& pieces) {
       auto& values = piece(pieces, "generator.host").values;
       values = at::full(values.sizes(), 255, at::kByte);
     },
     {"a generator refuses its state"}},
    {"GeneratorOfAnotherDtype",
     1,
     [](auto& pieces) { piece(pieces, "generator.host").values = at::zeros({5056}, at::kInt); },
     {"\"host\"", "Int", "expected "}},
    {"GeneratorOfAnotherName",
     1,
     [](auto& pieces) { piece(pieces, "generator.host").name = "generator.guest"; },
     {"\"guest\"", "expected "}},
    {"NoGenerators",
     1,
     [](auto& pieces) { std::erase_if(pieces, [](auto& each) { return each.name.starts_with("generator."); }); },
     {"no generator state \"host\""}},
    {"WhatIsNeither",
     1,
     [](auto& pieces) {
       pieces.push_back({"other", at::ones({1}), {0}});
     },
     {"[load] ", "/" + rank_file_name(1), "\"other\""}},
};
INSTANTIATE_TEST_SUITE_P(OwnFiles, RankFileThatDoesNotFit, ::testing::ValuesIn(kOwnFiles),
                         [](const auto& which) { return std::string(which.param.name); });

}  // namespace checkpoint_misfit_test
