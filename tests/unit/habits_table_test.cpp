// docs/habits.md and docs/unlike_ranks.md promise a test for each habit: every row names one, and every name is a
// test's.
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <regex>
#include <string>

namespace {

std::string content_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string source_of(const std::string& test) {
  for (const char* folder : {"multi", "unit"}) {
    const auto text = content_of(std::string(HSDP_SOURCE_DIR "/tests/") + folder + "/" + test + ".cpp");
    if (!text.empty()) return text;
  }
  return {};
}

void expect_tests_in_every_row(const std::string& name_of_page, int least_rows) {
  std::ifstream page(HSDP_SOURCE_DIR "/docs/" + name_of_page);
  ASSERT_TRUE(page) << name_of_page;
  const std::regex name("`([a-z0-9_]+_test)?(?:: )?(?:([A-Z]\\w*)\\.([A-Z]\\w*))?([A-Z]\\w*)?`");
  int rows = 0;
  for (std::string line; std::getline(page, line);) {
    if (line.rfind("| ", 0) != 0 || line.rfind("| Habit ", 0) == 0) continue;
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
    EXPECT_GT(names, 0) << "no test is named in: " << line;
  }
  EXPECT_GE(rows, least_rows);
}

TEST(HabitsTable, NamesAnExistingTestInEveryRow) { expect_tests_in_every_row("habits.md", 100); }

TEST(UnlikeRanksTable, NamesAnExistingTestInEveryRow) { expect_tests_in_every_row("unlike_ranks.md", 10); }

}  // namespace
