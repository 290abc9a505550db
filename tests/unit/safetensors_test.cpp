// Headers of safetensors files: written as the format says, and everything refused that it forbids.
#include "hsdp/checkpoint/safetensors.h"

#include <c10/util/ArrayRef.h>
#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "dtensor/error.h"
#include "tests/testing/expect.h"
#include "tests/testing/scratch_folder.h"

namespace safetensors_test {

using namespace testing_support;
using c10::ScalarType;
using dtensor::NotSupportedError;
using dtensor::ValueError;
using hsdp::layout_safetensors;
using hsdp::SafetensorsEntry;
using hsdp::SafetensorsHeader;

constexpr auto kWhere = "test";

std::string length_of(uint64_t length) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(length >> (8 * i) & 0xff);
  return bytes;
}

/// A file of this header and that many bytes of values.
std::string file_of(const std::string& header, size_t values = 0) {
  return length_of(header.size()) + header + std::string(values, '\7');
}

SafetensorsHeader read(const ScratchFolder& folder, const std::string& bytes) {
  const auto path = folder / "x.safetensors";
  write_bytes(path, bytes);
  return hsdp::read_safetensors_header(kWhere, hsdp::ReadableFile(kWhere, path));
}

std::string to_string(const std::vector<SafetensorsEntry>& entries) {
  std::string text;
  for (const auto& entry : entries) {
    text += c10::str(entry.name, " ", entry.dtype, " ", c10::IntArrayRef(entry.sizes), " at ",
                     c10::IntArrayRef(entry.offsets), " in ", entry.begin, "-", entry.end, "\n");
  }
  return text;
}

SafetensorsEntry entry_of(const std::string& name, ScalarType dtype, std::vector<int64_t> sizes,
                          std::optional<std::vector<int64_t>> offsets = std::nullopt) {
  auto places = offsets.value_or(std::vector<int64_t>(sizes.size(), 0));
  return {name, dtype, std::move(sizes), std::move(places)};
}

// ---- writing ----

TEST(SafetensorsLayout, IsThatOfTheFormat) {
  std::vector<SafetensorsEntry> entries{
      entry_of("bytes", ScalarType::Byte, {3}),   entry_of("b.weight", ScalarType::Float, {2, 3}),
      entry_of("half", ScalarType::Half, {5}),    entry_of("a.weight", ScalarType::Int, {1}),
      entry_of("count", ScalarType::Long, {}),    entry_of("empty", ScalarType::Double, {0, 4}),
      entry_of("mask", ScalarType::Bool, {2, 1}),
  };
  const std::string header = R"({"__metadata__":{"format":"pt"},)"
                             R"("count":{"dtype":"I64","shape":[],"data_offsets":[0,8]},)"
                             R"("empty":{"dtype":"F64","shape":[0,4],"data_offsets":[8,8]},)"
                             R"("a.weight":{"dtype":"I32","shape":[1],"data_offsets":[8,12]},)"
                             R"("b.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[12,36]},)"
                             R"("half":{"dtype":"F16","shape":[5],"data_offsets":[36,46]},)"
                             R"("bytes":{"dtype":"U8","shape":[3],"data_offsets":[46,49]},)"
                             R"("mask":{"dtype":"BOOL","shape":[2,1],"data_offsets":[49,51]}})";
  const auto spaces = (8 - header.size() % 8) % 8;
  EXPECT_EQ(layout_safetensors(kWhere, entries, false),
            length_of(header.size() + spaces) + header + std::string(spaces, ' '));
  const auto begin = 8 + header.size() + spaces;
  EXPECT_EQ(begin % 8, 0u);
  std::vector<std::string> names;
  for (const auto& entry : entries) names.push_back(entry.name);
  EXPECT_EQ(names, (std::vector<std::string>{"count", "empty", "a.weight", "b.weight", "half", "bytes", "mask"}));
  EXPECT_EQ(entries[0].begin, begin);
  EXPECT_EQ(entries[3].begin, begin + 12);
  EXPECT_EQ(entries[3].end, begin + 36);
  EXPECT_EQ(entries[6].end, begin + 51);
}

TEST(SafetensorsLayout, HasSavedOffsetsWhenSharded) {
  std::vector<SafetensorsEntry> entries{entry_of("w", ScalarType::Float, {2, 3}, {{4, 0}}),
                                        entry_of("s", ScalarType::BFloat16, {}, {{}})};
  const auto text = layout_safetensors(kWhere, entries, true, {{"rank", "3"}});
  EXPECT_EQ(text.substr(8, text.find_last_of('}') - 7),
            R"({"__metadata__":{"DCP_SHARDING_INFO":"{\"w\":{\"saved_offsets\":[4,0]},\"s\":{\"saved_offsets\":[]}}",)"
            R"("DCP_VERSION":"1.0","format":"pt","rank":"3"},)"
            R"("w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
            R"("s":{"dtype":"BF16","shape":[],"data_offsets":[24,26]}})");
}

TEST(SafetensorsLayout, OfNothing) {
  std::vector<SafetensorsEntry> entries;
  const ScratchFolder folder;
  for (const bool sharded : {false, true}) {
    const auto bytes = layout_safetensors(kWhere, entries, sharded);
    EXPECT_EQ(bytes.size() % 8, 0u);
    const auto header = read(folder, bytes);
    EXPECT_TRUE(header.entries.empty());
    EXPECT_EQ(header.sharded, sharded);
  }
}

TEST(SafetensorsLayout, RefusesWhatCannotBeStored) {
  const auto refused = [](auto error, std::vector<SafetensorsEntry> entries, const auto&... parts) {
    const auto before = to_string(entries);
    expect_error<decltype(error)>([&] { layout_safetensors(kWhere, entries, true); }, "[test] ", parts...);
    EXPECT_EQ(to_string(entries), before);
  };
  const auto good = entry_of("good", ScalarType::Byte, {3});
  const ValueError value("");
  refused(NotSupportedError(""), {good, entry_of("z", ScalarType::ComplexDouble, {1})},
          "tensor \"z\" is ComplexDouble, expected one of F64, ");
  refused(value, {good, entry_of("a", ScalarType::Float, {1}), entry_of("a", ScalarType::Byte, {1})},
          "name \"a\" is taken");
  refused(value, {good, entry_of("__metadata__", ScalarType::Float, {1})}, "name \"__metadata__\" is taken");
  refused(value, {good, entry_of("\xff", ScalarType::Float, {1})}, "name \"\xef\xbf\xbd\" cannot be stored");
  refused(value, {good, entry_of("a", ScalarType::Float, {1, -2})}, "tensor \"a\" has shape [1, -2] of F32");
  refused(value, {good, entry_of("a", ScalarType::Float, {int64_t{1} << 31, int64_t{1} << 30})},
          "tensor \"a\" has shape [2147483648, 1073741824] of F32");
  refused(
      value,
      {good, entry_of("a", ScalarType::Byte, {int64_t{1} << 62}), entry_of("b", ScalarType::Byte, {int64_t{1} << 62})},
      "tensor \"b\" has shape [4611686018427387904] of U8");
  std::vector<SafetensorsEntry> entries{good};
  expect_error<ValueError>(
      [&] {
        layout_safetensors(kWhere, entries, false, {{"text", std::string(100'000'000, 'x')}});
      },
      "the header of 1 tensors has 1000001", "expected at most 100000000");
  expect_error<ValueError>([&] { layout_safetensors(kWhere, entries, false, {{"\xc0", "text"}}); }, "expected UTF-8");
}

// ---- dtypes ----

struct DtypeName {
  ScalarType dtype;
  const char* name;
  uint64_t bytes;
};
std::ostream& operator<<(std::ostream& out, const DtypeName& dtype) { return out << dtype.name; }

class SafetensorsDtypes : public ::testing::TestWithParam<DtypeName> {};

TEST_P(SafetensorsDtypes, HaveTheirNames) {
  const auto& [dtype, name, bytes] = GetParam();
  EXPECT_STREQ(hsdp::safetensors_name(dtype), name);
  EXPECT_EQ(hsdp::safetensors_dtype(name), dtype);
  EXPECT_EQ(hsdp::tensor_bytes({3, 5}, dtype), 15 * bytes);
}

TEST_P(SafetensorsDtypes, ComeBackFromAFile) {
  const auto dtype = GetParam().dtype;
  const ScratchFolder folder;
  for (const bool sharded : {false, true}) {
    std::vector<SafetensorsEntry> entries{entry_of("whole", dtype, {2, 3}), entry_of("scalar", dtype, {}),
                                          entry_of("empty", dtype, {3, 0, 2}),
                                          entry_of("others", ScalarType::Byte, {7}),
                                          entry_of("ends \"of\"\n\xc3\xa9 \xf0\x9f\x8d\x8e", ScalarType::Long, {1})};
    if (sharded) entries[0].offsets = {4, 1'000'000'000'000};
    const auto first = layout_safetensors(kWhere, entries, sharded, {{"key", "value"}});
    const auto header = read(folder, first + std::string(entries.back().end - first.size(), '\3'));
    EXPECT_EQ(to_string(header.entries), to_string(entries));
    EXPECT_EQ(header.sharded, sharded);
    std::map<std::string, std::string> metadata{{"format", "pt"}, {"key", "value"}};
    if (sharded) metadata["DCP_VERSION"] = "1.0";
    EXPECT_EQ(header.metadata, metadata);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, SafetensorsDtypes,
    ::testing::Values(DtypeName{ScalarType::Double, "F64", 8}, DtypeName{ScalarType::Float, "F32", 4},
                      DtypeName{ScalarType::Half, "F16", 2}, DtypeName{ScalarType::BFloat16, "BF16", 2},
                      DtypeName{ScalarType::Long, "I64", 8}, DtypeName{ScalarType::Int, "I32", 4},
                      DtypeName{ScalarType::Short, "I16", 2}, DtypeName{ScalarType::Char, "I8", 1},
                      DtypeName{ScalarType::Byte, "U8", 1}, DtypeName{ScalarType::Bool, "BOOL", 1},
                      DtypeName{ScalarType::UInt16, "U16", 2}, DtypeName{ScalarType::UInt32, "U32", 4},
                      DtypeName{ScalarType::UInt64, "U64", 8}, DtypeName{ScalarType::Float8_e4m3fn, "F8_E4M3", 1},
                      DtypeName{ScalarType::Float8_e5m2, "F8_E5M2", 1}, DtypeName{ScalarType::ComplexFloat, "C64", 8}),
    [](const auto& which) { return which.param.name; });

TEST(SafetensorsDtype, OfOthersHasNoName) {
  EXPECT_EQ(hsdp::safetensors_name(ScalarType::ComplexDouble), nullptr);
  EXPECT_EQ(hsdp::safetensors_name(ScalarType::QInt8), nullptr);
  EXPECT_EQ(hsdp::safetensors_dtype("F4"), std::nullopt);
  EXPECT_EQ(hsdp::safetensors_dtype(""), std::nullopt);
}

TEST(TensorBytes, NeverOverflow) {
  constexpr auto kMost = std::numeric_limits<int64_t>::max();
  using hsdp::tensor_bytes;
  EXPECT_EQ(tensor_bytes({}, ScalarType::Float), 4u);
  EXPECT_EQ(tensor_bytes({0}, ScalarType::Float), 0u);
  EXPECT_EQ(tensor_bytes({kMost}, ScalarType::Byte), uint64_t{kMost});
  EXPECT_EQ(tensor_bytes({kMost}, ScalarType::Half), std::nullopt);
  EXPECT_EQ(tensor_bytes({0, kMost}, ScalarType::Byte), 0u);
  EXPECT_EQ(tensor_bytes({kMost, 0, 2}, ScalarType::Byte), std::nullopt);
  EXPECT_EQ(tensor_bytes({-1}, ScalarType::Byte), std::nullopt);
  EXPECT_EQ(tensor_bytes({0, -1}, ScalarType::Byte), std::nullopt);
  EXPECT_EQ(tensor_bytes({-1, -1}, ScalarType::Byte), std::nullopt);
}

// ---- reading ----

// As other programs may write it: any order of keys and entries, spaces and lines, escapes, no metadata.
TEST(SafetensorsHeaderTest, IsReadHoweverItIsWritten) {
  const ScratchFolder folder;
  const std::string text =
      "{\n \"late\" : {\"data_offsets\":[12, 12], \"shape\":[ 2,0 ],\t\"dtype\":\"F64\"},\r\n"
      R"("b\u00e9\n\ud83c\udf4e": {"dtype":"U8","shape":[],"data_offsets":[8,9]},)"
      R"("\/a\"": {"dtype":"I32","shape":[1,2],"data_offsets":[0,8]},)"
      R"("": {"dtype":"I8","shape":[1,3,1],"data_offsets":[9,12]},)"
      R"("empty": {"dtype":"F16","shape":[0],"data_offsets":[0,0]}})"
      "   \n ";
  const auto header = read(folder, file_of(text, 12));
  const auto begin = 8 + text.size();
  std::vector<SafetensorsEntry> expected{
      entry_of("empty", ScalarType::Half, {0}), entry_of("/a\"", ScalarType::Int, {1, 2}),
      entry_of("b\xc3\xa9\n\xf0\x9f\x8d\x8e", ScalarType::Byte, {}), entry_of("", ScalarType::Char, {1, 3, 1}),
      entry_of("late", ScalarType::Double, {2, 0})};
  const std::vector<std::pair<uint64_t, uint64_t>> ranges{{0, 0}, {0, 8}, {8, 9}, {9, 12}, {12, 12}};
  for (size_t i = 0; i < ranges.size(); ++i) {
    expected[i].begin = begin + ranges[i].first;
    expected[i].end = begin + ranges[i].second;
  }
  EXPECT_EQ(to_string(header.entries), to_string(expected));
  EXPECT_FALSE(header.sharded);
  EXPECT_TRUE(header.metadata.empty());
}

TEST(SafetensorsHeaderTest, OfNothing) {
  const ScratchFolder folder;
  EXPECT_TRUE(read(folder, file_of("{}")).entries.empty());
  const auto header = read(folder, file_of(R"({"__metadata__":{}})"));
  EXPECT_TRUE(header.entries.empty());
  EXPECT_FALSE(header.sharded);
}

TEST(SafetensorsHeaderTest, MayHaveManyEntriesAndDims) {
  const ScratchFolder folder;
  std::string text = "{";
  for (int i = 0; i < 20000; ++i) {
    text += c10::str("\"t", i, "\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[", i, ",", i + 1, "]},");
  }
  text += R"("dims":{"dtype":"U8","shape":[)";
  for (int i = 0; i < 1000; ++i) text += "1,";
  text += R"(1],"data_offsets":[20000,20001]}})";
  const auto header = read(folder, file_of(text, 20001));
  ASSERT_EQ(header.entries.size(), 20001u);
  EXPECT_EQ(header.entries[12345].name, "t12345");
  EXPECT_EQ(header.entries[20000].sizes, std::vector<int64_t>(1001, 1));
}

TEST(SafetensorsHeaderTest, HasTheLargestOffsetsThereAre) {
  const ScratchFolder folder;
  const std::string info = R"({\"w\":{\"saved_offsets\":[9223372036854775804,0]}})";
  const auto header = read(folder, file_of(R"({"__metadata__":{"DCP_SHARDING_INFO":")" + info +
                                               R"("},"w":{"dtype":"U8","shape":[3,1],"data_offsets":[0,3]}})",
                                           3));
  EXPECT_TRUE(header.sharded);
  EXPECT_EQ(header.entries.at(0).offsets, (std::vector<int64_t>{9223372036854775804, 0}));
}

// ---- refused ----

/// A file that is not as the format says, and what the message says of it.
struct Malformed {
  const char* name;
  std::string bytes;
  std::vector<std::string> parts;
};
std::ostream& operator<<(std::ostream& out, const Malformed& file) { return out << file.name; }

class MalformedSafetensors : public ::testing::TestWithParam<Malformed> {};

TEST_P(MalformedSafetensors, IsRefused) {
  const ScratchFolder folder;
  const auto& [name, bytes, parts] = GetParam();
  const auto path = folder / "x.safetensors";
  expect_error<ValueError>([&] { read(folder, bytes); }, "[test] " + path + ": ");
  for (const auto& part : parts) {
    expect_error<ValueError>([&] { read(folder, bytes); }, part);
  }
}

/// A file with one tensor "w" of 8 bytes.
std::string tensor(const std::string& fields, size_t values = 8) { return file_of("{\"w\":{" + fields + "}}", values); }
std::string with_dtype(const std::string& dtype) {
  return tensor("\"dtype\":" + dtype + R"(,"shape":[2],"data_offsets":[0,8])");
}
std::string with_shape(const std::string& shape) {
  return tensor("\"shape\":" + shape + R"(,"dtype":"F32","data_offsets":[0,8])");
}
std::string with_range(const std::string& range, size_t values = 8) {
  return tensor(R"("dtype":"F32","shape":[2],"data_offsets":)" + range, values);
}
/// A file with bytes "a" and "b" at these places.
std::string with_ranges(const std::string& a, const std::string& b, size_t values) {
  return file_of(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)" + a +
                     R"(},"b":{"dtype":"U8","shape":[2],"data_offsets":)" + b + "}}",
                 values);
}
const std::string kW = R"("w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
std::string with_metadata(const std::string& metadata) {
  return file_of("{\"__metadata__\":" + metadata + "," + kW + "}", 8);
}
std::string repeated(const std::string& text, int times) {
  std::string result;
  for (int i = 0; i < times; ++i) result += text;
  return result;
}
/// The info with ' for ".
std::string with_info(std::string info) {
  std::string escaped;
  for (const char character : info) escaped += character == '\'' ? std::string("\\\"") : std::string(1, character);
  return with_metadata("{\"DCP_SHARDING_INFO\":\"" + escaped + "\"}");
}

const std::vector<Malformed> kFiles{
    {"Empty", "", {"has 0 bytes, expected a safetensors file"}},
    {"SevenBytes", std::string(7, '\0'), {"has 7 bytes, expected a safetensors file"}},
    {"LengthAlone", length_of(2), {"has a header of 2 bytes in a file of 8, expected it to end in the file"}},
    {"HeaderBeyondTheFile", length_of(3) + "{}", {"has a header of 3 bytes in a file of 10"}},
    {"LengthOverTheLimit", length_of(100'000'001) + "{}", {"a header of 100000001 bytes, expected at most 100000000"}},
    {"LengthOfAllBits", length_of(~uint64_t{0}) + "{}", {"a header of 18446744073709551615 bytes, expected at most"}},
    {"LengthInOtherByteOrder", std::string(7, '\0') + "\2{}", {"144115188075855872"}},
    {"LengthZero", length_of(0), {"header begins with \"\", expected \"{\""}},
    {"LengthTooSmall", length_of(10) + "{" + kW + "}", {"header is no JSON at byte 1"}},
    {"ArchiveOfTorch",
     std::string("PK\3\4\0\0\10\10\0\0", 10),
     {"578712552184433488 bytes", "it is no safetensors file"}},
};
const std::vector<Malformed> kTexts{
    {"SpaceFirst", file_of(" {}"), {"header begins with \" \", expected \"{\""}},
    {"ByteOrderMark", file_of("\xef\xbb\xbf{}"), {"header begins with \"\xef\xbf\xbd\""}},
    {"List", file_of("[]"), {"header begins with \"[\""}},
    {"Null", file_of("null"), {"header begins with \"n\""}},
    {"ZeroByte", file_of(std::string("{}\0x", 4)), {"header is no JSON at byte 2: a zero byte"}},
    {"ZeroByteInAName", file_of(std::string("{\"a\0\":1}", 8)), {"header is no JSON at byte 3: a zero byte"}},
    {"MoreAfterwards", file_of("{} x"), {"header is no JSON at byte 4"}},
    {"TwoObjects", file_of("{}{}"), {"header is no JSON at byte 3"}},
    {"Comment", file_of("{}/**/"), {"header is no JSON at byte 3"}},
    {"NotClosed", file_of("{" + kW, 8), {"header is no JSON at byte"}},
    {"CommaAtTheEnd", file_of("{" + kW + ",}", 8), {"header is no JSON at byte"}},
    {"NoColon", file_of("{\"w\" {}}"), {"header is no JSON at byte"}},
    {"NameWithoutQuotes", file_of("{w:{}}"), {"header is no JSON at byte 2"}},
    {"SingleQuotes", file_of("{'w':{}}"), {"header is no JSON at byte 2"}},
    {"NotUtf8", file_of("{\"\xff\":{}}"), {"header is no JSON at byte", "UTF-8"}},
    {"HalfOfASurrogate", file_of(R"({"\ud83c":{}})"), {"header is no JSON at byte", "surrogate"}},
    {"LineInAName", file_of("{\"a\nb\":{}}"), {"header is no JSON at byte", "control character"}},
    {"Unfinished", file_of("{\"" + std::string(100000, 'x')), {"header is no JSON at byte", "closing quote"}},
    {"NotANumber", with_shape("[NaN]"), {"header is no JSON at byte"}},
    {"LeadingZero", with_shape("[02]"), {"header is no JSON at byte"}},
    {"PlusSign", with_shape("[+2]"), {"header is no JSON at byte"}},
    {"NumberBeyondAll", with_shape("[1e999]"), {"header is no JSON at byte", "1e999"}},
    {"DeepInTheRoot", file_of("{\"w\":" + std::string(1'000'000, '[')), {"tensor \"w\" is a list, expected an object"}},
    {"DeepInAShape", with_shape(std::string(1'000'000, '[')), {"tensor \"w\" has a list in \"shape\""}},
    {"DeepObjects", file_of("{\"a\":{\"b\":{\"c\":{}}}}"), {"tensor \"a\" has an object as \"b\""}},
};
const std::vector<Malformed> kEntries{
    {"TensorIsNull", file_of(R"({"w":null})"), {"tensor \"w\" is null, expected an object"}},
    {"TensorIsTrue", file_of(R"({"w":true})"), {"tensor \"w\" is true, expected an object"}},
    {"TensorIsNumber", file_of(R"({"w":7})"), {"tensor \"w\" is the number 7, expected an object"}},
    {"TensorIsText", file_of(R"({"w":"F32"})"), {"tensor \"w\" is the text \"F32\", expected an object"}},
    {"TensorIsList", file_of(R"({"w":[]})"), {"tensor \"w\" is a list, expected an object"}},
    {"TensorIsEmpty", file_of(R"({"w":{}})"), {"tensor \"w\" lacks dtype"}},
    {"NameTwice", file_of("{" + kW + "," + kW + "}", 8), {"header has tensor \"w\" twice"}},
    {"NameTwiceEscaped", file_of("{" + kW + R"(,"\u0077":{}})", 8), {"header has tensor \"w\" twice"}},
    {"LongName", file_of("{\"" + std::string(1000, 'n') + "\":1}"), {std::string(200, 'n') + "\"... is the number 1"}},
    {"FieldTwice", tensor(R"("dtype":"F32","dtype":"F32")"), {"tensor \"w\" has \"dtype\" twice"}},
    {"FieldUnknown",
     tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,8],"strides":[1])"),
     {"tensor \"w\" has \"strides\", expected nothing but dtype, shape, data_offsets"}},
    {"LacksShape", tensor(R"("dtype":"F32","data_offsets":[0,8])"), {"tensor \"w\" lacks shape"}},
    {"LacksRange", tensor(R"("dtype":"F32","shape":[2])"), {"tensor \"w\" lacks data_offsets"}},
    {"DtypeUnknown", with_dtype("\"F31\""), {"tensor \"w\" has dtype \"F31\", expected one of F64, F32, F16, BF16"}},
    {"DtypeInLowerCase", with_dtype("\"f32\""), {"tensor \"w\" has dtype \"f32\""}},
    {"DtypeEmpty", with_dtype("\"\""), {"tensor \"w\" has dtype \"\""}},
    {"DtypeOfFourBits", with_dtype("\"F4\""), {"tensor \"w\" has dtype \"F4\""}},
    {"DtypeIsNumber", with_dtype("32"), {"tensor \"w\" has the number 32 as \"dtype\""}},
    {"DtypeIsNull", with_dtype("null"), {"tensor \"w\" has null as \"dtype\""}},
    {"DtypeIsList", with_dtype("[32]"), {"tensor \"w\" has a list as dtype, expected a text"}},
    {"ShapeIsNumber", with_shape("2"), {"tensor \"w\" has the number 2 as \"shape\""}},
    {"ShapeIsText", with_shape("\"2\""), {"tensor \"w\" has a text as shape, expected a list of whole numbers"}},
    {"ShapeIsNull", with_shape("null"), {"tensor \"w\" has null as \"shape\""}},
    {"ShapeIsObject", with_shape("{}"), {"tensor \"w\" has an object as \"shape\""}},
    {"ShapeIsTrue", with_shape("true"), {"tensor \"w\" has true as \"shape\""}},
    {"SizeNegative", with_shape("[-2]"), {"tensor \"w\" has the negative number -2 in \"shape\""}},
    {"SizeNegativeZero", with_shape("[-0]"), {"tensor \"w\" has the negative number 0 in \"shape\""}},
    {"SizeFloat", with_shape("[2.0]"), {"tensor \"w\" has the number 2.0 in \"shape\", expected whole numbers"}},
    {"SizeExponent", with_shape("[2e0]"), {"tensor \"w\" has the number 2e0 in \"shape\""}},
    {"SizeOverInt64", with_shape("[9223372036854775808]"), {"the number 9223372036854775808 in \"shape\""}},
    {"SizeOverUint64", with_shape("[18446744073709551618]"), {"the number 18446744073709551618 in \"shape\""}},
    {"SizeIsText", with_shape("[\"2\"]"), {"tensor \"w\" has the text \"2\" in \"shape\""}},
    {"SizeIsNull", with_shape("[null]"), {"tensor \"w\" has null in \"shape\""}},
    {"SizeIsObject", with_shape("[{}]"), {"tensor \"w\" has an object in \"shape\""}},
    {"SizesOverflow", with_shape("[4294967296,2147483648,2]"), {"tensor \"w\" has shape [4294967296, 2147483648, 2]"}},
    {"SizesOverflowToTwo", with_shape("[9223372036854775807,4]"), {"shape [9223372036854775807, 4] of F32"}},
    {"SizesOverflowBesideZero", with_shape("[4294967296,4294967296,0]"), {"shape [4294967296, 4294967296, 0] of F32"}},
};
const std::vector<Malformed> kRanges{
    {"RangeIsEmpty", with_range("[]"), {"tensor \"w\" has data_offsets [], expected its beginning and its end"}},
    {"RangeOfOne", with_range("[8]"), {"tensor \"w\" has data_offsets [8]"}},
    {"RangeOfThree", with_range("[0,8,8]"), {"tensor \"w\" has data_offsets [0, 8, 8]"}},
    {"RangeOfMany", with_range("[0,8" + repeated(",1", 40) + "]"), {"1, 1, ...], expected its beginning"}},
    {"RangeReversed", with_range("[8,0]"), {"tensor \"w\" has data_offsets [8, 0]"}},
    {"RangeIsText", with_range("\"0,8\""), {"tensor \"w\" has a text as data_offsets"}},
    {"RangeNegative", with_range("[-8,0]"), {"tensor \"w\" has the negative number -8 in \"data_offsets\""}},
    {"RangeFloat", with_range("[0,8.5]"), {"tensor \"w\" has the number 8.5 in \"data_offsets\""}},
    {"RangeHuge", with_range("[0,9223372036854775807]"), {"expected 8 bytes for shape [2] of F32"}},
    {"RangeShort", with_range("[0,4]", 4), {"has data_offsets [0, 4], expected 8 bytes for shape [2] of F32"}},
    {"RangeLong", with_range("[0,12]", 12), {"has data_offsets [0, 12], expected 8 bytes for shape [2] of F32"}},
    {"RangeBeyondTheFile",
     with_range("[9223372036854775799,9223372036854775807]"),
     {"tensor \"w\" begins at byte 9223372036854775799 of the values, expected 0, the first; there is a hole"}},
    {"HoleAtTheBeginning",
     with_range("[1,9]", 9),
     {"tensor \"w\" begins at byte 1 of the values, expected 0, the first"}},
    {"Hole",
     with_ranges("[0,4]", "[5,7]", 7),
     {"tensor \"b\" begins at byte 5", "expected 4, where tensor \"a\" ends", "there is a hole"}},
    {"Overlap",
     with_ranges("[0,4]", "[3,5]", 5),
     {"tensor \"b\" begins at byte 3", "expected 4, where tensor \"a\" ends", "they overlap"}},
    {"OverlapWithin", with_ranges("[0,4]", "[1,3]", 4), {"tensor \"b\" begins at byte 1", "they overlap"}},
    {"OverlapOfTheSame",
     with_ranges("[0,4]", "[0,2]", 4),
     {"tensor \"a\" begins at byte 0 of the values, expected 2", "they overlap"}},
    {"EmptyWithin",
     file_of(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
             R"("e":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}})",
             4),
     {"tensor \"e\" begins at byte 2 of the values, expected 4, where tensor \"a\" ends; they overlap"}},
    {"EmptyBeyond",
     file_of(R"({"e":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}})", 2),
     {"tensor \"e\" begins at byte 2 of the values, expected 0"}},
    {"ValuesTruncated", with_range("[0,8]", 7), {"has 7 bytes of values, expected 8; it was truncated"}},
    {"ValuesMissing", with_range("[0,8]", 0), {"has 0 bytes of values, expected 8; it was truncated"}},
    {"ValuesBeyondTheLast", with_range("[0,8]", 9), {"has 9 bytes of values, expected 8; what follows the last one"}},
    {"ValuesOfNoTensor", file_of("{}", 1), {"has 1 bytes of values, expected 0; what follows"}},
};
const std::vector<Malformed> kMetadata{
    {"MetadataIsText", with_metadata("\"pt\""), {"__metadata__ is the text \"pt\", expected an object"}},
    {"MetadataIsNull", with_metadata("null"), {"__metadata__ is null, expected an object"}},
    {"MetadataTwice", file_of(R"({"__metadata__":{},"__metadata__":{}})"), {"header has __metadata__ twice"}},
    {"MetadataKeyTwice", with_metadata(R"({"a":"1","a":"1"})"), {"__metadata__ has \"a\" twice"}},
    {"MetadataNumber", with_metadata(R"({"step":7})"), {"__metadata__ has the number 7 as \"step\""}},
    {"MetadataObject", with_metadata(R"({"step":{}})"), {"__metadata__ has an object as \"step\""}},
    {"MetadataList", with_metadata(R"({"step":[7]})"), {"__metadata__ has a list as step, expected a text"}},
    {"InfoIsList", with_metadata(R"({"DCP_SHARDING_INFO":[]})"), {"__metadata__ has a list as DCP_SHARDING_INFO"}},
    {"InfoIsEmpty", with_info(""), {"DCP_SHARDING_INFO begins with \"\", expected \"{\""}},
    {"InfoIsNoJson", with_info("{'w'}"), {"DCP_SHARDING_INFO is no JSON at byte"}},
    {"InfoWithZeroByte", with_info("{'w\\u0000':1}"), {"DCP_SHARDING_INFO is no JSON at byte 3: a zero byte"}},
    {"InfoIsAListOfNames", with_info("['w']"), {"DCP_SHARDING_INFO begins with \"[\""}},
    {"InfoLacksATensor", with_info("{}"), {"DCP_SHARDING_INFO lacks tensor \"w\""}},
    {"InfoOfAnother",
     with_info("{'w':{'saved_offsets':[0]},'v':{'saved_offsets':[0]}}"),
     {"DCP_SHARDING_INFO has tensor \"v\", expected names of the header"}},
    {"InfoTwice",
     with_info("{'w':{'saved_offsets':[0]},'w':{'saved_offsets':[0]}}"),
     {"DCP_SHARDING_INFO has tensor \"w\" twice"}},
    {"InfoIsOffsets", with_info("{'w':[0]}"), {"DCP_SHARDING_INFO: tensor \"w\" is a list, expected an object"}},
    {"InfoLacksOffsets", with_info("{'w':{}}"), {"tensor \"w\" lacks saved_offsets"}},
    {"InfoWithMore",
     with_info("{'w':{'saved_offsets':[0],'size':[2]}}"),
     {"tensor \"w\" has \"size\", expected nothing but saved_offsets"}},
    {"OffsetsAreText", with_info("{'w':{'saved_offsets':'0'}}"), {"tensor \"w\" has a text as saved_offsets"}},
    {"OffsetsOfNoDim",
     with_info("{'w':{'saved_offsets':[]}}"),
     {"tensor \"w\" has saved_offsets [], expected one a dim of shape [2]"}},
    {"OffsetsOfTwoDims", with_info("{'w':{'saved_offsets':[0,0]}}"), {"tensor \"w\" has saved_offsets [0, 0]"}},
    {"OffsetNegative", with_info("{'w':{'saved_offsets':[-2]}}"), {"the negative number -2 in \"saved_offsets\""}},
    {"OffsetFloat", with_info("{'w':{'saved_offsets':[0.5]}}"), {"the number 0.5 in \"saved_offsets\""}},
    {"OffsetTooLarge",
     with_info("{'w':{'saved_offsets':[9223372036854775806]}}"),
     {"tensor \"w\" has saved_offsets [9223372036854775806], expected one a dim of shape [2], with a sum of at most"}},
};

std::string name_of(const ::testing::TestParamInfo<Malformed>& which) { return which.param.name; }
INSTANTIATE_TEST_SUITE_P(File, MalformedSafetensors, ::testing::ValuesIn(kFiles), name_of);
INSTANTIATE_TEST_SUITE_P(Text, MalformedSafetensors, ::testing::ValuesIn(kTexts), name_of);
INSTANTIATE_TEST_SUITE_P(Entry, MalformedSafetensors, ::testing::ValuesIn(kEntries), name_of);
INSTANTIATE_TEST_SUITE_P(Range, MalformedSafetensors, ::testing::ValuesIn(kRanges), name_of);
INSTANTIATE_TEST_SUITE_P(Metadata, MalformedSafetensors, ::testing::ValuesIn(kMetadata), name_of);

// A good file with its end missing, wherever it ends.
TEST(SafetensorsHeaderTest, IsRefusedWhereverTheFileEnds) {
  const ScratchFolder folder;
  std::vector<SafetensorsEntry> entries{entry_of("w", ScalarType::Float, {2}, {{2}})};
  const auto bytes = layout_safetensors(kWhere, entries, true) + std::string(8, '\1');
  EXPECT_EQ(read(folder, bytes).entries.size(), 1u);
  for (size_t end = 0; end < bytes.size(); ++end) {
    expect_error<ValueError>([&] { read(folder, bytes.substr(0, end)); },
                             "[test] " + (folder / "x.safetensors") + ": ");
  }
}

}  // namespace safetensors_test
