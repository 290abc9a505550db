// Models of Hugging Face's layout as an index of stored tensors: a file, a folder, a folder with an index.
#include <c10/util/StringUtil.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <ostream>
#include <string>
#include <vector>

#include "dtensor/error.h"
#include "hsdp/checkpoint/stored_reader.h"
#include "hsdp/checkpoint/stored_tensors.h"
#include "tests/testing/expect.h"
#include "tests/testing/scratch_folder.h"
#include "tests/testing/stored_files.h"

namespace stored_hugging_face_test {

using namespace testing_support;
using c10::ScalarType;
using dtensor::ValueError;
using hsdp::StoredReader;
using hsdp::StoredTensors;

constexpr auto kWhere = "test";
constexpr auto kIndex = "model.safetensors.index.json";
constexpr auto kFloat = ScalarType::Float;

void write_parts(const std::string& path, const std::vector<FilePart>& parts, bool sharded = false) {
  write_bytes(path, safetensors_bytes(parts, sharded));
}

std::string names_of(const StoredTensors& stored) {
  std::vector<std::string> names;
  for (const auto& tensor : stored.tensors()) names.push_back(tensor.name);
  return c10::Join(",", names);
}

void expect_all(const StoredTensors& stored) {
  StoredReader reader(kWhere, stored);
  for (const auto& tensor : stored.tensors()) {
    const auto expected = bytes_of_box(tensor.dtype, whole_box(tensor.sizes));
    std::string read(expected.size(), '?');
    reader.read(tensor, whole_box(tensor.sizes), read.data());
    EXPECT_TRUE(read == expected) << tensor.name;
  }
}

class StoredHuggingFace : public ::testing::Test {
 protected:
  /// Two files and their index.
  void write_two_files() {
    write_parts(folder / "model-00001-of-00002.safetensors",
                {whole_part("a", kFloat, {3, 2}), whole_part("b", ScalarType::Long, {})});
    write_parts(folder / "model-00002-of-00002.safetensors", {whole_part("c", ScalarType::BFloat16, {4})});
    write_index(R"({"metadata": {"total_size": 40}, "weight_map": {"a": "model-00001-of-00002.safetensors",
      "b": "model-00001-of-00002.safetensors", "c": "model-00002-of-00002.safetensors"}})");
  }
  void write_index(const std::string& text) { write_bytes(folder / kIndex, text); }
  void expect_refused(const std::string& path, const std::string& message) {
    expect_error<ValueError>([&] { StoredTensors::of_hugging_face(kWhere, path); }, "[test] " + message);
  }

  ScratchFolder folder;
};

TEST_F(StoredHuggingFace, IsOneFile) {
  const auto path = folder / "any name.safetensors";
  write_parts(path, {whole_part("a", kFloat, {3, 2}), whole_part("b", ScalarType::Bool, {5}),
                     whole_part("c", ScalarType::Float8_e4m3fn, {0, 7})});
  const auto stored = StoredTensors::of_hugging_face(kWhere, path);
  EXPECT_EQ(names_of(stored), "a,b,c");
  EXPECT_EQ(stored.find("c")->dtype, ScalarType::Float8_e4m3fn);
  EXPECT_EQ(stored.find("c")->sizes, (std::vector<int64_t>{0, 7}));
  EXPECT_TRUE(stored.files()[0].block_checksums.empty());
  expect_all(stored);
}

TEST_F(StoredHuggingFace, IsTheFilesOfAnIndex) {
  write_two_files();
  write_parts(folder / "adapter.safetensors", {whole_part("a", kFloat, {9})});
  write_bytes(folder / "config.json", "{}");
  const auto stored = StoredTensors::of_hugging_face(kWhere, folder.path());
  EXPECT_EQ(names_of(stored), "a,b,c");
  EXPECT_EQ(stored.find("a")->sizes, (std::vector<int64_t>{3, 2}));
  EXPECT_EQ(stored.files().size(), 2u);
  expect_all(stored);
  expect_all(StoredTensors::of_hugging_face(kWhere, folder.path() + "/"));
}

TEST_F(StoredHuggingFace, IsNotWhatTheIndexPassesOver) {
  write_two_files();
  write_index(R"({"weight_map": {"b": "model-00001-of-00002.safetensors", "c": "model-00002-of-00002.safetensors"}})");
  EXPECT_EQ(names_of(StoredTensors::of_hugging_face(kWhere, folder.path())), "b,c");
}

TEST_F(StoredHuggingFace, IsAllFilesWithoutAnIndex) {
  write_parts(folder / "one.safetensors", {whole_part("b", kFloat, {3, 2})});
  write_parts(folder / "two.safetensors", {whole_part("a", kFloat, {2})});
  write_bytes(folder / "notes.txt", "no tensors");
  const auto stored = StoredTensors::of_hugging_face(kWhere, folder.path());
  EXPECT_EQ(names_of(stored), "a,b");
  expect_all(stored);
}

TEST_F(StoredHuggingFace, MayBeSharded) {
  write_parts(folder / "shard-00001-model-00001-of-00001.safetensors",
              {{"a", kFloat, {{0, 0}, {2, 3}}}, whole_part("b", ScalarType::Long, {})}, true);
  // An empty part says where it would begin.
  write_parts(folder / "shard-00002-model-00001-of-00001.safetensors",
              {{"a", kFloat, {{2, 0}, {2, 3}}}, {"d", kFloat, {{0}, {1}}}}, true);
  write_parts(folder / "shard-00003-model-00001-of-00001.safetensors",
              {{"a", kFloat, {{4, 0}, {1, 3}}}, {"d", kFloat, {{1}, {0}}}}, true);
  const auto stored = StoredTensors::of_hugging_face(kWhere, folder.path());
  EXPECT_EQ(names_of(stored), "a,b,d");
  EXPECT_EQ(stored.find("a")->sizes, (std::vector<int64_t>{5, 3}));
  EXPECT_EQ(stored.find("d")->sizes, (std::vector<int64_t>{1}));
  expect_all(stored);
}

// A writer that was killed leaves some files and no index.
TEST_F(StoredHuggingFace, HasAllFilesThatTheirNamesCount) {
  write_two_files();
  std::filesystem::remove(folder / kIndex);
  EXPECT_EQ(names_of(StoredTensors::of_hugging_face(kWhere, folder.path())), "a,b,c");
  std::filesystem::remove(folder / "model-00002-of-00002.safetensors");
  expect_refused(folder.path(), folder.path() + " has 1 files model-...-of-2 and no " + kIndex +
                                    ", expected all 2; they were not written to the end");
  // Other names count nothing.
  std::filesystem::rename(folder / "model-00001-of-00002.safetensors", folder / "model-00001-of-00002-x.safetensors");
  EXPECT_EQ(names_of(StoredTensors::of_hugging_face(kWhere, folder.path())), "a,b");
}

TEST_F(StoredHuggingFace, IsNoCheckpointThatIsNotComplete) {
  write_parts(folder / "shard-00001-model-00001-of-00001.safetensors", {whole_part("a", kFloat, {2})}, true);
  std::filesystem::create_directory(folder / "optimizer");
  EXPECT_EQ(names_of(StoredTensors::of_hugging_face(kWhere, folder.path())), "a");
  std::filesystem::create_directory(folder / "ranks");
  expect_refused(folder.path(), folder.path() + " has no manifest.json, expected a complete checkpoint");
}

TEST_F(StoredHuggingFace, NeedsWhatTheIndexNames) {
  write_two_files();
  std::filesystem::remove(folder / "model-00002-of-00002.safetensors");
  expect_refused(folder.path(), folder / "model-00002-of-00002.safetensors cannot be opened: No such file");
  write_parts(folder / "model-00002-of-00002.safetensors", {whole_part("d", kFloat, {4})});
  expect_refused(folder.path(),
                 folder / "model-00002-of-00002.safetensors lacks tensor \"c\", which " + kIndex + " places there");
}

TEST_F(StoredHuggingFace, StaysInItsFolder) {
  ScratchFolder other;
  write_parts(other / "x.safetensors", {whole_part("a", kFloat, {2})});
  std::filesystem::create_directory(folder / "sub");
  write_parts(folder / "sub/x.safetensors", {whole_part("a", kFloat, {2})});
  for (const auto& file : {other / "x.safetensors", std::string("../x.safetensors"), std::string("sub/x.safetensors"),
                           std::string("./x.safetensors"), std::string()}) {
    write_index(R"({"weight_map": {"a": ")" + file + R"("}})");
    expect_refused(folder.path(), folder / kIndex + " places \"a\" in \"" + file + "\", which is no file beside it");
  }
  write_index(R"({"weight_map": {"a": ".."}})");
  expect_refused(folder.path(), folder / ".. is a folder");
  write_index(R"({"weight_map": {"a": "sub"}})");
  expect_refused(folder.path(), folder / "sub is a folder");
}

struct BadIndex {
  std::string name, text, message;
};
std::ostream& operator<<(std::ostream& out, const BadIndex& index) { return out << index.name; }

class StoredHuggingFaceIndex : public StoredHuggingFace, public ::testing::WithParamInterface<BadIndex> {};

TEST_P(StoredHuggingFaceIndex, IsRefused) {
  write_two_files();
  write_index(GetParam().text);
  expect_refused(folder.path(),
                 folder / kIndex + " " + GetParam().message + ", expected {\"weight_map\": {tensor: file}}");
}

INSTANTIATE_TEST_SUITE_P(
    All, StoredHuggingFaceIndex,
    ::testing::Values(BadIndex{"Empty", "", "is no index"}, BadIndex{"NoJson", "{\"weight_map\": {", "is no index"},
                      BadIndex{"Binary", std::string("\0\377\200", 3), "is no index"},
                      BadIndex{"List", "[1, 2]", "is no index"},
                      BadIndex{"NoMap", R"({"metadata": {}})", "is no index"},
                      BadIndex{"MapIsAList", R"({"weight_map": ["a"]})", "is no index"},
                      BadIndex{"FileIsANumber", R"({"weight_map": {"a": 3}})", "names no file for \"a\""},
                      BadIndex{"FileIsNull", R"({"weight_map": {"a": null}})", "names no file for \"a\""}),
    [](const auto& which) { return which.param.name; });

TEST_F(StoredHuggingFace, NeedsModelFiles) {
  expect_refused(folder.path(),
                 folder.path() + " has no .safetensors files, expected those of a model, or a complete checkpoint");
  expect_refused(folder / "none.safetensors", folder / "none.safetensors cannot be opened: No such file or directory");
  write_bytes(folder / "x.safetensors", "no tensors at all");
  expect_refused(folder / "x.safetensors", folder / "x.safetensors");
  expect_refused(folder.path(), folder / "x.safetensors");
}

TEST_F(StoredHuggingFace, IsOneModel) {
  write_parts(folder / "a.safetensors", {whole_part("w", kFloat, {3, 2})});
  const auto mixed = [&](const FilePart& part, const std::string& message) {
    write_parts(folder / "b.safetensors", {part}, true);
    expect_refused(folder.path(), message);
  };
  const auto second = folder / "b.safetensors: tensor \"w\" ";
  mixed({"w", ScalarType::Half, {{3, 0}, {1, 2}}}, second + "is Half here, expected Float as in another file");
  mixed({"w", kFloat, {{3}, {1}}}, second + "has 1 dims here, expected 2 as in another file; files of two models are");
  mixed(whole_part("w", kFloat, {3, 2}),
        "tensor \"w\": the part at offsets [0, 0] sizes [3, 2] in " + (folder / "a.safetensors") +
            " overlaps that at offsets [0, 0] sizes [3, 2] in " + (folder / "b.safetensors"));
  mixed({"w", kFloat, {{3, 0}, {1, 3}}}, "tensor \"w\" of sizes [4, 3]: the 2 parts in the files (");
  // No tensor has so many elements.
  constexpr auto kFar = int64_t{1} << 62;
  mixed({"w", kFloat, {{kFar, kFar}, {1, 1}}},
        "tensor \"w\" of sizes [4611686018427387905, 4611686018427387905]: the ");
  mixed({"w", kFloat, {{kFar, 0}, {1, 2}}},
        "tensor \"w\" of sizes [4611686018427387905, 2]: the 2 parts in the files (" + (folder / "a.safetensors") +
            ", ...) hold 8 elements, expected 9223372036854775807; a file is missing");
}

}  // namespace stored_hugging_face_test
