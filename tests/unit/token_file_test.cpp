#include "apps/token_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "dtensor/error.h"

namespace apps {
namespace token_file_test {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

template <class Value>
std::string raw(const std::vector<Value>& values) {
  std::string bytes(values.size() * sizeof(Value), '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

std::string llmc_header(int32_t magic, int32_t version, int32_t tokens) {
  std::vector<int32_t> header(256, 0);
  header[0] = magic;
  header[1] = version;
  header[2] = tokens;
  return raw(header);
}

class TokenFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(::testing::TempDir()) / ("token_file_" + std::to_string(getpid()));
    std::filesystem::create_directories(folder_);
    path_ = (folder_ / "tokens.bin").string();
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  void write(const std::string& content) { std::ofstream(path_, std::ios::binary) << content; }

  std::vector<int64_t> tokens(TokenFormat format) {
    const TokenFile file(path_, format);
    std::vector<int64_t> result(size_t(file.size()));
    file.read(0, file.size(), result.data());
    return result;
  }

  /// The message of the refusal of path_, or of another path.
  std::string refusal(TokenFormat format, std::string path = "") {
    if (path.empty()) path = path_;
    try {
      const TokenFile file(path, format);
    } catch (const dtensor::ValueError& error) {
      EXPECT_THAT(error.what(), StartsWith("[data] " + path + ": "));
      return error.what();
    }
    ADD_FAILURE() << path << " was accepted";
    return "";
  }

  std::filesystem::path folder_;
  std::string path_;
};

TEST_F(TokenFileTest, BytesAreUnsigned) {
  write(std::string("\x00\x01\x7f\x80\xff", 5));
  EXPECT_THAT(tokens(TokenFormat::bytes), ElementsAre(0, 1, 127, 128, 255));
}

TEST_F(TokenFileTest, Uint16IsLittleEndian) {
  write(std::string("\x01\x02\xff\xff", 4));
  EXPECT_THAT(tokens(TokenFormat::uint16), ElementsAre(0x0201, 65535));
}

TEST_F(TokenFileTest, LlmcHasTwoWidths) {
  write(llmc_header(20240520, 1, 3) + raw<uint16_t>({5, 50256, 65535}));
  EXPECT_THAT(tokens(TokenFormat::llmc), ElementsAre(5, 50256, 65535));
  write(llmc_header(20240801, 7, 2) + raw<uint32_t>({128000, 4294967295}));
  EXPECT_THAT(tokens(TokenFormat::llmc), ElementsAre(128000, 4294967295));
}

TEST_F(TokenFileTest, ReadsARangeFromTheMiddle) {
  write("abcdefgh");
  const TokenFile file(path_, TokenFormat::bytes);
  std::vector<int64_t> out(3);
  file.read(5, 3, out.data());
  EXPECT_THAT(out, ElementsAre('f', 'g', 'h'));
}

TEST_F(TokenFileTest, ACopyKeepsTheMappingWhenTheFirstIsGone) {
  write("xyz");
  auto first = std::make_unique<TokenFile>(path_, TokenFormat::bytes);
  const TokenFile second = *first;
  first.reset();
  int64_t token = 0;
  second.read(2, 1, &token);
  EXPECT_EQ(token, 'z');
}

TEST_F(TokenFileTest, RefusesAMissingFileAndSaysWhereItLooked) {
  EXPECT_THAT(refusal(TokenFormat::bytes),
              AllOf(HasSubstr("No such file"), HasSubstr(std::filesystem::current_path().string())));
}

TEST_F(TokenFileTest, RefusesWhatIsNoRegularFile) {
  EXPECT_THAT(refusal(TokenFormat::bytes, folder_.string()), HasSubstr("is a folder"));
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  EXPECT_THAT(refusal(TokenFormat::bytes), HasSubstr("not a regular file"));
}

TEST_F(TokenFileTest, RefusesAnEmptyFileInEveryFormat) {
  write("");
  for (const auto format : {TokenFormat::bytes, TokenFormat::uint16, TokenFormat::llmc}) {
    EXPECT_THAT(refusal(format), HasSubstr("is empty"));
  }
}

TEST_F(TokenFileTest, RefusesAnOddNumberOfBytesAsUint16) {
  write("abc");
  EXPECT_THAT(refusal(TokenFormat::uint16), HasSubstr("has 3 bytes, expected a multiple of 2"));
}

TEST_F(TokenFileTest, RefusesMalformedLlmcFiles) {
  write(std::string(1023, '\0'));
  EXPECT_THAT(refusal(TokenFormat::llmc), HasSubstr("has 1023 bytes, expected a header of 1024"));
  write(llmc_header(20240522, 1, 1) + raw<uint16_t>({1}));
  EXPECT_THAT(refusal(TokenFormat::llmc), HasSubstr("magic 20240522 and version 1"));
  // Each magic belongs to one version.
  write(llmc_header(20240520, 7, 1) + raw<uint32_t>({1}));
  EXPECT_THAT(refusal(TokenFormat::llmc), HasSubstr("magic 20240520 and version 7"));
  write(llmc_header(20240520, 1, 0));
  EXPECT_THAT(refusal(TokenFormat::llmc), HasSubstr("no tokens"));
}

TEST_F(TokenFileTest, RefusesLlmcFilesOfAnotherSizeThanTheirHeaderSays) {
  const auto tokens = raw<uint16_t>({1, 2, 3});
  write(llmc_header(20240520, 1, 4) + tokens);
  EXPECT_THAT(refusal(TokenFormat::llmc), HasSubstr("has 1030 bytes and its header says 4 tokens, expected 1032"));
  write(llmc_header(20240520, 1, 3) + tokens + "x");
  EXPECT_THAT(refusal(TokenFormat::llmc), HasSubstr("has 1031 bytes and its header says 3 tokens, expected 1030"));
  // A count that a signed header would read as -1.
  write(llmc_header(20240520, 1, -1) + tokens);
  EXPECT_THAT(refusal(TokenFormat::llmc), HasSubstr("says 4294967295 tokens"));
}

}  // namespace token_file_test
}  // namespace apps
