#include "hsdp/launch/error_file.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>

namespace error_file_test {

TEST(ErrorFile, IsTheJsonThatTorchrunReads) {
  const std::string path = ::testing::TempDir() + "hsdp_error_file_test.json";
  ASSERT_TRUE(hsdp::write_error_file(path, "ValueError", "[init] \"quoted\"\nand \xff"));
  std::ifstream file(path);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::remove(path.c_str());
  EXPECT_EQ(text.find(R"({"message":{"extraInfo":{"timestamp":")"), 0u) << text;
  EXPECT_NE(text.find(R"("message":"ValueError: [init] \"quoted\"\nand )"), std::string::npos) << text;
}

TEST(ErrorFile, AFileThatCannotBeWrittenIsReportedAndNothingMore) {
  EXPECT_FALSE(hsdp::write_error_file("/nonexistent-folder/file", "Type", "text"));
}

}  // namespace error_file_test
