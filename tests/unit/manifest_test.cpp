// Manifests of checkpoints: their text, everything refused that none can have, and files compared with them.
#include "hsdp/checkpoint/manifest.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "dtensor/error.h"
#include "tests/testing/expect.h"
#include "tests/testing/scratch_folder.h"

namespace manifest_test {

using namespace testing_support;
using c10::ScalarType;
using dtensor::ValueError;
using hsdp::kChecksumBlock;
using hsdp::Manifest;

constexpr auto kWhere = "test";

// ---- text ----

const std::string kText = R"json({
"format":"hsdp-checkpoint",
"version":1,
"step":120,
"world_size":4,
"mesh":"2x2 (replicate, shard)",
"torch":"2.11.0",
"block_bytes":1048576,
"files":[
{"path":"shard-00001.safetensors","bytes":1048577,"xxh3":"0123456789abcdef","blocks":"00000000000000ff8000000000000000"},
{"path":"optimizer/\"empty\"","bytes":0,"xxh3":"2d06800538d394c2","blocks":""}
],
"model":{
"bias":{"dtype":"BF16","shape":[]},
"layers.0.w\"é\"":{"dtype":"F32","shape":[3,0]}
},
"optimizer":{
"state.bias.exp_avg":{"dtype":"F64","shape":[7]}
}
}
)json";

Manifest manifest() {
  Manifest result;
  result.step = 120;
  result.world_size = 4;
  result.mesh = "2x2 (replicate, shard)";
  result.torch_version = "2.11.0";
  result.files = {
      {"shard-00001.safetensors", {kChecksumBlock + 1, 0x0123456789abcdef, {0xff, uint64_t{1} << 63}}},
      {"optimizer/\"empty\"", {0, 0x2d06800538d394c2, {}}},
  };
  result.model = {{"bias", {ScalarType::BFloat16, {}}}, {"layers.0.w\"é\"", {ScalarType::Float, {3, 0}}}};
  result.optimizer = {{"state.bias.exp_avg", {ScalarType::Double, {7}}}};
  return result;
}

TEST(ManifestText, IsJson) { EXPECT_EQ(hsdp::to_json(manifest()), kText); }

TEST(ManifestText, OfNothing) {
  const std::string text = R"({
"format":"hsdp-checkpoint",
"version":1,
"step":0,
"world_size":1,
"mesh":"",
"torch":"",
"block_bytes":1048576,
"files":[],
"model":{},
"optimizer":{}
}
)";
  EXPECT_EQ(hsdp::to_json(Manifest{}), text);
  EXPECT_EQ(hsdp::to_json(hsdp::parse_manifest(kWhere, text, "manifest.json")), text);
}

TEST(ManifestText, IsRead) {
  const auto read = hsdp::parse_manifest(kWhere, kText, "manifest.json");
  EXPECT_EQ(read.step, 120);
  EXPECT_EQ(read.world_size, 4);
  EXPECT_EQ(read.mesh, "2x2 (replicate, shard)");
  EXPECT_EQ(read.torch_version, "2.11.0");
  ASSERT_EQ(read.files.size(), 2u);
  EXPECT_EQ(read.files[0].path, "shard-00001.safetensors");
  EXPECT_EQ(read.files[0].written.bytes, kChecksumBlock + 1);
  EXPECT_EQ(read.files[0].written.checksum, 0x0123456789abcdefu);
  EXPECT_EQ(read.files[0].written.block_checksums, (std::vector<uint64_t>{0xff, uint64_t{1} << 63}));
  EXPECT_EQ(read.model.at("layers.0.w\"é\"").dtype, ScalarType::Float);
  EXPECT_EQ(read.model.at("layers.0.w\"é\"").sizes, (std::vector<int64_t>{3, 0}));
  EXPECT_EQ(hsdp::to_json(read), kText);
  // However it is laid out.
  std::string in_one_line = kText;
  std::erase(in_one_line, '\n');
  EXPECT_EQ(hsdp::to_json(hsdp::parse_manifest(kWhere, "\t" + in_one_line + " ", "manifest.json")), kText);
}

TEST(ManifestText, IsRefusedWhereverItEnds) {
  for (size_t end = 0; end < kText.size() - 2; ++end) {
    expect_error<ValueError>([&] { hsdp::parse_manifest(kWhere, kText.substr(0, end), "manifest.json"); },
                             "[test] manifest.json is not a manifest: it is no JSON at byte ");
  }
}

/// A manifest with one thing changed, and what the message says of it.
struct Malformed {
  const char* name;
  std::string before, after, part;
};
std::ostream& operator<<(std::ostream& out, const Malformed& change) { return out << change.name; }

class MalformedManifest : public ::testing::TestWithParam<Malformed> {};

TEST_P(MalformedManifest, IsRefused) {
  const auto& [name, before, after, part] = GetParam();
  auto text = kText;
  const auto at = text.find(before);
  ASSERT_NE(at, std::string::npos);
  text.replace(at, before.size(), after);
  expect_error<ValueError>([&] { hsdp::parse_manifest(kWhere, text, "there/manifest.json"); },
                           "[test] there/manifest.json is not a manifest: ", part);
}

const std::string kFirstFile =
    kText.substr(kText.find("{\"path\""), kText.find(",\n{\"path\"") - kText.find("{\"path\""));
const std::string kBias = R"("bias":{"dtype":"BF16","shape":[]})";

const std::vector<Malformed> kTexts{
    {"Empty", kText, "", "it is no JSON at byte 1"},
    {"NoJson", kText, "step: 120", "it is no JSON at byte 1"},
    {"Unfinished", "}\n}\n", "}\n", "it is no JSON at byte"},
    {"MoreAfterwards", "}\n}\n", "}\n}\n{}", "it is no JSON at byte"},
    {"ZeroByte", "\"step\"", std::string("\0\"step\"", 7), "it is no JSON at byte 43"},
    {"NotUtf8", "2.11.0", "\xff", "it is no JSON at byte"},
    {"List", kText, "[1]", "it is [1], expected an object"},
    {"Text", kText, "\"hsdp-checkpoint\"", "it is \"hsdp-checkpoint\", expected an object"},
    {"NumberBeyondAll", "120", "1e999", "it has a number that no floating-point number reaches"},
    {"Deep", "\"shape\":[]", "\"shape\":" + std::string(100000, '['), "it is nested more than 4 deep"},
    {"KeyTwice", "\"step\":120", "\"step\":120,\"step\":121", "it has \"step\" twice in one object"},
    {"TensorTwice", kBias, kBias + "," + kBias, "it has \"bias\" twice in one object"},
    {"TensorTwiceEscaped", kBias, kBias + R"(,"\u0062ias":{})", "it has \"bias\" twice in one object"},
};
const std::vector<Malformed> kEntries{
    {"FormatMissing", "\"format\":\"hsdp-checkpoint\",", "", "its format is missing, expected \"hsdp-checkpoint\""},
    {"FormatOther", "\"format\":\"hsdp-checkpoint\"", "\"format\":\"pt\"",
     "its format is \"pt\", expected \"hsdp-checkpoint\""},
    {"VersionMissing", "\"version\":1,", "", "its version is missing, expected 1"},
    {"VersionNewer", "\"version\":1", "\"version\":2,\"new\":1", "its version is 2, expected 1; another release"},
    {"VersionIsText", "\"version\":1", "\"version\":\"1\"", "its version is \"1\", expected 1"},
    {"StepMissing", "\"step\":120,", "", "it lacks \"step\""},
    {"StepNegative", "\"step\":120", "\"step\":-1", "step is -1, expected 0 or more"},
    {"StepFloat", "\"step\":120", "\"step\":120.0", "step is 120.0, expected a whole number"},
    {"StepTooLarge", "\"step\":120", "\"step\":9223372036854775808", "step is 9223372036854775808, expected"},
    {"StepIsText", "\"step\":120", "\"step\":\"120\"", "step is \"120\", expected a whole number"},
    {"NoRanks", "\"world_size\":4", "\"world_size\":0", "world_size is 0, expected at least 1"},
    {"MeshIsNull", "\"mesh\":\"2x2 (replicate, shard)\"", "\"mesh\":null", "mesh is null, expected a text"},
    {"BlocksOfAnotherSize", "1048576", "4096", "block_bytes is 4096, expected 1048576"},
    {"MoreEntries", "\"step\"", "\"steps\":1,\"step\"", "it has \"steps\", expected nothing but format, version"},
    {"FilesIsObject", "\"files\":[", "\"files\":{},\"old\":[", "it has \"old\", expected nothing but"},
    {"ModelIsList",
     "\"model\":{\n" + kText.substr(kText.find("\"bias\""), kText.find("},\n\"optimizer\"") - kText.find("\"bias\"")) +
         "}",
     "\"model\":[]", "model is [], expected an object"},
};
const std::vector<Malformed> kFiles{
    {"FilesIsText", kText.substr(kText.find("\"files\""), kText.find(",\n\"model\"") - kText.find("\"files\"")),
     "\"files\":\"all\"", "files is \"all\", expected a list"},
    {"FileIsText", kFirstFile, "\"shard-00001\"", "files[0] is \"shard-00001\", expected an object"},
    {"PathMissing", "\"path\":\"shard-00001.safetensors\",", "", "files[0] lacks \"path\""},
    {"FileWithMore", "\"bytes\":0", "\"bytes\":0,\"crc\":1", "files[1] has \"crc\", expected nothing but path, bytes"},
    {"FileTwice", kFirstFile, kFirstFile + "," + kFirstFile, "files[1].path shard-00001.safetensors is there twice"},
    {"BytesNegative", "1048577", "-1", "files[0].bytes is -1, expected 0 or more"},
    {"BytesOfAnotherNumberOfBlocks", "1048577", "1048576", "expected 1 times 16 digits"},
    {"BytesHuge", "1048577", "9223372036854775807", "expected 8796093022208 times 16 digits"},
    {"BlocksMissing", "00000000000000ff8000000000000000", "", "files[0].blocks is \"\", expected 2 times 16 digits"},
    {"BlocksCut", "8000000000000000", "800000000000000", "files[0].blocks is \"00000000000000ff800"},
    {"BlocksOfNothing", "\"blocks\":\"\"", "\"blocks\":\"2d06800538d394c2\"",
     "files[1].blocks is \"2d06800538d394c2\""},
    {"BlocksInUpperCase", "00000000000000ff", "00000000000000FF", "files[0].blocks is \"00000000000000FF"},
    {"ChecksumIsNumber", "\"0123456789abcdef\"", "123", "files[0].xxh3 is 123, expected a text"},
    {"ChecksumShort", "0123456789abcdef", "0123456789abcde", "files[0].xxh3 is \"0123456789abcde\", expected 1 times"},
    {"ChecksumOfOtherDigits", "0123456789abcdef", "0x23456789abcdef", "files[0].xxh3 is \"0x23456789abcdef\""},
    {"ChecksumWithSign", "0123456789abcdef", "-123456789abcdef", "files[0].xxh3 is \"-123456789abcdef\""},
};
const std::vector<Malformed> kTensors{
    {"TensorIsNull", kBias, "\"bias\":null", "model[\"bias\"] is null, expected an object"},
    {"DtypeMissing", "\"dtype\":\"BF16\",", "", "model[\"bias\"] lacks \"dtype\""},
    {"DtypeUnknown", "BF16", "bfloat16", "model[\"bias\"].dtype is \"bfloat16\", expected a name of safetensors"},
    {"DtypeIsNumber", "\"BF16\"", "16", "model[\"bias\"].dtype is 16, expected a text"},
    {"ShapeIsNumber", "[7]", "7", "optimizer[\"state.bias.exp_avg\"].shape is 7, expected a list"},
    {"SizeNegative", "[7]", "[-7]", "optimizer[\"state.bias.exp_avg\"].shape is -7, expected 0 or more"},
    {"SizeIsText", "[7]", "[\"7\"]", "optimizer[\"state.bias.exp_avg\"].shape is \"7\", expected a whole number"},
    {"SizesOverflow", "[7]", "[4294967296,4294967296]",
     "shape is [4294967296,4294967296], expected less than 2^63 bytes"},
    {"TensorWithMore", "\"shape\":[7]", "\"shape\":[7],\"x\":1",
     "optimizer[\"state.bias.exp_avg\"] has \"x\", expected"},
};

std::string name_of(const ::testing::TestParamInfo<Malformed>& which) { return which.param.name; }
INSTANTIATE_TEST_SUITE_P(Text, MalformedManifest, ::testing::ValuesIn(kTexts), name_of);
INSTANTIATE_TEST_SUITE_P(Entry, MalformedManifest, ::testing::ValuesIn(kEntries), name_of);
INSTANTIATE_TEST_SUITE_P(File, MalformedManifest, ::testing::ValuesIn(kFiles), name_of);
INSTANTIATE_TEST_SUITE_P(Tensor, MalformedManifest, ::testing::ValuesIn(kTensors), name_of);

class UnsafePath : public ::testing::TestWithParam<std::string> {};

TEST_P(UnsafePath, IsRefused) {
  auto text = kText;
  const std::string before = "shard-00001.safetensors";
  text.replace(text.find(before), before.size(), GetParam());
  expect_error<ValueError>([&] { hsdp::parse_manifest(kWhere, text, "manifest.json"); },
                           "files[0].path is \"" + GetParam() + "\", expected the path of a file within");
}

INSTANTIATE_TEST_SUITE_P(Paths, UnsafePath,
                         ::testing::Values("", ".", "..", "/", "/etc/passwd", "../x", "a/../../x", "a/../x", "a/..",
                                           "./x", "a//x", "a/", "a/.", "//x", "a\\u0000", "manifest.json"));

// ---- files ----

/// A checkpoint of three files: two and a half blocks, one byte, none.
class CheckpointFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::create_directories(folder_ / "optimizer/deep");
    add("large", std::string(2 * kChecksumBlock + kChecksumBlock / 2, 'l'));
    add("optimizer/one", "1");
    add("optimizer/deep/empty", "");
    hsdp::write_manifest(kWhere, folder_.path(), manifest_);
  }

  void add(const std::string& path, const std::string& bytes) {
    hsdp::FileWriter file(kWhere, folder_ / path);
    file.write(bytes.data(), bytes.size());
    manifest_.files.push_back({path, file.complete()});
  }
  void change_byte(const std::string& path, size_t at) {
    auto bytes = read_bytes(folder_ / path);
    bytes[at] = static_cast<char>(bytes[at] ^ 1);
    write_bytes(folder_ / path, bytes);
  }
  void verify(bool checksums = true) const {
    hsdp::verify_files(kWhere, folder_.path(), hsdp::read_manifest(kWhere, folder_.path()), checksums);
  }
  void refused(const std::string& part, bool checksums = true) const {
    expect_error<ValueError>([&] { verify(checksums); }, "[test] ", part);
  }

  ScratchFolder folder_;
  Manifest manifest_;
};

TEST_F(CheckpointFiles, AreAsTheManifestSays) {
  EXPECT_EQ(read_bytes(folder_ / "manifest.json"), hsdp::to_json(manifest_));
  for (const bool checksums : {false, true}) {
    verify(checksums);
    // However the folder is named.
    hsdp::verify_files(kWhere, folder_.path() + "/", manifest_, checksums);
    hsdp::verify_files(kWhere, folder_ / "optimizer/..", manifest_, checksums);
    const auto before = std::filesystem::current_path();
    std::filesystem::current_path(folder_.path());
    hsdp::verify_files(kWhere, ".", hsdp::read_manifest(kWhere, "."), checksums);
    std::filesystem::current_path(before);
  }
}

TEST_F(CheckpointFiles, HaveEveryByteChecked) {
  const std::string large = folder_ / "large";
  for (const auto& [at, range] : std::vector<std::pair<size_t, std::string>>{
           {0, "0 to 1048576"},
           {kChecksumBlock - 1, "0 to 1048576"},
           {kChecksumBlock, "1048576 to 2097152"},
           {2 * kChecksumBlock, "2097152 to 2621440"},
           {2 * kChecksumBlock + kChecksumBlock / 2 - 1, "2097152 to 2621440"}}) {
    change_byte("large", at);
    verify(false);
    const auto sum = manifest_.files[0].written.block_checksums[at / kChecksumBlock];
    expect_error<ValueError>([&] { verify(); }, "[test] bytes " + range + " of " + large + " have checksum ",
                             "expected " + hsdp::to_hex(sum) + " as in manifest.json; the file is damaged");
    change_byte("large", at);
  }
  verify();
  change_byte("optimizer/one", 0);
  const std::string zero = "0";
  refused("bytes 0 to 1 of " + (folder_ / "optimizer/one") + " have checksum " +
          hsdp::to_hex(hsdp::checksum(zero.data(), 1)) + ", expected " + hsdp::to_hex(hsdp::checksum("1", 1)));
}

// Blocks alone do not say that the whole is what was written.
TEST_F(CheckpointFiles, HaveAChecksumOfTheWhole) {
  manifest_.files[0].written.checksum ^= 1;
  hsdp::write_manifest(kWhere, folder_.path(), manifest_);
  verify(false);
  refused("bytes 0 to 2621440 of " + (folder_ / "large") + " have checksum ");
}

TEST_F(CheckpointFiles, HaveTheirSizes) {
  for (const bool checksums : {false, true}) {
    std::filesystem::resize_file(folder_ / "large", 2621439);
    refused((folder_ / "large") + " has 2621439 bytes, expected 2621440 as in manifest.json", checksums);
    write_bytes(folder_ / "large", std::string(2621440, 'l'));
    write_bytes(folder_ / "optimizer/deep/empty", "x");
    refused((folder_ / "optimizer/deep/empty") + " has 1 bytes, expected 0 as in manifest.json", checksums);
    write_bytes(folder_ / "optimizer/deep/empty", "");
    verify(checksums);
  }
}

TEST_F(CheckpointFiles, AreAllThere) {
  for (const bool checksums : {false, true}) {
    std::filesystem::rename(folder_ / "optimizer/one", folder_ / "optimizer/two");
    refused((folder_ / "optimizer/one") + " cannot be opened: No such file or directory", checksums);
    std::filesystem::create_directory(folder_ / "optimizer/one");
    refused((folder_ / "optimizer/one") + " is a folder", checksums);
    std::filesystem::remove(folder_ / "optimizer/one");
    std::filesystem::rename(folder_ / "optimizer/two", folder_ / "optimizer/one");
  }
}

TEST_F(CheckpointFiles, AreNotMore) {
  const auto more = [&](const std::string& path) {
    refused((folder_ / path) + " is not in manifest.json, expected no other .safetensors files", false);
    std::filesystem::remove(folder_ / path);
    verify(false);
  };
  for (const auto* path : {"more.safetensors", "optimizer/deep/more.safetensors"}) {
    std::filesystem::create_directories(std::filesystem::path(folder_ / path).parent_path());
    write_bytes(folder_ / path, "");
    more(path);
  }
  std::filesystem::create_directory_symlink("/", folder_ / "link.safetensors");
  more("link.safetensors");
  // Other readers pass over what is no such file, and some want more of them beside the model.
  write_bytes(folder_ / "config.json", "{}");
  verify(false);
  std::filesystem::create_directory(folder_ / "folder");
  verify(false);
}

// ---- folders ----

TEST_F(CheckpointFiles, NeedAManifest) {
  const auto refused_at = [](const std::string& path, const std::string& part) {
    expect_error<ValueError>([&] { hsdp::read_manifest(kWhere, path); }, "[test] " + path + part);
  };
  refused_at(folder_ / "none", " does not exist, expected the folder of a checkpoint");
  refused_at("", " does not exist");
  refused_at(folder_ / "large", " is a file, expected the folder of a checkpoint");
  refused_at(folder_ / "large/x", " does not exist");
  refused_at(folder_ / std::string(300, 'n'), " cannot be read: File name too long");
  refused_at(folder_ / "optimizer", " has no manifest.json, expected a complete checkpoint");
  std::filesystem::create_directory(folder_ / "optimizer/manifest.json");
  refused_at(folder_ / "optimizer", "/manifest.json is a folder");
  write_bytes(folder_ / "optimizer/deep/manifest.json", "{}");
  refused_at(folder_ / "optimizer/deep", "/manifest.json is not a manifest: its format is missing");
}

}  // namespace manifest_test
