// Damaged checkpoints: bytes, headers, boxes, manifests and paths that are not what was written. Each is refused alike
// on all ranks, with the file and what is wrong in it, and nothing of the program changes.
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

namespace checkpoint_damage_test {

namespace fs = std::filesystem;
using namespace testing_support;

constexpr uint64_t kSavedSeed = 7, kOtherSeed = 9;
constexpr int64_t kSavedSteps = 4, kOtherSteps = 3;

using Parts = std::vector<std::string>;

struct Damage {
  const char* name;
  std::function<void(const std::string& folder)> make;
  /// Of the message; "%" stands for the folder.
  Parts message;
  /// Of that of load(model, path): as above unless given, and empty where the weights can be loaded all the same.
  std::optional<Parts> of_weights = std::nullopt;
};
void PrintTo(const Damage& damage, std::ostream* out) { *out << damage.name; }

Parts in_folder(Parts parts, const std::string& folder) {
  for (auto& part : parts) {
    for (size_t at = 0; (at = part.find('%', at)) != std::string::npos; at += folder.size())
      part.replace(at, 1, folder);
  }
  return parts;
}

class DamagedCheckpoint : public ::testing::TestWithParam<Damage> {
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

 private:
  static inline std::unique_ptr<ScratchFolder> scratch_;
};

TEST_P(DamagedCheckpoint, IsRefusedAndChangesNothing) {
  on_two_ranks([](RankContext& context) {
    const auto folder = context.directory() + "/step-4";
    on_rank_0(context, [&] {
      fs::copy(intact(), folder, fs::copy_options::recursive);
      GetParam().make(folder);
    });
    const auto message = in_folder(GetParam().message, folder);
    const auto of_weights = in_folder(GetParam().of_weights.value_or(GetParam().message), folder);
    CheckpointedTraining saved(context, kSavedSeed, kSavedSteps), twin(context, kOtherSeed, kOtherSteps);
    const auto expected = saved.run.values();

    CheckpointedTraining training(context, kOtherSeed, kOtherSteps);
    auto before = training.snapshot();
    expect_parts(value_error_of(context, [&] { hsdp::load(training.state, folder); }), message);
    expect_same_snapshots(training.snapshot(), before);
    // Not strict is not careless.
    expect_parts(
        value_error_of(context, [&] { hsdp::load(training.state, folder, {.strict = false, .convert_dtypes = true}); }),
        message);
    expect_same_snapshots(training.snapshot(), before);
    if (!of_weights.empty()) {
      expect_parts(value_error_of(context, [&] { hsdp::load(training.run.model, folder); }), of_weights);
      expect_same_snapshots(training.snapshot(), before);
    }
    training.step();
    twin.step();
    expect_same_snapshots(training.snapshot(), twin.snapshot());

    CheckpointedTraining on_meta(context, kOtherSeed);
    const auto generators = hsdp::capture_generators();
    expect_parts(value_error_of(context, [&] { hsdp::load(on_meta.state, folder); }), message);
    EXPECT_FALSE(on_meta.run.model.core()->tensors_without_values().empty());
    EXPECT_TRUE(on_meta.run.optimizer->state().empty());
    EXPECT_EQ(on_meta.state.progress, hsdp::TrainingProgress());
    EXPECT_TRUE(torch::equal(hsdp::capture_generators().front().second, generators.front().second));
    hsdp::load(on_meta.state, intact());
    expect_same_values(on_meta.run.values(), expected);
    EXPECT_EQ(on_meta.state.progress, saved.state.progress);

    CheckpointedTraining weights_on_meta(context, kOtherSeed);
    const auto load_weights = [&] { hsdp::load(weights_on_meta.run.model, folder); };
    if (of_weights.empty()) {
      load_weights();
    } else {
      expect_parts(value_error_of(context, load_weights), of_weights);
      EXPECT_FALSE(weights_on_meta.run.model.core()->tensors_without_values().empty());
      hsdp::load(weights_on_meta.run.model, intact());
    }
    for (auto& entry : weights_on_meta.run.net->named_parameters()) {
      EXPECT_TRUE(torch::equal(whole_of(entry.value()), expected.at(entry.key()))) << entry.key();
    }
  });
}

// ---- bytes ----

const Parts kLoads = {};

int64_t position(const std::string& path, const std::string& text) {
  return static_cast<int64_t>(read_bytes(path).find(text));
}

const Damage kBytes[] = {
    {"ShardWithoutItsLastByte",
     [](auto& folder) { truncate(folder + "/" + shard_name(1), 1); },
     {"[load] %/" + shard_name(1) + " has ", " bytes, expected "}},
    {"ShardOfNoBytes",
     [](auto& folder) { write_bytes(folder + "/" + shard_name(0), ""); },
     {"[load] %/" + shard_name(0) + " has 0 bytes, expected "}},
    {"ShardWithAByteMore",
     [](auto& folder) { write_bytes(folder + "/" + shard_name(0), read_bytes(folder + "/" + shard_name(0)) + " "); },
     {"[load] %/" + shard_name(0) + " has ", " bytes, expected "}},
    {"OptimizerShardTruncated",
     [](auto& folder) { truncate(folder + "/" + optimizer_shard_name(1), 100); },
     {"[load] %/" + optimizer_shard_name(1) + " has ", " bytes, expected "},
     kLoads},
    {"RankFileTruncated",
     [](auto& folder) { truncate(folder + "/" + rank_file_name(1), 1); },
     {"[load] %/" + rank_file_name(1) + " has ", " bytes, expected "},
     kLoads},
    {"TrainingStateTruncated",
     [](auto& folder) { truncate(folder + "/training_state.json", 1); },
     {"[load] %/training_state.json has ", " bytes, expected "},
     kLoads},
    {"ByteInValuesOfRank0",
     [](auto& folder) { flip(folder + "/" + shard_name(0), -1); },
     {"[load] %/" + shard_name(0) + ": bytes 0 to ", ", with its header and values of tensors \"", "\", have checksum ",
      ", expected "}},
    {"ByteInValuesOfRank1",
     [](auto& folder) { flip(folder + "/" + shard_name(1), -1); },
     {"[load] %/" + shard_name(1) + ": bytes 0 to ", ", with its header and values of tensors \"", "\", have checksum ",
      ", expected "}},
    {"ByteInValuesOfTheOptimizer",
     [](auto& folder) { flip(folder + "/" + optimizer_shard_name(1), -1); },
     {"[load] %/" + optimizer_shard_name(1) + ": bytes 0 to ", ", with its header and values of tensors \"state.",
      "\", have checksum ", ", expected "},
     kLoads},
    {"ByteInAGeneratorOfRank1",
     [](auto& folder) { flip(folder + "/" + rank_file_name(1), -1); },
     {"[load] %/" + rank_file_name(1) + ": bytes 0 to ", "have checksum ", ", expected "},
     kLoads},
    {"ByteThatMakesAHeaderNoJson",
     [](auto& folder) { flip(folder + "/" + shard_name(1), 8); },
     {"[load] %/" + shard_name(1) + ": header begins with \"z\", expected \"{\""}},
    {"ByteInAnOffsetOfAHeader",
     [](auto& folder) {
       const auto path = folder + "/" + shard_name(1);
       flip(path, position(path, "\\\"saved_offsets\\\":[6") + 19);
     },
     {"[load] %/" + shard_name(1) + ": bytes 0 to ", ", with its header and values of tensors \"", "\", have checksum ",
      ", expected "}},
    {"ByteInANameOfAnOptimizerHeader",
     [](auto& folder) {
       const auto path = folder + "/" + optimizer_shard_name(0);
       flip(path, position(path, "\"state.gate.exp_avg\":{") + 9);
     },
     {"[load] %/" + optimizer_shard_name(0) + ": "},
     kLoads},
    {"ByteInTheHeaderOfARankFile",
     [](auto& folder) {
       const auto path = folder + "/" + rank_file_name(1);
       flip(path, position(path, "\"U8\"") + 1);
     },
     {"[load] %/" + rank_file_name(1) + ": "},
     kLoads},
    {"ByteInTheTrainingState",
     [](auto& folder) {
       const auto path = folder + "/training_state.json";
       flip(path, position(path, "\"step\":4") + 7);
     },
     {"[load] %/training_state.json has checksum ", ", expected ", "; the file is damaged: load another checkpoint"},
     kLoads},
    {"HeaderLengthBeyondTheFile",
     [](auto& folder) {
       const auto path = folder + "/" + shard_name(1);
       set_header_length(path, fs::file_size(path));
       seal(folder);
     },
     {"[load] %/" + shard_name(1) + ": has a header of ", " bytes in a file of ", ", expected it to end in the file"}},
    {"HeaderOfMoreThanIsAllowed",
     [](auto& folder) {
       set_header_length(folder + "/" + shard_name(0), 100'000'001);
       seal(folder);
     },
     {"[load] %/" + shard_name(0) + ": has a header of 100000001 bytes, expected at most 100000000"}},
    {"HeaderLengthOfAllOnes",
     [](auto& folder) {
       set_header_length(folder + "/" + optimizer_shard_name(1), ~uint64_t{0});
       seal(folder);
     },
     {"[load] %/" + optimizer_shard_name(1) + ": has a header of 18446744073709551615 bytes, expected at most "},
     kLoads},
    {"HeaderOfARankFileOfAllOnes",
     [](auto& folder) {
       set_header_length(folder + "/" + rank_file_name(1), ~uint64_t{0});
       seal(folder);
     },
     {"[load] %/" + rank_file_name(1) + ": has a header of 18446744073709551615 bytes, expected at most "},
     kLoads},
};
INSTANTIATE_TEST_SUITE_P(Bytes, DamagedCheckpoint, ::testing::ValuesIn(kBytes),
                         [](const auto& which) { return std::string(which.param.name); });

// ---- files and paths ----

void rename_to_itself_within(const std::string& folder, const std::string& name) {
  fs::rename(folder + "/" + name, folder + "/former");
  fs::create_directory(folder + "/" + name);
  fs::rename(folder + "/former", folder + "/" + name + "/" + name);
}

const Damage kFiles[] = {
    {"NoShardOfRank1",
     [](auto& folder) { fs::remove(folder + "/" + shard_name(1)); },
     {"[load] %/" + shard_name(1) + " cannot be opened: No such file or directory"}},
    {"NoOptimizerShard",
     [](auto& folder) { fs::remove(folder + "/" + optimizer_shard_name(0)); },
     {"[load] %/" + optimizer_shard_name(0) + " cannot be opened: No such file or directory"},
     kLoads},
    {"NoFileOfRank1",
     [](auto& folder) { fs::remove(folder + "/" + rank_file_name(1)); },
     {"[load] %/" + rank_file_name(1) + " cannot be opened: No such file or directory"},
     kLoads},
    {"NoTrainingState",
     [](auto& folder) { fs::remove(folder + "/training_state.json"); },
     {"[load] %/training_state.json cannot be opened: No such file or directory"},
     kLoads},
    {"RankFileNotListed",
     [](auto& folder) {
       fs::remove(folder + "/" + rank_file_name(1));
       seal(folder);
     },
     {"[load] %/manifest.json does not list " + rank_file_name(1) + ", expected it in every checkpoint"},
     kLoads},
    {"TrainingStateNotListed",
     [](auto& folder) {
       fs::remove(folder + "/training_state.json");
       seal(folder);
     },
     {"[load] %/manifest.json does not list training_state.json, expected it in every checkpoint"},
     kLoads},
    {"ShardThatIsAFolder",
     [](auto& folder) {
       fs::remove(folder + "/" + shard_name(0));
       fs::create_directory(folder + "/" + shard_name(0));
     },
     {"[load] %/" + shard_name(0) + " is a folder, expected the path of a file that can be read"}},
    {"ShardThatIsALinkToNothing",
     [](auto& folder) {
       fs::remove(folder + "/" + shard_name(1));
       fs::create_symlink("nowhere", folder + "/" + shard_name(1));
     },
     {"[load] %/" + shard_name(1) + " cannot be opened: No such file or directory"}},
    {"ShardsExchanged",
     [](auto& folder) {
       fs::rename(folder + "/" + shard_name(0), folder + "/former");
       fs::rename(folder + "/" + shard_name(1), folder + "/" + shard_name(0));
       fs::rename(folder + "/former", folder + "/" + shard_name(1));
     },
     {"[load] %/shard-0000", ", expected "}},
    {"FileThatIsNotListed",
     [](auto& folder) { fs::copy(folder + "/" + shard_name(0), folder + "/optimizer/more.safetensors"); },
     {"[load] %/optimizer/more.safetensors is not in manifest.json, expected "},
     kLoads},
    {"PathThatIsAFile",
     [](auto& folder) {
       fs::remove_all(folder);
       write_bytes(folder, "not a checkpoint");
     },
     {"[load] % is a file, expected the folder of a checkpoint"},
     Parts{"[load] % is damaged or no zip archive"}},
    {"PathBelowAFile",
     [](auto& folder) {
       fs::remove_all(folder);
       write_bytes(folder, "not a checkpoint");
       fs::rename(folder, folder + "-file");
       fs::create_symlink(folder + "-file/step-4", folder);
     },
     {"[load] % does not exist, expected the folder of a checkpoint"},
     Parts{"[load] % cannot be read: "}},
    {"PathOfNothing",
     [](auto& folder) { fs::remove_all(folder); },
     {"[load] % does not exist, expected the folder of a checkpoint"},
     Parts{"[load] % cannot be read: No such file or directory"}},
    {"EmptyFolder",
     [](auto& folder) {
       fs::remove_all(folder);
       fs::create_directory(folder);
     },
     {"[load] % has no manifest.json, expected a complete checkpoint"},
     Parts{"[load] % has no .safetensors files, expected those of a model, or a complete checkpoint"}},
    {"NoManifest",
     [](auto& folder) { fs::remove(folder + "/manifest.json"); },
     {"[load] % has no manifest.json, expected a complete checkpoint; one that was not written to its end cannot be "
      "loaded"}},
    {"ManifestThatIsAFolder",
     [](auto& folder) { rename_to_itself_within(folder, "manifest.json"); },
     {"[load] %/manifest.json is a folder, expected the path of a file that can be read"}},
};
INSTANTIATE_TEST_SUITE_P(Files, DamagedCheckpoint, ::testing::ValuesIn(kFiles),
                         [](const auto& which) { return std::string(which.param.name); });

// ---- manifests ----

const Damage kManifests[] = {
    {"OfNoBytes",
     [](auto& folder) { write_bytes(folder + "/manifest.json", ""); },
     {"[load] %/manifest.json is ", "it is no JSON at byte "}},
    {"Truncated",
     [](auto& folder) {
       const auto path = folder + "/manifest.json";
       truncate(path, static_cast<int64_t>(fs::file_size(path)) / 2);
     },
     {"[load] %/manifest.json is ", "it is no JSON at byte "}},
    {"AnotherVersion",
     [](auto& folder) { replace_in(folder + "/manifest.json", "\"version\":1", "\"version\":2"); },
     {"[load] %/manifest.json is ", "its version is 2, expected 1; another release of the library wrote it"}},
    {"AnotherFormat",
     [](auto& folder) { replace_in(folder + "/manifest.json", "\"hsdp-checkpoint\"", "\"hsdp-something\""); },
     {"[load] %/manifest.json is ", "hsdp-checkpoint"}},
    {"AByteInAKey",
     [](auto& folder) {
       const auto path = folder + "/manifest.json";
       flip(path, position(path, "\"world_size\"") + 1);
     },
     {"[load] %/manifest.json is ", "it lacks \"world_size\""}},
    {"AnotherSizeOfAFile",
     [](auto& folder) {
       seal(folder, [](auto& manifest) {
         for (auto& file : manifest.files) {
           if (file.path == shard_name(1)) ++file.written.bytes;
         }
       });
     },
     {"[load] %/" + shard_name(1) + " has ", " bytes, expected "}},
    {"AByteInAChecksum",
     [](auto& folder) {
       seal(folder, [](auto& manifest) {
         for (auto& file : manifest.files) {
           if (file.path == shard_name(1)) file.written.block_checksums.front() ^= 1;
         }
       });
     },
     {"[load] %/" + shard_name(1) + ": bytes 0 to ", ", with its header and values of tensors \"", "\", have checksum ",
      ", expected "}},
    {"MoreRanksThanFiles",
     [](auto& folder) { seal(folder, [](auto& manifest) { manifest.world_size = 3; }); },
     {"[load] %/manifest.json does not list " + rank_file_name(2) + ", expected it in every checkpoint"},
     kLoads},
    {"PathThatLeadsOut",
     [](auto& folder) {
       replace_in(folder + "/manifest.json", "\"path\":\"training_state.json\"", "\"path\":\"../training_state.json\"");
     },
     {"[load] %/manifest.json is ", "\"../training_state.json\", expected the path of a file within"}},
    {"TensorThatNoFileHas",
     [](auto& folder) { seal(folder, [](auto& manifest) {
                          manifest.model["new"] = {at::kFloat, {2, 3}};
                        }); },
     {"[load] tensor \"new\" of sizes [2, 3]: the 0 parts in the files hold 0 elements, expected 6"}},
    {"OptimizerTensorThatNoFileHas",
     [](auto& folder) { seal(folder, [](auto& manifest) {
                          manifest.optimizer["state.new"] = {at::kFloat, {4}};
                        }); },
     {"[load] tensor \"state.new\" of sizes [4]: the 0 parts in the files hold 0 elements, expected 4"},
     kLoads},
    {"TensorThatItDoesNotList",
     [](auto& folder) { seal(folder, [](auto& manifest) { manifest.model.erase("out.bias"); }); },
     {"[load] %/shard-0000", ": tensor \"out.bias\" of dtype Float and 1 dims, expected none of that name"}},
    {"OtherDtypeThanTheFiles",
     [](auto& folder) { seal(folder, [](auto& manifest) { manifest.model["out.bias"].dtype = at::kDouble; }); },
     {"[load] %/shard-0000", ": tensor \"out.bias\" of dtype Float and 1 dims, expected Double and 1 as the manifest"}},
    {"LargerThanTheFiles",
     [](auto& folder) { seal(folder, [](auto& manifest) {
                          manifest.model["out.weight"].sizes = {6, 7};
                        }); },
     {"[load] tensor \"out.weight\" of sizes [6, 7]: the 2 parts in the files (%/shard-0000",
      "hold 35 elements, expected "
      "42; a file is missing"}},
    {"SmallerThanTheFiles",
     [](auto& folder) { seal(folder, [](auto& manifest) {
                          manifest.model["out.weight"].sizes = {4, 7};
                        }); },
     {"[load] %/" + shard_name(1) +
      ": tensor \"out.weight\" has a part at offsets [3, 0] sizes [2, 7], expected one "
      "within its sizes [4, 7]"}},
    {"SizesThatOverflow",
     [](auto& folder) {
       replace_in(folder + "/manifest.json", "\"out.weight\":{\"dtype\":\"F32\",\"shape\":[5,7]}",
                  "\"out.weight\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904,7]}");
     },
     {"[load] %/manifest.json is ", "model[\"out.weight\"].shape is [4611686018427387904,7], expected "}},
};
INSTANTIATE_TEST_SUITE_P(Manifests, DamagedCheckpoint, ::testing::ValuesIn(kManifests),
                         [](const auto& which) { return std::string(which.param.name); });

// ---- boxes: with checksums that fit ----

std::function<void(const std::string&)> sealed(const std::string& file,
                                               const std::function<void(const std::string& path)>& change) {
  return [=](const std::string& folder) {
    change(folder + "/" + file);
    seal(folder);
  };
}
std::function<void(const std::string&)> with_pieces(const std::string& file,
                                                    const std::function<void(Pieces&)>& change) {
  return sealed(file, [=](const std::string& path) { change_pieces(path, change); });
}

const Damage kBoxes[] = {
    {"OneMissing",
     sealed(shard_name(1), [](auto& path) { drop_piece(path, "out.weight"); }),
     {"[load] tensor \"out.weight\" of sizes [5, 7]: the 1 parts in the files (%/" + shard_name(0) +
      ", ...) hold 21 elements, expected 35; a file is missing"}},
    {"OneOfTheOptimizerMissing",
     sealed(optimizer_shard_name(1), [](auto& path) { drop_piece(path, "state.out.weight.exp_avg_sq"); }),
     {"[load] tensor \"state.out.weight.exp_avg_sq\" of sizes [5, 7]: the 1 parts in the files (%/" +
      optimizer_shard_name(0) + ", ...) hold 21 elements, expected 35; a file is missing"},
     kLoads},
    {"AllOfOneTensorMissing",
     [](auto& folder) {
       drop_piece(folder + "/" + shard_name(0), "out.weight");
       drop_piece(folder + "/" + shard_name(1), "out.weight");
       seal(folder);
     },
     {"[load] tensor \"out.weight\" of sizes [5, 7]: the 0 parts in the files hold 0 elements, expected 35"}},
    {"OneFileMissing",
     [](auto& folder) {
       fs::remove(folder + "/" + shard_name(1));
       seal(folder);
     },
     {"[load] tensor \"body.linear.bias\" of sizes [7]: the 1 parts in the files (%/" + shard_name(0) +
      ", ...) hold 4 elements, expected 7; a file is missing"}},
    {"Overlapping",
     with_pieces(shard_name(1), [](auto& pieces) { piece(pieces, "out.weight").offsets[0] = 2; }),
     {"[load] tensor \"out.weight\": the part at offsets [", "] sizes [", " in %/shard-0000",
      " overlaps that at offsets [", ", expected each element once"}},
    {"OverlappingOfTheOptimizer",
     with_pieces(optimizer_shard_name(1), [](auto& pieces) { piece(pieces, "state.out.bias.exp_avg").offsets[0] = 0; }),
     {"[load] tensor \"state.out.bias.exp_avg\": the part at offsets [0] sizes [", " in %/optimizer/shard-0000",
      " overlaps that at offsets [0]"},
     kLoads},
    // As many elements as the tensor has, and yet a hole.
    {"OneTwiceAndOneMissing",
     with_pieces(shard_name(1),
                 [](auto& pieces) {
                   auto& part = piece(pieces, "out.weight");
                   part.offsets[0] = 1;
                 }),
     {"[load] tensor \"out.weight\": the part at offsets [0, 0] sizes [3, 7] in %/" + shard_name(0) +
      " overlaps that at offsets [1, 0] sizes [2, 7] in %/" + shard_name(1)}},
    {"BeyondTheTensor",
     with_pieces(shard_name(1), [](auto& pieces) { piece(pieces, "out.weight").offsets[0] = 4; }),
     {"[load] %/" + shard_name(1) +
      ": tensor \"out.weight\" has a part at offsets [4, 0] sizes [2, 7], expected one "
      "within its sizes [5, 7]"}},
    {"FarBeyondTheTensor",
     with_pieces(
         shard_name(1),
         [](auto& pieces) { piece(pieces, "out.weight").offsets[0] = std::numeric_limits<int64_t>::max() - 2; }),
     {"[load] %/" + shard_name(1) +
      ": tensor \"out.weight\" has a part at offsets [9223372036854775805, 0] sizes [2, 7], "
      "expected one within its sizes [5, 7]"}},
    {"OffsetThatOverflows",
     sealed(shard_name(1),
            [](auto& path) {
              replace_in_header(path, R"(\"out.weight\":{\"saved_offsets\":[3,0]})",
                                R"(\"out.weight\":{\"saved_offsets\":[9223372036854775806,0]})");
            }),
     {"[load] %/" + shard_name(1) +
      ": tensor \"out.weight\" has saved_offsets [9223372036854775806, 0], expected one a dim "
      "of shape [2, 7], with a sum of at most 9223372036854775807"}},
    {"OffsetsOfAnotherRank",
     sealed(shard_name(1),
            [](auto& path) {
              replace_in_header(path, R"(\"out.weight\":{\"saved_offsets\":[3,0]})",
                                R"(\"out.weight\":{\"saved_offsets\":[3]})");
            }),
     {"[load] %/" + shard_name(1) +
      ": tensor \"out.weight\" has saved_offsets [3], expected one a dim of shape [2, 7]"}},
    {"OfOtherDims",
     with_pieces(shard_name(1),
                 [](auto& pieces) {
                   auto& part = piece(pieces, "out.weight");
                   part.values = part.values.view({2, 7, 1});
                   part.offsets.push_back(0);
                 }),
     {"[load] %/" + shard_name(1) + ": tensor \"out.weight\" of dtype Float and 3 dims, expected Float and 2"}},
    {"OfAnotherDtype",
     with_pieces(shard_name(1),
                 [](auto& pieces) {
                   auto& part = piece(pieces, "out.weight");
                   part.values = part.values.to(at::kDouble);
                 }),
     {"[load] %/" + shard_name(1) + ": tensor \"out.weight\" of dtype Double and 2 dims, expected Float and 2"}},
    {"ValuesBeyondTheFile",
     sealed(shard_name(1),
            [](auto& path) {
              const auto bytes = read_bytes(path);
              const auto begin = bytes.find("\"data_offsets\":[0,");
              const auto range = bytes.substr(begin, bytes.find(']', begin) - begin);
              const auto digits = range.size() - range.find(',') - 1;
              replace_in_header(path, range, range.substr(0, range.size() - digits) + std::string(digits, '9'));
            }),
     {"[load] %/" + shard_name(1) + ": tensor \"", "\" has data_offsets [0, 9", "], expected ", " bytes for shape ["}},
    {"ValuesOfMoreBytesThanTheFile",
     sealed(shard_name(1), [](auto& path) { truncate(path, 4); }),
     {"[load] %/" + shard_name(1) + ": has ", " bytes of values, expected ", "; it was truncated"}},
};
INSTANTIATE_TEST_SUITE_P(Boxes, DamagedCheckpoint, ::testing::ValuesIn(kBoxes),
                         [](const auto& which) { return std::string(which.param.name); });

// ---- files of several blocks: what is damaged is named more closely ----

struct LargeImpl : torch::nn::Module {
  LargeImpl() {
    first = register_parameter("first", torch::zeros({700, 1000}));
    second = register_parameter("second", torch::zeros({700, 1000}));
  }
  torch::Tensor first, second;
};
TORCH_MODULE(Large);

TEST(DamagedLargeFiles, NameTheTensor) {
  on_two_ranks([](RankContext& context) {
    const auto folder = context.directory() + "/large";
    const auto make = [&](double value) {
      auto net = hsdp::meta_init([] { return Large(); });
      auto model = hsdp::fully_shard(net, {.mesh = context.environment().mesh()});
      model.materialize(at::kCPU);
      torch::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.fill_(value);
      return model;
    };
    auto saved = make(1), model = make(2);
    hsdp::save({.model = saved.core()}, folder);
    hsdp::TrainingState state{.model = model.core()};
    for (const int rank : {0, 1}) {
      const auto path = folder + "/" + shard_name(rank);
      // 1,400,000 bytes of each tensor on each rank, behind a header of some hundred: in the third block of 1 MiB there
      // is nothing but the end of the second.
      on_rank_0(context, [&] { flip(path, -1); });
      const Parts parts = {"[load] " + path + ": bytes 2097152 to ",
                           ", with values of tensor \"second\", have checksum ", ", expected "};
      expect_parts(value_error_of(context, [&] { hsdp::load(state, folder); }), parts);
      expect_parts(value_error_of(context, [&] { hsdp::load(model, folder); }), parts);
      for (auto& parameter : model->parameters()) {
        EXPECT_TRUE(torch::equal(hsdp::unsharded(parameter), torch::full({700, 1000}, 2.0)));
      }
      on_rank_0(context, [&] { flip(path, -1); });
    }
    hsdp::load(state, folder);
    for (auto& parameter : model->parameters()) {
      EXPECT_TRUE(torch::equal(hsdp::unsharded(parameter), torch::ones({700, 1000})));
    }
  });
}

}  // namespace checkpoint_damage_test
