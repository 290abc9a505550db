// Whole models in Hugging Face's layout: which tensor comes into which file, writing them one by one, and making such a
// folder of a checkpoint or of another one.
#include "hsdp/checkpoint/hugging_face.h"

#include <c10/util/StringUtil.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "dtensor/error.h"
#include "hsdp/checkpoint/stored_reader.h"
#include "hsdp/checkpoint/stored_tensors.h"
#include "hsdp/launch/device.h"
#include "tests/testing/expect.h"
#include "tests/testing/multi_process.h"
#include "tests/testing/scratch_folder.h"
#include "tests/testing/stored_files.h"

namespace hugging_face_test {

namespace fs = std::filesystem;
using namespace testing_support;
using c10::ScalarType;
using dtensor::NotSupportedError;
using dtensor::ValueError;
using hsdp::HuggingFaceTensor;
using hsdp::HuggingFaceWriter;
using hsdp::plan_hugging_face;
using hsdp::StoredReader;
using hsdp::StoredTensors;
using Names = std::set<std::string>;
using Plan = std::vector<std::vector<size_t>>;

constexpr auto kWhere = "test";
constexpr auto kFloat = ScalarType::Float;
constexpr auto kIndex = "model.safetensors.index.json";

// ---- which tensor comes into which file ----

TEST(HuggingFacePlan, FillsFilesInTheOrderOfTheTensors) {
  // 12, 8, 4, 16 and 4 bytes.
  const std::vector<HuggingFaceTensor> tensors{
      {"e", kFloat, {3}}, {"d", kFloat, {1, 2}}, {"c", kFloat, {}}, {"b", kFloat, {2, 2}}, {"a", kFloat, {1}}};
  EXPECT_EQ(plan_hugging_face(kWhere, tensors, 1000), (Plan{{4, 3, 2, 1, 0}}));
  EXPECT_EQ(plan_hugging_face(kWhere, tensors, 44), (Plan{{4, 3, 2, 1, 0}}));
  EXPECT_EQ(plan_hugging_face(kWhere, tensors, 43), (Plan{{3, 2, 1, 0}, {4}}));
  EXPECT_EQ(plan_hugging_face(kWhere, tensors, 24), (Plan{{2, 1, 0}, {4, 3}}));
  EXPECT_EQ(plan_hugging_face(kWhere, tensors, 23), (Plan{{1, 0}, {3, 2}, {4}}));
  // Some are larger than a file may be.
  EXPECT_EQ(plan_hugging_face(kWhere, tensors, 8), (Plan{{0}, {1}, {2}, {3}, {4}}));
  EXPECT_EQ(plan_hugging_face(kWhere, tensors, 1), (Plan{{0}, {1}, {2}, {3}, {4}}));
}

TEST(HuggingFacePlan, IsThatOfTheFormatWithinAFile) {
  const std::vector<HuggingFaceTensor> tensors{{"z", ScalarType::Byte, {3}},
                                               {"b", ScalarType::BFloat16, {2}},
                                               {"y", ScalarType::Long, {}},
                                               {"x", kFloat, {2}},
                                               {"a", ScalarType::Half, {2}}};
  EXPECT_EQ(plan_hugging_face(kWhere, tensors, 1000), (Plan{{2, 3, 4, 1, 0}}));
}

TEST(HuggingFacePlan, HasPlaceForWhatHasNoElements) {
  EXPECT_EQ(plan_hugging_face(kWhere, {}, 10), (Plan{{}}));
  const std::vector<HuggingFaceTensor> tensors{
      {"a", kFloat, {0}}, {"b", kFloat, {2}}, {"c", kFloat, {3, 0}}, {"d", kFloat, {1}}};
  EXPECT_EQ(plan_hugging_face(kWhere, tensors, 8), (Plan{{0, 1, 2}, {3}}));
}

TEST(HuggingFacePlan, RefusesWhatCannotBeWritten) {
  expect_error<ValueError>([] { plan_hugging_face(kWhere, {}, 0); },
                           "[test] max_file_bytes 0, expected a positive number");
  // Also where they would come into files of their own.
  expect_error<ValueError>(
      [] {
        plan_hugging_face(kWhere, {{"a", kFloat, {2}}, {"a", kFloat, {2}}}, 8);
      },
      "[test] two tensors are named \"a\", expected names of their own");
  expect_error<NotSupportedError>(
      [] {
        plan_hugging_face(kWhere, {{"q", ScalarType::QInt8, {2}}}, 8);
      },
      "[test] ", "\"q\" is QInt8, expected one of ");
}

// ---- writing ----

const std::vector<HuggingFaceTensor> kTensors{
    {"b", kFloat, {3, 2}}, {"count", ScalarType::Long, {}}, {"none", kFloat, {0, 4}}, {"mask", ScalarType::Bool, {3}}};

void write_all(HuggingFaceWriter& writer, const std::vector<HuggingFaceTensor>& tensors, uint64_t max_file_bytes) {
  for (const auto& file : plan_hugging_face(kWhere, tensors, max_file_bytes)) {
    for (const auto index : file) {
      auto bytes = bytes_of_box(tensors[index].dtype, whole_box(tensors[index].sizes));
      writer.write(bytes.data(), bytes.size());
      bytes.assign(bytes.size(), 'x');  // memory that is used again
    }
  }
}

void expect_written(const std::string& folder, const std::vector<HuggingFaceTensor>& tensors) {
  const auto stored = StoredTensors::of_hugging_face(kWhere, folder);
  EXPECT_EQ(stored.tensors().size(), tensors.size());
  StoredReader reader(kWhere, stored);
  for (const auto& tensor : tensors) {
    const auto* found = stored.find(tensor.name);
    ASSERT_NE(found, nullptr) << tensor.name;
    EXPECT_EQ(found->dtype, tensor.dtype);
    EXPECT_EQ(found->sizes, tensor.sizes);
    const auto expected = bytes_of_box(tensor.dtype, whole_box(tensor.sizes));
    std::string read(expected.size(), '?');
    reader.read(*found, whole_box(tensor.sizes), read.data());
    EXPECT_TRUE(read == expected) << tensor.name;
  }
}

TEST(HuggingFaceWriterTest, WritesOneFile) {
  const ScratchFolder folder;
  // With its parents.
  const auto path = folder / "new/model";
  HuggingFaceWriter writer(kWhere, path, kTensors, 1000);
  write_all(writer, kTensors, 1000);
  writer.complete();
  expect_written(path, kTensors);
  expect_written(path + "/model.safetensors", kTensors);
  EXPECT_EQ(std::distance(fs::directory_iterator(path), fs::directory_iterator()), 1);
  // Other programs look at these.
  const auto bytes = read_bytes(path + "/model.safetensors");
  EXPECT_NE(bytes.find(R"("format":"pt")"), std::string::npos);
  EXPECT_EQ(bytes.find("DCP"), std::string::npos);
}

TEST(HuggingFaceWriterTest, WritesSeveralFilesAndAnIndex) {
  const ScratchFolder folder;
  HuggingFaceWriter writer(kWhere, folder.path(), kTensors, 24);
  write_all(writer, kTensors, 24);
  EXPECT_FALSE(fs::exists(folder / kIndex)) << "the folder would be taken for a whole model";
  writer.complete();
  const std::string first = "model-00001-of-00002.safetensors", second = "model-00002-of-00002.safetensors";
  EXPECT_EQ(folder.names(), (Names{first, second, kIndex}));
  expect_written(folder.path(), kTensors);
  const auto index = nlohmann::json::parse(read_bytes(folder / kIndex));
  EXPECT_EQ(index["metadata"]["total_size"], 24 + 8 + 0 + 3);
  EXPECT_EQ(index["weight_map"], (nlohmann::json{{"b", first}, {"count", second}, {"none", second}, {"mask", second}}));
}

TEST(HuggingFaceWriterTest, WritesAModelWithoutTensors) {
  const ScratchFolder folder;
  HuggingFaceWriter writer(kWhere, folder.path(), {}, 10);
  writer.complete();
  EXPECT_EQ(folder.names(), Names{"model.safetensors"});
  EXPECT_TRUE(values_in(folder.path()).empty());
}

TEST(HuggingFaceWriterTest, LeavesNothingThatIsNotComplete) {
  for (const uint64_t max_file_bytes : {24, 1000}) {
    const ScratchFolder folder;
    write_bytes(folder / "config.json", "{}");
    {
      HuggingFaceWriter writer(kWhere, folder.path(), kTensors, max_file_bytes);
      const auto bytes = bytes_of_box(kFloat, whole_box({3, 2}));
      if (max_file_bytes == 24) writer.write(bytes.data(), bytes.size());
    }
    {
      HuggingFaceWriter writer(kWhere, folder.path(), kTensors, max_file_bytes);
      write_all(writer, kTensors, max_file_bytes);
    }
    EXPECT_EQ(folder.names(), Names{"config.json"});
  }
}

TEST(HuggingFaceWriterTest, RefusesAFolderWithModelFiles) {
  const ScratchFolder folder;
  for (const auto* name : {"model.safetensors", "adapter.safetensors", kIndex}) {
    write_bytes(folder / name, "former");
    expect_error<ValueError>(
        [&] { HuggingFaceWriter(kWhere, folder.path(), kTensors, 1000); },
        "[test] " + folder.path() + " has " + name + ", expected no model files; choose another folder");
    EXPECT_EQ(folder.names(), Names{name});
    EXPECT_EQ(read_bytes(folder / name), "former");
    fs::remove(folder / name);
  }
}

TEST(HuggingFaceWriterTest, RefusesAPathThatIsAFile) {
  const ScratchFolder folder;
  write_bytes(folder / "file", "bytes");
  for (const auto& path : {folder / "file", folder / "file/below"}) {
    expect_error<ValueError>([&] { HuggingFaceWriter(kWhere, path, kTensors, 1000); }, "[test] " + path + " cannot be ",
                             ", expected a folder that can be written");
  }
  EXPECT_EQ(read_bytes(folder / "file"), "bytes");
}

// ---- consolidate ----

/// A checkpoint of two ranks, or shards without a manifest.
class Consolidate : public ::testing::Test {
 protected:
  Consolidate() : checkpoint(from) {}
  void write_shards() {
    checkpoint.add({{"matrix", kFloat, {{0, 0}, {2, 3}}},
                    whole_part("steps", ScalarType::Long, {}),
                    whole_part("mask", ScalarType::Bool, {0}),
                    {"half", ScalarType::BFloat16, {{0, 0}, {4, 2}}}});
    checkpoint.add({{"matrix", kFloat, {{2, 0}, {1, 3}}},
                    whole_part("none", ScalarType::Double, {2, 0}),
                    {"half", ScalarType::BFloat16, {{0, 2}, {4, 1}}},
                    whole_part("bytes", ScalarType::Byte, {7})});
    checkpoint.fact("matrix", kFloat, {3, 3});
    checkpoint.fact("steps", ScalarType::Long, {});
    checkpoint.fact("mask", ScalarType::Bool, {0});
    checkpoint.fact("half", ScalarType::BFloat16, {4, 3});
    checkpoint.fact("none", ScalarType::Double, {2, 0});
    checkpoint.fact("bytes", ScalarType::Byte, {7});
  }
  void write_manifest() { hsdp::write_manifest(kWhere, from.path(), checkpoint.manifest); }

  static torch::Tensor expected(const std::vector<int64_t>& sizes, ScalarType dtype) {
    auto tensor = torch::empty(sizes, dtype);
    const auto bytes = bytes_of_box(dtype, whole_box(sizes));
    if (!bytes.empty()) std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
    return tensor;
  }
  /// Bit for bit.
  static void expect_equal(const torch::Tensor& tensor, const torch::Tensor& expected) {
    ASSERT_EQ(tensor.scalar_type(), expected.scalar_type());
    ASSERT_EQ(tensor.sizes(), expected.sizes());
    EXPECT_EQ(std::string(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()),
              std::string(static_cast<const char*>(expected.const_data_ptr()), expected.nbytes()));
  }
  static void expect_model(const std::string& folder) {
    auto values = values_in(folder);
    ASSERT_EQ(values.size(), 6u);
    expect_equal(values["matrix"], expected({3, 3}, kFloat));
    expect_equal(values["steps"], expected({}, ScalarType::Long));
    expect_equal(values["mask"], expected({0}, ScalarType::Bool));
    expect_equal(values["half"], expected({4, 3}, ScalarType::BFloat16));
    expect_equal(values["none"], expected({2, 0}, ScalarType::Double));
    expect_equal(values["bytes"], expected({7}, ScalarType::Byte));
  }

  ScratchFolder from, to;
  HandMadeCheckpoint checkpoint;
};

TEST_F(Consolidate, ACheckpoint) {
  write_shards();
  write_manifest();
  hsdp::consolidate(from.path(), to / "model");
  EXPECT_EQ(std::distance(fs::directory_iterator(to / "model"), fs::directory_iterator()), 1);
  expect_model(to / "model");
}

TEST_F(Consolidate, ShardsOfAnotherProgram) {
  write_shards();
  hsdp::consolidate(from.path(), to.path());
  expect_model(to.path());
}

TEST_F(Consolidate, IntoSeveralFilesAndBackIntoOne) {
  write_shards();
  write_manifest();
  hsdp::consolidate(from.path(), to / "parts", {.max_file_bytes = 24});
  const auto index = nlohmann::json::parse(read_bytes(to / (std::string("parts/") + kIndex)));
  EXPECT_EQ(index["metadata"]["total_size"], 36 + 8 + 0 + 24 + 0 + 7);
  EXPECT_EQ(index["weight_map"].size(), 6u);
  std::set<std::string> files;
  for (const auto& [name, file] : index["weight_map"].items()) files.insert(file);
  EXPECT_EQ(files.size(), 4u);
  expect_model(to / "parts");
  hsdp::consolidate(to / "parts", to / "whole");
  expect_model(to / "whole");
  hsdp::consolidate(to / "whole/model.safetensors", to / "again");
  EXPECT_EQ(read_bytes(to / "again/model.safetensors"), read_bytes(to / "whole/model.safetensors"));
}

TEST_F(Consolidate, ConvertsFloatingPointTensorsAlone) {
  const std::string source = from / "model.safetensors";
  std::vector<FilePart> parts{whole_part("count", ScalarType::Long, {3}), whole_part("mask", ScalarType::Bool, {2}),
                              whole_part("a", ScalarType::Double, {2}), whole_part("b", kFloat, {}),
                              whole_part("c", ScalarType::Half, {4})};
  write_bytes(source, safetensors_bytes(parts, false));
  // Values that BFloat16 has, and one that it rounds: 1 + 2^-9.
  const auto a = torch::tensor({1.001953125, -3.0}, torch::kDouble), b = torch::tensor(0.15625f),
             c = torch::tensor({0.5, 65504.0, -0.0, 1e-7}).to(torch::kHalf);
  auto bytes = read_bytes(source);
  const auto begin = values_begin(source) + 3 * 8 + 2;
  std::memcpy(bytes.data() + begin, a.const_data_ptr(), 16);
  std::memcpy(bytes.data() + begin + 16, b.const_data_ptr(), 4);
  std::memcpy(bytes.data() + begin + 20, c.const_data_ptr(), 8);
  write_bytes(source, bytes);

  hsdp::consolidate(source, to.path(), {.max_file_bytes = 1'000'000, .dtype = torch::kBFloat16});
  auto values = values_in(to.path());
  expect_equal(values["count"], expected({3}, ScalarType::Long));
  expect_equal(values["mask"], expected({2}, ScalarType::Bool));
  expect_equal(values["a"], torch::tensor({1.0, -3.0}).to(torch::kBFloat16));
  expect_equal(values["b"], torch::tensor(0.15625f).to(torch::kBFloat16));
  expect_equal(values["c"], c.to(torch::kBFloat16));
  // Wider again.
  hsdp::consolidate(to.path(), to / "double", {.dtype = torch::kDouble});
  expect_equal(values_in(to / "double")["a"], torch::tensor({1.0, -3.0}, torch::kDouble));
}

TEST_F(Consolidate, ConvertsToFloatingPointAlone) {
  write_shards();
  expect_error<ValueError>([&] { hsdp::consolidate(from.path(), to / "model", {.dtype = torch::kLong}); },
                           "[HuggingFaceOptions] dtype Long, expected one of floating-point numbers");
  EXPECT_EQ(to.names(), Names());
}

TEST_F(Consolidate, CountsBytesAfterTheConversion) {
  write_bytes(from / "model.safetensors",
              safetensors_bytes({whole_part("a", kFloat, {100}), whole_part("b", kFloat, {100})}, false));
  hsdp::consolidate(from.path(), to / "same", {.max_file_bytes = 500});
  hsdp::consolidate(from.path(), to / "half", {.max_file_bytes = 500, .dtype = torch::kHalf});
  EXPECT_TRUE(fs::exists(to / (std::string("same/") + kIndex)));
  EXPECT_TRUE(fs::exists(to / "half/model.safetensors"));
}

TEST_F(Consolidate, RefusesAFolderThatHasAModel) {
  write_shards();
  write_manifest();
  write_bytes(to / "model.safetensors", "former");
  expect_error<ValueError>([&] { hsdp::consolidate(from.path(), to.path()); }, "[consolidate] ",
                           " has model.safetensors, expected no model files; choose another folder");
  EXPECT_EQ(to.names(), Names{"model.safetensors"});
  EXPECT_EQ(read_bytes(to / "model.safetensors"), "former");
  // Least of all its source.
  const auto before = from.names();
  expect_error<ValueError>([&] { hsdp::consolidate(from.path(), from.path()); }, "[consolidate] ", "expected no model");
  EXPECT_EQ(from.names(), before);
}

TEST_F(Consolidate, LeavesNothingOfADamagedCheckpoint) {
  checkpoint.add({whole_part("a", kFloat, {200'000}), whole_part("b", kFloat, {400'000})});
  checkpoint.fact("a", kFloat, {200'000});
  checkpoint.fact("b", kFloat, {400'000});
  write_manifest();
  const auto path = from / checkpoint.manifest.files.front().path;
  flip_byte(path, 2'000'000);
  for (const uint64_t max_file_bytes : {1'000'000, 100'000'000}) {
    expect_error<ValueError>([&] { hsdp::consolidate(from.path(), to.path(), {.max_file_bytes = max_file_bytes}); },
                             "[consolidate] " + path + ": bytes 1048576 to 2097152, with values of tensor \"b\", have ",
                             "; the file is damaged");
    EXPECT_EQ(to.names(), Names());
  }
  flip_byte(path, 2'000'000);
  fs::resize_file(path, 2'000'000);
  expect_error<ValueError>([&] { hsdp::consolidate(from.path(), to.path()); },
                           "[consolidate] " + path + " has 2000000 bytes, expected ");
  fs::remove(path);
  expect_error<ValueError>([&] { hsdp::consolidate(from.path(), to.path()); },
                           "[consolidate] " + path + " cannot be opened: No such file or directory");
  EXPECT_EQ(to.names(), Names());
}

TEST_F(Consolidate, RefusesWhatIsNoModel) {
  expect_error<ValueError>([&] { hsdp::consolidate(from.path(), to / "model"); },
                           "[consolidate] " + from.path() + " has no .safetensors files, expected ");
  expect_error<ValueError>([&] { hsdp::consolidate(from / "none", to / "model"); },
                           "[consolidate] " + (from / "none") + " cannot be opened: No such file or directory");
  EXPECT_EQ(to.names(), Names());
}

TEST_F(Consolidate, HoldsOneTensorAtATime) {
  constexpr int64_t kBytes = int64_t{1} << 20, kCount = 24, kSlack = 64 * 1024;
  std::vector<FilePart> first, second;
  for (int64_t i = 0; i < kCount; ++i) {
    const auto name = "w" + std::to_string(i);
    first.push_back({name, kFloat, {{0, 0}, {512, 256}}});
    second.push_back({name, kFloat, {{0, 256}, {512, 256}}});
    checkpoint.fact(name, kFloat, {512, 512});
  }
  checkpoint.add(first);
  checkpoint.add(second);
  write_manifest();
  run_ranks(1,
            [&](RankContext&) {
              hsdp::count_host_memory();
              const auto peak_of = [&](const std::string& folder, const hsdp::HuggingFaceOptions& options) {
                const auto start = hsdp::memory_bytes(at::kCPU);
                hsdp::reset_peak_memory(at::kCPU);
                hsdp::consolidate(from.path(), to / folder, options);
                EXPECT_EQ(hsdp::memory_bytes(at::kCPU), start);
                return hsdp::peak_memory_bytes(at::kCPU) - start;
              };
              const auto same = peak_of("same", {});
              EXPECT_GE(same, kBytes) << "the count saw a tensor";
              EXPECT_LE(same, kBytes + kSlack);
              const auto half = peak_of("half", {.dtype = torch::kBFloat16});
              EXPECT_GE(half, kBytes * 3 / 2);
              EXPECT_LE(half, kBytes * 3 / 2 + kSlack);
            },
            {.make_environment = false});
  EXPECT_EQ(values_in(to / "half").size(), static_cast<size_t>(kCount));
}

}  // namespace hugging_face_test
