// Tensors that lie in any number of files, cut in any way: where their parts are, and reading boxes of them.
#include "hsdp/checkpoint/stored_tensors.h"

#include <c10/util/StringUtil.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <ostream>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "dtensor/error.h"
#include "hsdp/checkpoint/stored_reader.h"
#include "tests/testing/expect.h"
#include "tests/testing/scratch_folder.h"
#include "tests/testing/stored_files.h"

namespace stored_tensors_test {

using namespace testing_support;
using c10::ScalarType;
using dtensor::Box;
using dtensor::ValueError;
using hsdp::kChecksumBlock;
using hsdp::StoredReader;
using hsdp::StoredTensor;
using hsdp::StoredTensors;
using Boxes = std::vector<Box>;
using Sizes = std::vector<int64_t>;

constexpr auto kWhere = "test";
constexpr auto kModel = StoredTensors::Kind::model;

std::string to_string(const Box& box) {
  return c10::str(c10::IntArrayRef(box.offsets), " ", c10::IntArrayRef(box.sizes));
}

/// Reads a box and compares each element, and what lies behind the last.
void expect_box(StoredReader& reader, const StoredTensor& tensor, const Box& box) {
  SCOPED_TRACE(to_string(box));
  const std::string behind = "behind";
  const auto expected = bytes_of_box(tensor.dtype, box) + behind;
  auto read = std::string(expected.size() - behind.size(), '?') + behind;
  reader.read(tensor, box, read.data());
  EXPECT_TRUE(read == expected);
}

// ---- any shape, cut in any way, any box ----

struct Shape {
  std::string name;
  ScalarType dtype;
  Sizes sizes;
};
std::ostream& operator<<(std::ostream& out, const Shape& shape) { return out << shape.name; }

/// How a tensor of at least one dim is cut.
struct Cut {
  std::string name;
  Boxes (*boxes)(const Sizes& sizes);
};
std::ostream& operator<<(std::ostream& out, const Cut& cut) { return out << cut.name; }

Box along(Box box, size_t dim, int64_t begin, int64_t end) {
  box.offsets[dim] += begin;
  box.sizes[dim] = end - begin;
  return box;
}

/// As torch.chunk cuts: the last ones short or empty.
Boxes chunks(const Box& box, size_t dim, int64_t count) {
  Boxes result;
  for (int64_t i = 0; i < count; ++i) {
    const auto range = dtensor::chunk_range(box.sizes[dim], count, i);
    result.push_back(along(box, dim, range.begin, range.end));
  }
  return result;
}

Boxes grid(const Sizes& sizes) {
  Boxes result;
  for (const auto& row : chunks(whole_box(sizes), 0, 2)) {
    for (const auto& box : chunks(row, sizes.size() - 1, 3)) result.push_back(box);
  }
  return result;
}

/// A first row in two, then the rest in two of other sizes: no line goes through all.
Boxes bricks(const Sizes& sizes) {
  const auto whole = whole_box(sizes);
  const auto last = sizes.size() - 1;
  const auto first_rows = std::min<int64_t>(1, sizes[0]);
  const auto first = along(whole, 0, 0, first_rows), rest = along(whole, 0, first_rows, sizes[0]);
  const auto half = [&](const Box& box, int64_t at) {
    at = std::min(at, box.sizes[last]);
    return Boxes{along(box, last, 0, at), along(box, last, at, box.sizes[last])};
  };
  auto result = half(first, 1);
  for (const auto& box : half(rest, 2)) result.push_back(box);
  return result;
}

const std::vector<Cut> kCuts = {
    {"Whole", [](const Sizes& sizes) { return Boxes{whole_box(sizes)}; }},
    {"Rows", [](const Sizes& sizes) { return chunks(whole_box(sizes), 0, 3); }},
    {"ManyRows", [](const Sizes& sizes) { return chunks(whole_box(sizes), 0, 7); }},
    {"Columns", [](const Sizes& sizes) { return chunks(whole_box(sizes), sizes.size() - 1, 3); }},
    {"Grid", grid},
    {"Bricks", bricks},
};

Boxes wanted_boxes(const Sizes& sizes) {
  const auto whole = whole_box(sizes);
  Boxes boxes{whole};
  if (sizes.empty()) return boxes;
  auto inner = whole, first = whole, last = whole;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    const auto size = sizes[dim];
    boxes.push_back(along(whole, dim, 0, 0));
    boxes.push_back(along(whole, dim, size / 2, size));
    boxes.push_back(along(whole, dim, size / 3, size - size / 3));
    if (size > 2) inner = along(inner, dim, 1, size - 1);
    if (size == 0) return boxes;
    first = along(first, dim, 0, 1);
    last = along(last, dim, size - 1, size);
  }
  for (const auto& box : {inner, first, last}) boxes.push_back(box);
  return boxes;
}

class StoredBoxes : public ::testing::TestWithParam<std::tuple<Shape, Cut>> {
 protected:
  static Boxes parts() {
    const auto& [shape, cut] = GetParam();
    return shape.sizes.empty() ? Boxes{whole_box({})} : cut.boxes(shape.sizes);
  }
  static void expect_all(const StoredTensors& stored) {
    const auto& shape = std::get<0>(GetParam());
    const auto* tensor = stored.find("w");
    ASSERT_NE(tensor, nullptr);
    EXPECT_EQ(tensor->dtype, shape.dtype);
    EXPECT_EQ(tensor->sizes, shape.sizes);
    StoredReader reader(kWhere, stored);
    for (const auto& box : wanted_boxes(shape.sizes)) expect_box(reader, *tensor, box);
    // Another reader begins with each of them.
    for (const auto& box : wanted_boxes(shape.sizes)) {
      StoredReader another(kWhere, stored);
      expect_box(another, *tensor, box);
    }
  }
};

TEST_P(StoredBoxes, AreThoseThatWereWritten) {
  const ScratchFolder folder;
  HandMadeCheckpoint checkpoint(folder);
  const auto& shape = std::get<0>(GetParam());
  checkpoint.fact("w", shape.dtype, shape.sizes);
  for (const auto& box : parts()) {
    // Odd bytes before it.
    const auto other = "other" + std::to_string(checkpoint.manifest.files.size());
    checkpoint.add({whole_part(other, ScalarType::Byte, {5}), {"w", shape.dtype, box}});
    checkpoint.fact(other, ScalarType::Byte, {5});
  }
  const auto stored = StoredTensors::of_checkpoint(kWhere, folder.path(), checkpoint.manifest, kModel);
  {
    SCOPED_TRACE("verified");
    expect_all(stored);
  }
  {
    SCOPED_TRACE("sent");
    expect_all(StoredTensors::deserialize(stored.serialize()));
  }
  SCOPED_TRACE("unverified");
  expect_all(StoredTensors::of_hugging_face(kWhere, folder.path()));
}

INSTANTIATE_TEST_SUITE_P(
    All, StoredBoxes,
    ::testing::Combine(
        ::testing::Values(Shape{"Scalar", ScalarType::Double, {}}, Shape{"Vector", ScalarType::Float, {10}},
                          Shape{"OneElement", ScalarType::Half, {1}}, Shape{"Matrix", ScalarType::Long, {7, 5}},
                          Shape{"Row", ScalarType::Char, {1, 11}}, Shape{"Column", ScalarType::BFloat16, {11, 1}},
                          Shape{"Cube", ScalarType::Short, {5, 4, 6}},
                          Shape{"FourDims", ScalarType::Byte, {3, 2, 4, 5}}, Shape{"Empty", ScalarType::Float, {0}},
                          Shape{"NoColumns", ScalarType::Float, {4, 0, 3}}),
        ::testing::ValuesIn(kCuts)),
    [](const auto& which) { return std::get<0>(which.param).name + std::get<1>(which.param).name; });

// ---- how much is read ----

/// 8.4 MB in rows of 2,800 bytes, in four files.
class LargeTensor : public ::testing::Test {
 protected:
  static constexpr int64_t kRows = 3000, kColumns = 700;

  LargeTensor() : checkpoint(folder) {
    checkpoint.fact("w", ScalarType::Float, {kRows, kColumns});
    boxes = chunks(whole_box({kRows, kColumns}), 0, 4);
    for (const auto& box : boxes) paths.push_back(checkpoint.add({{"w", ScalarType::Float, box}}));
    for (const auto& path : paths) begins.push_back(values_begin(path));
  }
  StoredTensors verified() const {
    return StoredTensors::of_checkpoint(kWhere, folder.path(), checkpoint.manifest, kModel);
  }
  /// Bytes of the blocks in which rows [begin, end) of columns [left, right) lie.
  uint64_t bytes_of_blocks(const Box& wanted) const {
    uint64_t bytes = 0;
    for (size_t file = 0; file < boxes.size(); ++file) {
      std::set<uint64_t> blocks;
      for (int64_t row = 0; row < boxes[file].sizes[0]; ++row) {
        const auto global = row + boxes[file].offsets[0];
        if (global < wanted.offsets[0] || global >= wanted.offsets[0] + wanted.sizes[0]) continue;
        const auto first = begins[file] + static_cast<uint64_t>((row * kColumns + wanted.offsets[1]) * 4);
        const auto last = first + static_cast<uint64_t>(wanted.sizes[1] * 4) - 1;
        for (auto block = first / kChecksumBlock; block <= last / kChecksumBlock; ++block) blocks.insert(block);
      }
      for (const auto block : blocks) {
        bytes += std::min<uint64_t>(kChecksumBlock, std::filesystem::file_size(paths[file]) - block * kChecksumBlock);
      }
    }
    return bytes;
  }

  ScratchFolder folder;
  HandMadeCheckpoint checkpoint;
  Boxes boxes;
  std::vector<std::string> paths;
  std::vector<uint64_t> begins;
};

TEST_F(LargeTensor, IsReadBlockByBlockEachOnceWhereThereAreChecksums) {
  const auto stored = verified();
  const auto whole = whole_box({kRows, kColumns});
  for (const auto& box : {whole, along(whole, 0, 10, 11), along(whole, 0, 600, 900), along(whole, 0, 700, 1600),
                          along(along(whole, 0, 740, 760), 1, 3, 5), along(whole, 1, 100, 101)}) {
    StoredReader reader(kWhere, stored);
    expect_box(reader, *stored.find("w"), box);
    EXPECT_EQ(reader.bytes_read(), bytes_of_blocks(box)) << to_string(box);
  }
}

TEST_F(LargeTensor, IsReadOnceRowByRow) {
  const auto stored = verified();
  const auto whole = whole_box({kRows, kColumns});
  StoredReader reader(kWhere, stored);
  for (int64_t row = 0; row < 300; ++row) expect_box(reader, *stored.find("w"), along(whole, 0, row, row + 1));
  EXPECT_EQ(reader.bytes_read(), bytes_of_blocks(along(whole, 0, 0, 300)));
}

TEST_F(LargeTensor, IsReadToTheByteWhereThereAreNoChecksums) {
  const auto stored = StoredTensors::of_hugging_face(kWhere, folder.path());
  const auto whole = whole_box({kRows, kColumns});
  for (const auto& box : {whole, along(whole, 0, 600, 900), along(whole, 0, 100, 124)}) {
    StoredReader reader(kWhere, stored);
    expect_box(reader, *stored.find("w"), box);
    EXPECT_EQ(reader.bytes_read(), static_cast<uint64_t>(box.sizes[0] * kColumns * 4)) << to_string(box);
  }
  // Short runs come out of blocks.
  for (const auto& box : {along(whole, 0, 10, 11), along(whole, 1, 100, 101), along(whole, 1, 0, 350)}) {
    StoredReader reader(kWhere, stored);
    expect_box(reader, *stored.find("w"), box);
    EXPECT_EQ(reader.bytes_read(), bytes_of_blocks(box)) << to_string(box);
  }
}

TEST_F(LargeTensor, IsReadOnlyWhereItIsWanted) {
  const auto whole = whole_box({kRows, kColumns});
  const auto stored = verified();
  std::filesystem::remove(paths[2]);
  StoredReader reader(kWhere, stored);
  expect_box(reader, *stored.find("w"), along(whole, 0, 0, 1500));
  expect_box(reader, *stored.find("w"), along(whole, 0, 2250, 3000));
  expect_box(reader, *stored.find("w"), along(whole, 0, 1600, 1600));
  std::string row(kColumns * 4, '\0');
  expect_error<ValueError>([&] { reader.read(*stored.find("w"), along(whole, 0, 1500, 1501), row.data()); },
                           "[test] " + paths[2] + " cannot be opened: No such file or directory");
}

TEST_F(LargeTensor, WithADamagedBlockIsRefusedWhereThatIsRead) {
  const auto whole = whole_box({kRows, kColumns});
  const auto stored = verified();
  flip_byte(paths[1], kChecksumBlock + 12345);
  const auto& tensor = *stored.find("w");
  StoredReader reader(kWhere, stored);
  // The first row of a file that reaches into its second block, and the first of the third.
  const auto row_of = [&](uint64_t byte) { return 750 + static_cast<int64_t>((byte - begins[1]) / (kColumns * 4)); };
  const auto second = row_of(kChecksumBlock), third = row_of(2 * kChecksumBlock) + 1;
  expect_box(reader, tensor, along(whole, 0, 0, second));
  expect_box(reader, tensor, along(whole, 0, third, kRows));
  std::string out(static_cast<size_t>(kRows * kColumns * 4), '\0');
  const std::string damaged = "[test] " + paths[1] + ": bytes 1048576 to 2097152, with values of tensor \"w\", have ";
  for (const auto& box : {whole, along(whole, 0, second, second + 1), along(whole, 0, third - 1, third),
                          along(along(whole, 0, second + 5, second + 6), 1, 699, 700)}) {
    for (int repetition = 0; repetition < 2; ++repetition) {
      expect_error<ValueError>([&] { reader.read(tensor, box, out.data()); }, damaged, "checksum ", ", expected ",
                               "; the file is damaged: load another checkpoint");
    }
    // What is right can still be read.
    expect_box(reader, tensor, along(whole, 0, second - 2, second));
  }
  // Without checksums nobody can tell.
  const auto unverified = StoredTensors::of_hugging_face(kWhere, folder.path());
  StoredReader(kWhere, unverified).read(*unverified.find("w"), whole, out.data());
}

TEST_F(LargeTensor, ThatWasTruncatedIsRefusedWhereItEnds) {
  const auto whole = whole_box({kRows, kColumns});
  const auto stored = verified();
  const auto unverified = StoredTensors::of_hugging_face(kWhere, folder.path());
  std::filesystem::resize_file(paths[3], kChecksumBlock + 100);
  for (const auto* index : {&stored, &unverified}) {
    StoredReader reader(kWhere, *index);
    expect_box(reader, *index->find("w"), along(whole, 0, 2250, 2600));
    std::string out(static_cast<size_t>(kRows * kColumns * 4), '\0');
    expect_error<ValueError>([&] { reader.read(*index->find("w"), along(whole, 0, 2250, kRows), out.data()); },
                             "[test] " + paths[3] + " ends at byte 1048676, expected ");
  }
  expect_error<ValueError>([&] { verified(); }, "[test] " + paths[3] + " has 1048676 bytes, expected ",
                           " as the manifest says; the file is damaged");
}

TEST_F(LargeTensor, WithADamagedHeaderIsRefusedAtOnce) {
  // A blank between header and values: any reader would go on.
  flip_byte(paths[2], begins[2] + 100);
  expect_error<ValueError>(
      [&] { verified(); },
      "[test] " + paths[2] +
          ": bytes 0 to 1048576, with its header and values of tensors \"w\" to \"w\", have checksum ");
}

TEST(StoredReaderTest, KeepsFewOfManyFilesOpen) {
  constexpr int64_t kFiles = 300;
  const ScratchFolder folder;
  HandMadeCheckpoint checkpoint(folder);
  checkpoint.fact("w", ScalarType::Float, {kFiles, 3});
  for (int64_t i = 0; i < kFiles; ++i) checkpoint.add({{"w", ScalarType::Float, {{i, 0}, {1, 3}}}});
  const auto stored = StoredTensors::of_checkpoint(kWhere, folder.path(), checkpoint.manifest, kModel);
  const auto open_files = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
  };
  const auto before = open_files();
  StoredReader reader(kWhere, stored);
  for (int repetition = 0; repetition < 2; ++repetition) {
    expect_box(reader, *stored.find("w"), whole_box({kFiles, 3}));
    EXPECT_LE(open_files() - before, 64);
  }
  // One that is in use all the time stays.
  const auto bytes = reader.bytes_read();
  for (int64_t i = 1; i < kFiles; ++i) {
    expect_box(reader, *stored.find("w"), {{0, 1}, {1, 1}});
    expect_box(reader, *stored.find("w"), {{i, 0}, {1, 1}});
  }
  uint64_t size = 0;
  for (const auto& file : stored.files()) size = std::max(size, file.bytes);
  EXPECT_LE(reader.bytes_read() - bytes, kFiles * size);
}

// ---- the index ----

TEST(StoredTensorsTest, AreSortedByNameAndFound) {
  const ScratchFolder folder;
  HandMadeCheckpoint checkpoint(folder);
  checkpoint.add({whole_part("b", ScalarType::Float, {2}), {"a", ScalarType::Half, {{0, 0}, {1, 3}}}});
  checkpoint.add({{"a", ScalarType::Half, {{1, 0}, {1, 3}}}, whole_part("c", ScalarType::Long, {})});
  checkpoint.fact("a", ScalarType::Half, {2, 3});
  checkpoint.fact("b", ScalarType::Float, {2});
  checkpoint.fact("c", ScalarType::Long, {});
  // Of no elements, and so in no file.
  checkpoint.fact("none", ScalarType::Float, {3, 0});
  const auto read = StoredTensors::of_checkpoint(kWhere, folder.path(), checkpoint.manifest, kModel);
  for (const auto& stored : {read, StoredTensors::deserialize(read.serialize())}) {
    std::vector<std::string> names;
    for (const auto& tensor : stored.tensors()) {
      names.push_back(tensor.name);
      EXPECT_EQ(stored.find(tensor.name), &tensor);
    }
    EXPECT_EQ(names, (std::vector<std::string>{"a", "b", "c", "none"}));
    EXPECT_EQ(stored.find("d"), nullptr);
    EXPECT_EQ(stored.tensors()[0].dtype, ScalarType::Half);
    EXPECT_EQ(stored.tensors()[0].parts.size(), 2u);
    EXPECT_EQ(stored.tensors()[3].sizes, (Sizes{3, 0}));
    EXPECT_TRUE(stored.tensors()[3].parts.empty());
    ASSERT_EQ(stored.files().size(), 2u);
    for (size_t i = 0; i < 2; ++i) {
      const auto& record = checkpoint.manifest.files[i];
      EXPECT_EQ(stored.files()[i].path, folder / record.path);
      EXPECT_EQ(stored.files()[i].bytes, record.written.bytes);
      EXPECT_EQ(stored.files()[i].block_checksums, record.written.block_checksums);
    }
  }
}

TEST(StoredTensorsTest, OfNothing) {
  const ScratchFolder folder;
  const auto stored = StoredTensors::of_checkpoint(kWhere, folder.path(), {}, kModel);
  EXPECT_TRUE(stored.tensors().empty());
  EXPECT_TRUE(StoredTensors::deserialize(stored.serialize()).tensors().empty());
}

TEST(StoredTensorsTest, OfTheOptimizerAreThoseInItsFolder) {
  const ScratchFolder folder;
  HandMadeCheckpoint checkpoint(folder);
  checkpoint.add({whole_part("w", ScalarType::Float, {2})});
  checkpoint.fact("w", ScalarType::Float, {2});
  std::filesystem::create_directory(folder / "optimizer");
  write_bytes(folder / "optimizer/shard.safetensors",
              safetensors_bytes({whole_part("state.w.exp_avg", ScalarType::Double, {2})}, true));
  checkpoint.manifest.files.push_back(
      {"optimizer/shard.safetensors",
       hsdp::measure(hsdp::ReadableFile(kWhere, folder / "optimizer/shard.safetensors"))});
  // Neither a shard of the model nor of the optimizer.
  checkpoint.manifest.files.push_back({"training_state.json", {}});
  checkpoint.manifest.files.push_back({"ranks/rank-00001.safetensors", {}});
  checkpoint.manifest.optimizer["state.w.exp_avg"] = {ScalarType::Double, {2}};
  const auto of = [&](StoredTensors::Kind kind) {
    return StoredTensors::of_checkpoint(kWhere, folder.path(), checkpoint.manifest, kind);
  };
  ASSERT_EQ(of(kModel).tensors().size(), 1u);
  EXPECT_EQ(of(kModel).tensors()[0].name, "w");
  const auto optimizer = of(StoredTensors::Kind::optimizer);
  ASSERT_EQ(optimizer.tensors().size(), 1u);
  StoredReader reader(kWhere, optimizer);
  expect_box(reader, *optimizer.find("state.w.exp_avg"), whole_box({2}));
}

TEST(StoredTensorsTest, OfOneFileAreWhole) {
  const ScratchFolder folder;
  write_bytes(folder / "x.safetensors", safetensors_bytes({whole_part("w", ScalarType::Float, {4, 2})}, false));
  const auto written = hsdp::measure(hsdp::ReadableFile(kWhere, folder / "x.safetensors"));
  const hsdp::StoredFile file{folder / "x.safetensors", written.bytes, written.block_checksums};
  const auto stored = StoredTensors::of_file(kWhere, file);
  StoredReader reader(kWhere, stored);
  expect_box(reader, *stored.find("w"), whole_box({4, 2}));
  flip_byte(file.path, written.bytes - 1);
  expect_error<ValueError>(
      [&] { StoredTensors::of_file(kWhere, file); },
      "[test] " + file.path + ": bytes 0 to " + std::to_string(written.bytes) + ", with its header");
  std::filesystem::resize_file(file.path, 20);
  expect_error<ValueError>([&] { StoredTensors::of_file(kWhere, file); },
                           "[test] " + file.path + " has 20 bytes, expected " + std::to_string(written.bytes));
}

// ---- what does not fit together ----

constexpr auto kFloat = ScalarType::Float;

/// Boxes of "w", a file each; what the manifest says of it; what the message has to say.
struct Misfit {
  std::string name;
  std::vector<FilePart> parts;
  Sizes sizes;
  std::vector<std::string> message;
};
std::ostream& operator<<(std::ostream& out, const Misfit& misfit) { return out << misfit.name; }

FilePart part(const Sizes& offsets, const Sizes& sizes, ScalarType dtype = kFloat) {
  return {"w", dtype, {offsets, sizes}};
}

class StoredMisfit : public ::testing::TestWithParam<Misfit> {};

TEST_P(StoredMisfit, IsRefused) {
  const ScratchFolder folder;
  HandMadeCheckpoint checkpoint(folder);
  checkpoint.fact("w", kFloat, GetParam().sizes);
  for (const auto& each : GetParam().parts) checkpoint.add({each});
  for (const auto& text : GetParam().message) {
    expect_error<ValueError>([&] { StoredTensors::of_checkpoint(kWhere, folder.path(), checkpoint.manifest, kModel); },
                             "[test] ", text);
  }
}

const std::string kFirst = "shard-00001-model-00001-of-00001.safetensors";
const std::string kSecond = "shard-00002-model-00001-of-00001.safetensors";

INSTANTIATE_TEST_SUITE_P(
    All, StoredMisfit,
    ::testing::Values(
        Misfit{"Twice",
               {part({0}, {3}), part({0}, {3})},
               {3},
               {"tensor \"w\": the part at offsets [0] sizes [3] in ", "overlaps that at offsets [0] sizes [3] in ",
                kFirst, kSecond, ", expected each element once"}},
        Misfit{"ScalarTwice", {part({}, {}), part({}, {})}, {}, {"\"w\": the part at offsets [] sizes [] in "}},
        Misfit{"Overlap",
               {part({0, 0}, {3, 2}), part({2, 1}, {2, 1})},
               {4, 2},
               {"the part at offsets [0, 0] sizes [3, 2] in ", "overlaps that at offsets [2, 1] sizes [2, 1] in "}},
        // As many elements as it has.
        Misfit{"OverlapAndHole", {part({0}, {3}), part({2}, {2}), part({5}, {1})}, {6}, {"overlaps"}},
        Misfit{"OverlapOfALargeOne",
               {part({0, 0}, {9, 1}), part({2, 1}, {2, 1}), part({5, 0}, {1, 1})},
               {9, 2},
               {"the part at offsets [0, 0] sizes [9, 1] in ", "overlaps that at offsets [5, 0] sizes [1, 1] in "}},
        Misfit{"Missing",
               {part({0}, {3})},
               {5},
               {"tensor \"w\" of sizes [5]: the 1 parts in the files (", kFirst,
                " hold 3 elements, expected 5; a file is missing"}},
        Misfit{"MissingInside",
               {part({0, 0}, {2, 2}), part({0, 3}, {2, 1})},
               {2, 4},
               {"hold 6 elements, expected 8; a file is missing"}},
        Misfit{"None", {}, {5}, {"tensor \"w\" of sizes [5]: the 0 parts in the files hold 0 elements, expected 5"}},
        Misfit{"NoScalar", {}, {}, {"of sizes []: the 0 parts in the files hold 0 elements, expected 1"}},
        Misfit{"BeyondTheEnd",
               {part({0}, {3}), part({3}, {3})},
               {5},
               {kSecond, ": tensor \"w\" has a part at offsets [3] sizes [3], expected one within its sizes [5]"}},
        Misfit{"FarBeyondTheEnd", {part({int64_t{1} << 62}, {3})}, {5}, {"expected one within its sizes [5]"}},
        Misfit{"LargerThanItIs", {part({0, 0}, {2, 6})}, {2, 5}, {"expected one within its sizes [2, 5]"}},
        Misfit{"OtherDtype",
               {part({0}, {2}, ScalarType::Half)},
               {2},
               {kFirst, ": tensor \"w\" of dtype Half and 1 dims, expected Float and 1 as the manifest says"}},
        Misfit{"OtherDims",
               {part({0, 0}, {2, 1})},
               {2},
               {": tensor \"w\" of dtype Float and 2 dims, expected Float and 1 as the manifest says"}},
        Misfit{"OtherName",
               {{"v", kFloat, {{0}, {2}}}},
               {2},
               {": tensor \"v\" of dtype Float and 1 dims, expected none of that name as the manifest says"}}),
    [](const auto& which) { return which.param.name; });

}  // namespace stored_tensors_test
