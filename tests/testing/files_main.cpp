// The main function of a program that holds the tests of several files. It is called by a file's name, through a link,
// and runs that file's tests alone: in one process they would share what they change.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <functional>
#include <set>
#include <string>
#include <string_view>

namespace {

void for_each_test(const std::function<void(const testing::TestInfo&)>& visit) {
  const auto& all = *testing::UnitTest::GetInstance();
  for (int suite = 0; suite < all.total_test_suite_count(); ++suite) {
    const auto& tests = *all.GetTestSuite(suite);
    for (int test = 0; test < tests.total_test_count(); ++test) visit(*tests.GetTestInfo(test));
  }
}

constexpr std::string_view kEnding = "_test";

std::string file_of(const testing::TestInfo& test) { return std::filesystem::path(test.file()).stem(); }
std::string name_of(const testing::TestInfo& test) { return std::string(test.test_suite_name()) + "." + test.name(); }

}  // namespace

int main(int argc, char** argv) {
  const std::string called = std::filesystem::path(argv[0]).filename();
  testing::InitGoogleMock(&argc, argv);
  std::string filter;
  std::set<std::string> elsewhere, files;
  for_each_test([&](const auto& test) {
    if (file_of(test) == called) {
      filter += name_of(test) + ":";
    } else {
      elsewhere.insert(name_of(test));
      files.insert(file_of(test));
    }
  });
  if (filter.empty()) {
    std::fprintf(stderr, "[%s] it holds the tests of several files, expected to be called as one of:", called.c_str());
    for (const auto& file : files) std::fprintf(stderr, " %s", file.c_str());
    std::fprintf(stderr, "\n");
    return 2;
  }
  int misplaced = 0;
  for_each_test([&](const auto& test) {
    const bool has_file = file_of(test).size() > kEnding.size() && file_of(test).ends_with(kEnding);
    if (has_file && (file_of(test) != called || elsewhere.count(name_of(test)) == 0)) return;
    std::fprintf(stderr, "[%s] %s is %s, expected in one file *_test.cpp\n", called.c_str(), name_of(test).c_str(),
                 has_file ? "a test of another file as well" : "defined elsewhere");
    ++misplaced;
  });
  if (misplaced > 0) return 2;
  if (GTEST_FLAG_GET(filter) == "*") {
    GTEST_FLAG_SET(filter, filter);
  } else {
    // A pattern of the caller's could reach the other files' tests: their names are taken out.
    std::string wanted = GTEST_FLAG_GET(filter);
    wanted += wanted.find('-') == std::string::npos ? "-" : ":";
    for (const auto& name : elsewhere) wanted += name + ":";
    GTEST_FLAG_SET(filter, wanted);
  }
  return RUN_ALL_TESTS();
}
