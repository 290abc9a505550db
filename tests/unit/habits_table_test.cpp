// docs/habits.md and docs/unlike_ranks.md promise a test for each habit, docs/capabilities.md for each capability and
// tests/inventory.md for each case one or a reason why there is none: every row names one, and every name is a test's.
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <regex>
#include <string>

namespace habits_table_test {

std::string content_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string source_of(const std::string& test) {
  for (const char* folder : {"multi", "unit", "gpu"}) {
    const auto text = content_of(std::string(HSDP_SOURCE_DIR "/tests/") + folder + "/" + test + ".cpp");
    if (!text.empty()) return text;
  }
  return {};
}

void expect_tests_in_every_row(const std::string& page_name, const std::string& first_column, int least_rows) {
  std::ifstream page(HSDP_SOURCE_DIR "/" + page_name);
  ASSERT_TRUE(page) << page_name;
  const std::regex name("`([a-z0-9_]+_test)?(?:: )?(?:([A-Z]\\w*)\\.([A-Z]\\w*))?([A-Z]\\w*)?`");
  const std::regex reason("\\| none: [^|]{3,}\\|$");
  int rows = 0;
  for (std::string line; std::getline(page, line);) {
    if (line.rfind("| ", 0) != 0 || line.rfind("| " + first_column + " ", 0) == 0) continue;
    ++rows;
    const auto last_cell = line.substr(line.rfind('|', line.size() - 2));
    std::string file, source;
    int names = 0;
    for (std::sregex_iterator match(last_cell.begin(), last_cell.end(), name), end; match != end; ++match) {
      if ((*match)[1].matched) {
        file = (*match)[1];
        source = source_of(file);
        EXPECT_FALSE(source.empty()) << "no file " << file << ".cpp, named in: " << line;
      }
      if ((*match)[2].matched) {
        const auto test = (*match)[2].str() + ", " + (*match)[3].str() + ")";
        EXPECT_NE(source.find("(" + test), std::string::npos) << file << " has no test " << test << " of: " << line;
      }
      if ((*match)[4].matched) {
        EXPECT_NE(source.find((*match)[4]), std::string::npos)
            << file << " has no row " << (*match)[4] << " of: " << line;
      }
      ++names;
    }
    EXPECT_TRUE(names > 0 || std::regex_search(line, reason)) << "no test is named in: " << line;
  }
  EXPECT_GE(rows, least_rows);
}

TEST(HabitsTable, NamesAnExistingTestInEveryRow) { expect_tests_in_every_row("docs/habits.md", "Habit", 100); }

TEST(UnlikeRanksTable, NamesAnExistingTestInEveryRow) {
  expect_tests_in_every_row("docs/unlike_ranks.md", "Habit", 10);
}

TEST(Capabilities, NameAnExistingTestOrAReasonInEveryRow) {
  expect_tests_in_every_row("docs/capabilities.md", "FSDP2, HyperParallel", 90);
}

TEST(Inventory, NamesAnExistingTestOrAReasonInEveryRow) {
  expect_tests_in_every_row("tests/inventory.md", "Case", 150);
}

}  // namespace habits_table_test
