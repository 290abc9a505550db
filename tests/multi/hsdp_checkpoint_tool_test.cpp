// hsdp_checkpoint on checkpoints that hsdp_train has written and on files with known values; and on what is neither.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "apps/checkpoint_report.h"
#include "dtensor/error.h"
#include "hsdp/checkpoint/shard_file.h"
#include "tests/testing/process.h"
#include "tests/testing/train_program.h"

namespace hsdp_checkpoint_tool_test {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using namespace testing_support;

/// A file of whole tensors.
void write_model(const fs::path& path, const std::map<std::string, torch::Tensor>& tensors) {
  std::vector<hsdp::ShardPiece> pieces;
  for (const auto& [name, values] : tensors) {
    pieces.push_back({name, values, std::vector<int64_t>(size_t(values.dim()), 0)});
  }
  fs::create_directories(path.parent_path());
  hsdp::write_shard_file("test", path.string(), pieces, /*sharded=*/false);
}

void flip_byte(const fs::path& path, uintmax_t position) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  char byte = 0;
  file.seekg(std::streamoff(position)).get(byte);
  file.seekp(std::streamoff(position)).put(char(byte ^ 0x10));
}

class HsdpCheckpoint : public TrainProgramTest {
 protected:
  ProcessResult tool(const Arguments& arguments) const { return run_process(program(arguments, "hsdp_checkpoint")); }

  /// `name/kept/step-2`, written by a number of ranks.
  void train(const std::string& name, int count, const std::vector<std::string>& settings = {}) {
    std::vector<std::string> all = {"training.steps=2", "metrics.folder=" + name,
                                    "checkpoint.folder=" + name + "/kept"};
    all.insert(all.end(), settings.begin(), settings.end());
    expect_success(run(count, with_settings(all)));
  }

  /// What diff says of a tensor in two files: its line about it, or `equal`.
  std::string diff_of(const torch::Tensor& a, const torch::Tensor& b) {
    write_model(folder_ / "a.safetensors", {{"x", a}});
    write_model(folder_ / "b.safetensors", {{"x", b}});
    std::ostringstream out;
    const bool equal = apps::diff((folder_ / "a.safetensors").string(), (folder_ / "b.safetensors").string(), out);
    const auto text = out.str(), first = text.substr(0, text.find('\n'));
    EXPECT_EQ(equal, first.starts_with("equal: model of "));
    EXPECT_EQ(count_of("\n", text), equal ? 1 : 2) << text;
    EXPECT_EQ(count_of("\ndifferent: 1 lines between ", text), equal ? 0 : 1) << text;
    return equal ? "equal" : first;
  }

  static void expect_refused(const ProcessResult& result, const std::string& where,
                             const std::vector<std::string>& parts) {
    EXPECT_EQ(result.exit_code, 2) << to_string(result);
    EXPECT_THAT(result.err, AllOf(StartsWith("[" + where + "] "), Not(HasSubstr("frame #"))));
    EXPECT_EQ(count_of("\n", result.err), 1) << result.err;
    for (const auto& part : parts) EXPECT_THAT(result.err, HasSubstr(part));
  }
};

// ---- inspect ----

TEST_F(HsdpCheckpoint, InspectSaysWhatACheckpointHolds) {
  train("run", 2, {"mixed_precision.param_dtype=float16", "grad_scaler.scale=1024"});
  const auto result = tool({"inspect", "run/kept"});
  EXPECT_EQ(result.exit_code, 0) << to_string(result);
  EXPECT_EQ(result.err, "");
  EXPECT_EQ(lines_with("run/kept: ", result.out),
            std::vector<std::string>{"run/kept: the newest checkpoint is run/kept/step-2"});
  for (const char* line :
       {"run/kept/step-2: a complete checkpoint\n", "step: 2, 384 tokens, data position 2\n",
        "written by: 2 ranks on mesh(cpu, shard=2), torch 2.11", "model: 21 tensors, 13392 elements of F32, 53.6 kB\n",
        "optimizer: AdamW, 42 tensors, 26784 elements of F32, 107.1 kB\n", "\ntraining.seed: 1\n",
        "\ndata.format: \"bytes\"\n", "\"scale\":1024.0", "\"growth_tracker\":2"}) {
    EXPECT_THAT(result.out, HasSubstr(line));
  }
  EXPECT_THAT(result.out, Not(HasSubstr("embed_tokens")));
  const auto all = tool({"inspect", "run/kept/step-2", "--tensors"});
  EXPECT_THAT(all.out, StartsWith(result.out.substr(result.out.find('\n') + 1)));
  EXPECT_THAT(all.out, HasSubstr("model tensors:\n  lm_head.weight F32 (256, 16) in 2 parts\n"));
  EXPECT_THAT(all.out, HasSubstr("  state.model.norm.weight.exp_avg F32 (16) in 2 parts\n"));
  EXPECT_EQ(lines_with("  ", all.out).size(), 63u) << all.out;
}

TEST_F(HsdpCheckpoint, InspectSaysWhatAModelHolds) {
  write_model(folder_ / "whole/model.safetensors",
              {{"b", torch::zeros({3}, torch::kInt64)}, {"a", torch::zeros({2, 4})}, {"c", torch::zeros({})}});
  for (const char* path : {"whole", "whole/model.safetensors"}) {
    const auto result = tool({"inspect", path, "--tensors"});
    EXPECT_EQ(result.exit_code, 0) << to_string(result);
    EXPECT_EQ(result.out, std::string(path) +
                              ": a whole model\nmodel: 3 tensors, 12 elements of F32, I64, 60 bytes\n"
                              "model tensors:\n  a F32 (2, 4)\n  b I64 (3)\n  c F32 ()\n");
  }
}

// ---- verify ----

TEST_F(HsdpCheckpoint, VerifyFindsADamagedByteInEveryFile) {
  train("run", 2);
  const fs::path kept = folder_ / "run/kept/step-2";
  const auto sound = tool({"verify", "run/kept"});
  EXPECT_EQ(sound.exit_code, 0) << to_string(sound);
  EXPECT_THAT(sound.out, HasSubstr("run/kept/step-2: complete, and all "));
  EXPECT_THAT(sound.out, EndsWith(" are as they were written: 21 tensors of the model, 42 of the optimizer\n"));

  const auto verdict = [&]() -> std::string {
    std::ostringstream out;
    try {
      apps::verify(kept.string(), out);
    } catch (const dtensor::ValueError& error) {
      return error.what();
    }
    return "sound";
  };
  int files = 0;
  for (const auto& entry : fs::recursive_directory_iterator(kept)) {
    if (!entry.is_regular_file()) continue;
    ++files;
    SCOPED_TRACE(entry.path().string());
    const auto name = entry.path().filename().string();
    const auto bytes = read_text(entry.path());
    // The manifest ends with a brace and a newline.
    for (const auto position : {size_t(0), bytes.size() / 2, bytes.size() - 2}) {
      flip_byte(entry.path(), position);
      EXPECT_THAT(verdict(), StartsWith("[verify] ")) << position;
      // What the manifest then says may not fit another file.
      if (name != "manifest.json") {
        EXPECT_THAT(verdict(), HasSubstr(name)) << position;
      }
      write_text(entry.path(), bytes);
    }
    if (name != "manifest.json") {
      write_text(entry.path(), bytes.substr(0, bytes.size() - 1));
      EXPECT_THAT(verdict(), AllOf(StartsWith("[verify] "), HasSubstr(name)));
      write_text(entry.path(), bytes + " ");
      EXPECT_THAT(verdict(), AllOf(StartsWith("[verify] "), HasSubstr(name)));
    }
    fs::remove(entry.path());
    EXPECT_THAT(verdict(), AllOf(StartsWith("[verify] "), HasSubstr(name)));
    write_text(entry.path(), bytes);
    EXPECT_EQ(verdict(), "sound");
  }
  // Model, optimizer and own tensors of two ranks, scalars, manifest.
  EXPECT_EQ(files, 8);
  write_text(kept / "optimizer/more.safetensors", "x");
  expect_refused(tool({"verify", "run/kept"}), "verify", {"more.safetensors"});
}

// ---- consolidate ----

TEST_F(HsdpCheckpoint, ConsolidateMakesWholeModels) {
  train("run", 2);
  const auto result = tool({"consolidate", "run/kept", "whole"});
  EXPECT_EQ(result.exit_code, 0) << to_string(result);
  EXPECT_EQ(result.out,
            "run/kept: the newest checkpoint is run/kept/step-2\n"
            "whole: 21 tensors, 13392 elements of F32, 53.6 kB, from run/kept/step-2\n");
  EXPECT_TRUE(fs::exists(folder_ / "whole/model.safetensors"));
  const auto same = tool({"diff", "run/kept/step-2", "whole"});
  EXPECT_EQ(same.exit_code, 0) << to_string(same);
  EXPECT_EQ(same.out, "equal: model of run/kept/step-2 and whole\n");

  // The two tables of 256 x 16 have a file each.
  EXPECT_EQ(tool({"consolidate", "run/kept", "parts", "--max-file-size", "17kB"}).exit_code, 0);
  EXPECT_TRUE(fs::exists(folder_ / "parts/model.safetensors.index.json"));
  EXPECT_TRUE(fs::exists(folder_ / "parts/model-00001-of-00004.safetensors"));
  EXPECT_EQ(tool({"diff", "parts", "whole"}).exit_code, 0);

  const auto half = tool({"consolidate", "parts", "half", "--dtype", "bfloat16"});
  EXPECT_EQ(half.out, "half: 21 tensors, 13392 elements of BF16, 26.8 kB, from parts\n");
  const auto other = tool({"diff", "half", "whole"});
  EXPECT_EQ(other.exit_code, 1);
  EXPECT_EQ(lines_with("model ", other.out).size(), 21u);
  EXPECT_THAT(other.out, HasSubstr("model lm_head.weight has dtype BF16 and F32\n"));

  expect_refused(tool({"consolidate", "run/kept", "whole"}), "consolidate", {"whole", "model.safetensors"});
  expect_refused(tool({"consolidate", "run/kept", "text.bin"}), "consolidate", {"text.bin"});
  expect_refused(tool({"consolidate", "run/kept", "new", "--max-file-size", "5 apples"}), "command line", {"apples"});
  expect_refused(tool({"consolidate", "run/kept", "new", "--max-file-size", "0"}), "command line", {});
  expect_refused(tool({"consolidate", "run/kept", "new", "--dtype", "int8"}), "command line", {"int8", "bfloat16"});
  EXPECT_FALSE(fs::exists(folder_ / "new"));
}

// ---- diff ----

TEST_F(HsdpCheckpoint, DiffCountsElementsAndNamesTheFirst) {
  const auto inf = std::numeric_limits<double>::infinity(), nan = std::nan("");
  const auto zeros = torch::zeros({2, 3});
  EXPECT_EQ(diff_of(zeros, zeros.clone()), "equal");
  auto values = zeros.clone();
  values[0][2] = 0.25;
  values[1][0] = -4;
  EXPECT_EQ(diff_of(zeros, values), "model x differs in 2 of 6 elements, by at most 4, first at (0, 2): 0 and 0.25");
  for (const auto dtype : {torch::kFloat64, torch::kBFloat16, torch::kHalf}) {
    EXPECT_EQ(diff_of(zeros.to(dtype), values.to(dtype)),
              "model x differs in 2 of 6 elements, by at most 4, first at (0, 2): 0 and 0.25");
  }
  EXPECT_EQ(diff_of(torch::tensor(1.0), torch::tensor(1.5)),
            "model x differs in 1 of 1 elements, by at most 0.5, first at (): 1 and 1.5");
  // Bits count, not values.
  EXPECT_EQ(diff_of(torch::tensor({0.0}), torch::tensor({-0.0})),
            "model x differs in 1 of 1 elements, by at most 0, first at (0): 0 and -0");
  EXPECT_EQ(diff_of(torch::tensor({nan, inf}), torch::tensor({nan, inf})), "equal");
  EXPECT_EQ(diff_of(torch::tensor({1.0, nan}), torch::tensor({3.0, 7.0})),
            "model x differs in 2 of 2 elements, by at most nan, first at (0): 1 and 3");
  EXPECT_EQ(diff_of(torch::tensor({inf}), torch::tensor({1.0})),
            "model x differs in 1 of 1 elements, by at most inf, first at (0): inf and 1");
  EXPECT_EQ(diff_of(torch::tensor({0.1F}), torch::tensor({0.1F}).mul(2)),
            "model x differs in 1 of 1 elements, by at most 0.10000000149011612, first at (0): 0.1 and 0.2");
  // Doubles cannot tell these apart.
  const auto large = torch::full({2}, int64_t(1) << 60, torch::kInt64);
  EXPECT_EQ(diff_of(large, large + torch::tensor({0, 1})),
            "model x differs in 1 of 2 elements, by at most 1, first at (1): 1152921504606846976 and "
            "1152921504606846977");
  EXPECT_EQ(diff_of(torch::tensor({true, false}), torch::tensor({true, true})),
            "model x differs in 1 of 2 elements, by at most 1, first at (1): 0 and 1");
  EXPECT_EQ(diff_of(torch::zeros({0, 3}), torch::zeros({0, 3})), "equal");
  EXPECT_EQ(diff_of(torch::zeros({0, 3}), torch::zeros({3, 0})), "model x has shape (0, 3) and (3, 0)");
  EXPECT_EQ(diff_of(zeros, zeros.to(torch::kInt)), "model x has dtype F32 and I32");
}

TEST_F(HsdpCheckpoint, DiffLooksAtLargeTensorsInParts) {
  constexpr int64_t kSlab = int64_t(32) << 20;
  auto a = torch::zeros({2 * kSlab + 6}, torch::kUInt8), b = a.clone();
  b[kSlab] = 7;
  b[2 * kSlab + 5] = 3;
  EXPECT_EQ(diff_of(a, b), "model x differs in 2 of 67108870 elements, by at most 7, first at (33554432): 0 and 7");
  b[kSlab] = 0;
  EXPECT_EQ(diff_of(a, b), "model x differs in 1 of 67108870 elements, by at most 3, first at (67108869): 0 and 3");
  // A NaN of an earlier part is not forgotten.
  auto c = torch::zeros({kSlab}), d = c.clone();
  c[0] = std::nan("");
  d[kSlab - 1] = 1;
  EXPECT_EQ(diff_of(c, d), "model x differs in 2 of 33554432 elements, by at most nan, first at (0): nan and 0");
  // Rows that are larger than a part.
  EXPECT_EQ(diff_of(a.view({2, -1}), b.view({2, -1})),
            "model x differs in 1 of 67108870 elements, by at most 3, first at (1, 33554434): 0 and 3");
}

TEST_F(HsdpCheckpoint, DiffNamesWhatOnlyOneSideHas) {
  write_model(folder_ / "a/model.safetensors", {{"x", torch::zeros({2})}, {"y", torch::ones({2})}});
  write_model(folder_ / "b/model.safetensors", {{"y", torch::ones({2})}, {"z", torch::zeros({})}});
  const auto result = tool({"diff", "a", "b"});
  EXPECT_EQ(result.exit_code, 1) << to_string(result);
  EXPECT_EQ(result.out,
            "model x is only in the first\nmodel z is only in the second\ndifferent: 2 lines between a and b\n");
}

TEST_F(HsdpCheckpoint, DiffComparesAllOfACheckpoint) {
  const std::vector<std::string> constant = {"lr_schedule.decay=constant"};
  train("run", 2, constant);
  train("same", 2, constant);
  const auto same = tool({"diff", "run/kept", "same/kept/step-2"});
  EXPECT_EQ(same.exit_code, 0) << to_string(same);
  EXPECT_EQ(same.out,
            "run/kept: the newest checkpoint is run/kept/step-2\nequal: model, optimizer and scalars, and what is each "
            "rank's own of run/kept/step-2 and same/kept/step-2\n");
  // The same state as another number of ranks writes it.
  train("moved", 1, {"checkpoint.load=run/kept/step-2", constant.front()});
  const auto moved = tool({"diff", "run/kept/step-2", "moved/kept/step-2"});
  EXPECT_EQ(moved.exit_code, 0) << to_string(moved);
  EXPECT_EQ(moved.out, "equal: model, optimizer and scalars of run/kept/step-2 and moved/kept/step-2\n");

  train("other", 2, {"training.seed=2", "optimizer.beta2=0.5", "mixed_precision.param_dtype=float16"});
  const auto other = tool({"diff", "run/kept/step-2", "other/kept/step-2"});
  EXPECT_EQ(other.exit_code, 1) << to_string(other);
  EXPECT_EQ(lines_with("model ", other.out).size(), 21u) << other.out;
  EXPECT_EQ(lines_with("optimizer state.", other.out).size(), 42u) << other.out;
  EXPECT_EQ(lines_with("scalar /values/training.seed/value is 1 and 2", other.out).size(), 1u) << other.out;
  EXPECT_EQ(lines_with("scalar /optimizers/model.norm.weight/options/beta2 is 0.999 and 0.5", other.out).size(), 1u)
      << other.out;
  EXPECT_EQ(lines_with("rank 0 generator.host ", other.out).size(), 1u) << other.out;
}

TEST_F(HsdpCheckpoint, DiffRefusesDamagedValues) {
  train("run", 1);
  train("same", 1);
  const auto shard = folder_ / "same/kept/step-2/shard-00001-model-00001-of-00001.safetensors";
  flip_byte(shard, fs::file_size(shard) - 1);
  const auto result = tool({"diff", "run/kept", "same/kept"});
  expect_refused(result, "diff", {"same/kept/step-2/shard-00001-model-00001-of-00001.safetensors"});
}

// ---- what is no checkpoint ----

TEST_F(HsdpCheckpoint, WhatIsNoCheckpointIsRefusedByEveryCommand) {
  train("run", 1);
  const auto kept = folder_ / "run/kept/step-2";
  fs::create_directories(folder_ / "empty");
  fs::copy(kept, folder_ / "cut", fs::copy_options::recursive);
  fs::remove(folder_ / "cut/manifest.json");
  fs::copy(kept, folder_ / "scrambled", fs::copy_options::recursive);
  write_text(folder_ / "scrambled/manifest.json", "{");
  const auto refusal = [](const std::function<void(std::ostream&)>& call) -> std::string {
    std::ostringstream out;
    try {
      call(out);
    } catch (const dtensor::ValueError& error) {
      return error.what();
    }
    return "accepted";
  };
  const auto sound = kept.string(), to = (folder_ / "to").string();
  for (const std::string name : {"absent", "empty", "text.bin", "cut", "scrambled"}) {
    SCOPED_TRACE(name);
    const auto path = (folder_ / name).string();
    const auto about = [&](const std::string& where) { return AllOf(StartsWith("[" + where + "] "), HasSubstr(path)); };
    EXPECT_THAT(refusal([&](auto& out) { apps::inspect(path, false, out); }), about("inspect"));
    EXPECT_THAT(refusal([&](auto& out) { apps::verify(path, out); }), about("verify"));
    EXPECT_THAT(refusal([&](auto& out) { apps::consolidate(path, to, {}, out); }), about("consolidate"));
    EXPECT_THAT(refusal([&](auto& out) { apps::diff(path, sound, out); }), about("diff"));
    EXPECT_THAT(refusal([&](auto& out) { apps::diff(sound, path, out); }), about("diff"));
    EXPECT_FALSE(fs::exists(to));
  }
  expect_refused(tool({"inspect", "cut"}), "inspect", {"cut", "manifest.json"});
  expect_refused(tool({"diff", "absent", "run/kept"}), "diff", {"absent"});
  // An incomplete one is passed over where there is another.
  fs::rename(folder_ / "cut", folder_ / "run/kept/step-3");
  EXPECT_THAT(tool({"inspect", "run/kept"}).out, HasSubstr("the newest checkpoint is run/kept/step-2\n"));
}

TEST_F(HsdpCheckpoint, MistakesInTheCommandLine) {
  for (const Arguments& arguments :
       {Arguments{}, {"inspct", "x"}, {"inspect"}, {"diff", "x"}, {"verify", "x", "y"}, {"inspect", "x", "--values"}}) {
    const auto result = tool(arguments);
    EXPECT_EQ(result.exit_code, 2) << to_string(result);
    EXPECT_THAT(result.err,
                AllOf(StartsWith("[command line] "), EndsWith("; hsdp_checkpoint --help lists the commands\n")));
  }
  const auto help = tool({"--help"});
  EXPECT_EQ(help.exit_code, 0);
  for (const char* command : {"inspect", "verify", "consolidate", "diff"}) EXPECT_THAT(help.out, HasSubstr(command));
}

}  // namespace hsdp_checkpoint_tool_test
