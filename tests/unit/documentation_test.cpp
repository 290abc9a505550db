// The pages say what the code does: links, configuration keys, blocks of YAML and C++, paths, variables, messages.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "apps/config.h"
#include "apps/config_fields.h"
#include "apps/metrics.h"
#include "apps/yaml_entries.h"
#include "hsdp/hsdp.h"
#include "tests/testing/scratch_folder.h"

namespace documentation_test {

namespace fs = std::filesystem;

const fs::path kRoot = HSDP_SOURCE_DIR;
const std::string kQuickstart = "configs/quickstart.yaml";

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file) << path << " cannot be read";
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string relative_name(const fs::path& path) { return path.lexically_relative(kRoot).string(); }

std::vector<fs::path> files_below(const std::string& folder, const std::set<std::string>& extensions) {
  std::vector<fs::path> found;
  for (const auto& entry : fs::recursive_directory_iterator(kRoot / folder)) {
    if (entry.is_regular_file() && extensions.contains(entry.path().extension().string()))
      found.push_back(entry.path());
  }
  std::sort(found.begin(), found.end());
  return found;
}

std::vector<fs::path> pages() {
  auto found = files_below("docs", {".md"});
  for (const char* name : {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"}) found.push_back(kRoot / name);
  return found;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::string trimmed(const std::string& text) {
  const auto begin = text.find_first_not_of(" \t\n");
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(" \t\n") - begin + 1);
}

/// Every match's capture group `group`.
std::vector<std::string> matches(const std::string& text, const std::string& pattern, size_t group = 1) {
  const std::regex regex(pattern);
  std::vector<std::string> found;
  for (std::sregex_iterator match(text.begin(), text.end(), regex), end; match != end; ++match) {
    found.push_back((*match)[group].str());
  }
  return found;
}

/// A page taken apart: what stands in fences, and the rest.
struct Page {
  struct Block {
    std::string language, text;
  };
  std::string name, prose;
  std::vector<Block> blocks;

  explicit Page(const fs::path& path) : name(relative_name(path)) {
    bool fenced = false;
    for (const auto& line : lines_of(read_file(path))) {
      if (line.starts_with("```")) {
        fenced = !fenced;
        if (fenced) blocks.push_back({line.substr(3), ""});
      } else {
        (fenced ? blocks.back().text : prose) += line + "\n";
      }
    }
    EXPECT_FALSE(fenced) << name << " has a fence without an end";
  }
};

/// Cells of the tables of a page whose header row starts with `first_header`.
std::vector<std::vector<std::string>> table_rows(const Page& page, const std::string& first_header) {
  std::vector<std::vector<std::string>> rows;
  bool wanted = false;
  std::string former;
  for (const auto& line : lines_of(page.prose)) {
    if (!line.starts_with("|")) {
      wanted = false;
    } else if (line.starts_with("|---")) {
      wanted = former.starts_with("| " + first_header + " ");
    } else if (wanted) {
      std::vector<std::string> cells;
      std::istringstream stream(line.substr(1));
      for (std::string cell; std::getline(stream, cell, '|');) cells.push_back(trimmed(cell));
      rows.push_back(cells);
    }
    former = line;
  }
  return rows;
}

/// The text between the backticks of a cell that is one code span, else the cell.
std::string code_of(const std::string& cell) {
  return cell.size() > 1 && cell.front() == '`' && cell.back() == '`' ? cell.substr(1, cell.size() - 2) : cell;
}

/// String literals of C++ source, unescaped, adjacent ones joined.
std::vector<std::string> literals_of(const std::string& source) {
  std::vector<std::string> found;
  bool adjacent = false;  // nothing but blanks and comments since the last literal
  for (size_t i = 0; i < source.size(); ++i) {
    const char c = source[i];
    if (c == '/' && source.compare(i, 2, "//") == 0) {
      i = source.find('\n', i);
      if (i == std::string::npos) break;
    } else if (c == '\'') {
      // Not the separator inside a number.
      if (i > 0 && std::isalnum(static_cast<unsigned char>(source[i - 1])) != 0) continue;
      for (++i; i < source.size() && source[i] != '\''; ++i) i += source[i] == '\\' ? 1 : 0;
      adjacent = false;
    } else if (c == '"') {
      std::string text;
      for (++i; i < source.size() && source[i] != '"'; ++i) {
        if (source[i] == '\\') ++i;
        text += source[i];
      }
      if (adjacent) {
        found.back() += text;
      } else {
        found.push_back(text);
      }
      adjacent = true;
    } else if (std::isspace(static_cast<unsigned char>(c)) == 0) {
      adjacent = false;
    }
  }
  return found;
}

std::vector<fs::path> sources() {
  std::vector<fs::path> found;
  for (const char* folder : {"dtensor", "hsdp", "models", "apps"}) {
    const auto files = files_below(folder, {".cpp", ".h"});
    found.insert(found.end(), files.begin(), files.end());
  }
  return found;
}

// ---- links ----

/// Names of a page's headings as links spell them.
std::set<std::string> anchors_of(const Page& page) {
  std::set<std::string> anchors;
  for (const auto& heading : matches(page.prose, "(?:^|\n)#+ ([^\n]+)")) {
    std::string anchor;
    for (const char c : heading) {
      if (std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_') anchor += char(std::tolower(c));
      if (c == ' ') anchor += '-';
    }
    anchors.insert(anchor);
  }
  return anchors;
}

TEST(Links, LeadToFilesAndHeadings) {
  size_t links = 0;
  for (const auto& path : pages()) {
    const Page page(path);
    for (const auto& link : matches(page.prose, "\\]\\(([^)]+)\\)")) {
      if (link.starts_with("https://")) continue;
      ++links;
      const auto file = link.substr(0, link.find('#'));
      const auto target = file.empty() ? path : (path.parent_path() / file).lexically_normal();
      EXPECT_TRUE(fs::exists(target)) << page.name << " links to " << link;
      if (link.find('#') == std::string::npos || !fs::exists(target)) continue;
      EXPECT_TRUE(anchors_of(Page(target)).contains(link.substr(link.find('#') + 1)))
          << page.name << " links to " << link << ", which has no such heading";
    }
  }
  EXPECT_GT(links, 20u);
}

TEST(Links, EveryPageIsInTheContents) {
  const std::string index = read_file(kRoot / "docs/index.md");
  for (const auto& path : files_below("docs", {".md"})) {
    if (path.filename() == "index.md") continue;
    EXPECT_NE(index.find("](" + path.filename().string() + ")"), std::string::npos) << path.filename();
  }
}

// ---- configuration ----

TEST(ConfigurationPage, ListsEveryKeyWithItsTypeAndDefault) {
  std::map<std::string, std::vector<std::string>> rows;
  for (const auto& row : table_rows(Page(kRoot / "docs/configuration.md"), "Key")) {
    ASSERT_EQ(row.size(), 4u) << row.front();
    EXPECT_TRUE(rows.emplace(code_of(row[0]), row).second) << row[0] << " is there twice";
  }
  apps::Config defaults;
  for (const auto& field : apps::config_fields(defaults)) {
    const auto row = rows.find(field.name);
    if (row == rows.end()) {
      ADD_FAILURE() << field.name << " is not in docs/configuration.md";
      continue;
    }
    EXPECT_EQ(row->second[2], field.required ? "required" : "`" + field.get() + "`") << field.name;
    // A number that every range excludes: what the reader says it expected is the type.
    const auto problem = field.set({apps::YamlEntry::Kind::plain, "-1000000", "", ""});
    const std::string before = "expected ", after = ", got '-1000000'";
    std::string type = "text";
    if (problem) {
      ASSERT_TRUE(problem->starts_with(before) && problem->ends_with(after)) << *problem;
      type = problem->substr(before.size(), problem->size() - before.size() - after.size());
    }
    EXPECT_EQ(row->second[1], type) << field.name;
    rows.erase(row);
  }
  for (const auto& [name, row] : rows)
    ADD_FAILURE() << "docs/configuration.md describes " << name << ", which is no key";
}

TEST(ConfigurationPage, BlocksAndOverridesAreAccepted) {
  const std::string quickstart = read_file(kRoot / kQuickstart);
  size_t blocks = 0, overrides = 0;
  for (const auto& path : pages()) {
    const Page page(path);
    for (const auto& block : page.blocks) {
      if (block.language == "yaml") {
        ++blocks;
        const auto yaml = apps::read_yaml_entries(block.text, page.name);
        EXPECT_TRUE(yaml.problems.empty()) << page.name << ": " << yaml.problems.front();
        std::vector<std::string> settings;
        for (const auto& [key, entry] : yaml.entries) settings.push_back(key + "=" + entry.text);
        EXPECT_FALSE(settings.empty()) << page.name;
        EXPECT_NO_THROW(apps::parse_config(quickstart, kQuickstart, settings)) << page.name << "\n" << block.text;
      }
      for (const auto& setting : matches(block.text, "--set ([a-z_]+\\.[a-z_0-9]+=[^\\s`]+)")) {
        ++overrides;
        EXPECT_NO_THROW(apps::parse_config(quickstart, kQuickstart, {setting})) << page.name << ": " << setting;
      }
    }
  }
  EXPECT_GE(blocks, 1u);
  EXPECT_GE(overrides, 2u);
}

TEST(Readme, ListsTheKeysOfAMetricsLine) {
  std::vector<std::string> documented, written;
  for (const auto& row : table_rows(Page(kRoot / "README.md"), "Key")) documented.push_back(code_of(row[0]));
  const auto line = nlohmann::ordered_json::parse(apps::to_json({}));
  for (const auto& [key, value] : line.items()) written.push_back(key);
  EXPECT_EQ(documented, written);
}

// ---- paths and names ----

/// Names of variables that C++ code asks for, that scripts expand and that CMake reads.
std::set<std::string> variables_read() {
  std::set<std::string> names;
  const std::string variable = "([A-Z][A-Z0-9_]+)";
  for (const auto& path : sources()) {
    const std::string text = read_file(path);
    for (const auto& name : matches(text, "[a-z_]*env\\(\"" + variable + "\"")) names.insert(name);
    // Names that are handed around as arguments: our own, and here each literal that looks like one.
    const std::regex handed(path.filename() == "launcher_env.cpp" ? variable : "HSDP_[A-Z_]+");
    for (const auto& literal : literals_of(text)) {
      if (std::regex_match(literal, handed)) names.insert(literal);
    }
  }
  for (const auto& path : files_below("tools", {".sh", ".cmake"})) {
    // A quoted here-document is text of another language.
    const std::string text = std::regex_replace(read_file(path), std::regex("<<'TEXT'\n[^]*?\nTEXT\n"), "\n");
    for (const auto& name : matches(text, "\\$ENV\\{" + variable + "\\}")) names.insert(name);
    for (const auto& name : matches(text, "\\$\\{?" + variable + "[:}\\s/]")) {
      const bool is_bash = name == "BASH_SOURCE" || name == "SECONDS";
      if (path.extension() == ".sh" && !is_bash) names.insert(name);
    }
  }
  return names;
}

/// Build products stand for the source that they are made of.
bool is_built_from_a_source(const fs::path& below_build) {
  const std::string folder = below_build.begin()->string();
  if (!fs::is_directory(kRoot / folder)) return false;
  const auto files = files_below(folder, {".cpp"});
  return std::any_of(files.begin(), files.end(),
                     [&](const auto& file) { return file.stem() == below_build.filename(); });
}

TEST(Paths, NamedInPagesExist) {
  size_t paths = 0;
  for (const auto& path : pages()) {
    const std::string text = read_file(path);
    const std::string name = relative_name(path);
    for (auto found :
         matches(text, "(?:^|[\\s`(])((?:tools|configs|apps|docs|hsdp|dtensor|models|tests)/[A-Za-z0-9_./-]*)")) {
      ++paths;
      while (found.ends_with('.')) found.pop_back();
      EXPECT_TRUE(fs::exists(kRoot / found)) << name << " names " << found;
    }
    for (const auto& found : matches(text, "build/(?:release|debug)/([A-Za-z0-9_/]+)")) {
      ++paths;
      EXPECT_TRUE(is_built_from_a_source(found)) << name << " names the program " << found;
    }
  }
  EXPECT_GT(paths, 30u);
}

TEST(Paths, CommandsOfTheReadmeAreExecutable) {
  for (const char* script : {"tools/setup.sh", "tools/train.sh", "tools/test.sh"}) {
    EXPECT_NE(read_file(kRoot / "README.md").find(script), std::string::npos) << script;
    EXPECT_NE(fs::status(kRoot / script).permissions() & fs::perms::owner_exec, fs::perms::none) << script;
  }
}

TEST(Paths, PresetsOptionsAndTestTargetsExist) {
  const auto presets = nlohmann::json::parse(read_file(kRoot / "CMakePresets.json"));
  std::set<std::string> names;
  for (const auto& preset : presets.at("workflowPresets")) names.insert(preset.at("name").get<std::string>());
  const std::string options = read_file(kRoot / "tools/cmake/HsdpOptions.cmake");
  const auto variables = variables_read();
  std::set<std::string> tests;
  for (const auto& file : files_below("tests", {".cpp"})) tests.insert(file.stem().string());

  const Page contributing(kRoot / "CONTRIBUTING.md");
  std::set<std::string> documented;
  for (const auto& row : table_rows(contributing, "Preset")) documented.insert(code_of(row[0]));
  EXPECT_EQ(documented, names);
  for (const auto& path : pages()) {
    const std::string text = read_file(path);
    for (const auto& preset : matches(text, "--preset ([a-z]+)")) EXPECT_TRUE(names.contains(preset)) << preset;
    for (const auto& option : matches(text, "\\b(HSDP_[A-Z_]+)")) {
      EXPECT_TRUE(std::regex_search(options, std::regex("\\b" + option + "\\b")) || variables.contains(option))
          << path << " names " << option;
    }
    for (const auto& test : matches(text, "(?:--target |unit\\.)([a-z_]+_test)\\b")) {
      EXPECT_TRUE(tests.contains(test)) << path << " names " << test;
    }
  }
}

// ---- environment ----

TEST(EnvironmentPage, ListsWhatIsReadAndNothingElse) {
  std::set<std::string> documented;
  for (const auto& row : table_rows(Page(kRoot / "docs/environment.md"), "Variable"))
    documented.insert(code_of(row[0]));
  EXPECT_EQ(documented, variables_read());
}

// ---- C++ ----

/// Lines between the comments `// [name]` and `// [/name]`, without the indentation of the first.
std::string region(const std::string& source, const std::string& name, const std::string& comment = "//") {
  std::string text;
  std::optional<size_t> indentation;
  bool inside = false;
  for (const auto& line : lines_of(source)) {
    if (trimmed(line) == comment + " [/" + name + "]") break;
    if (inside) {
      if (!indentation) indentation = line.find_first_not_of(' ');
      text += (line.empty() ? line : line.substr(*indentation)) + "\n";
    }
    inside = inside || trimmed(line) == comment + " [" + name + "]";
  }
  return text;
}

TEST(Readme, QuotesTheExampleAndTheExampleIsShort) {
  const std::string example = read_file(kRoot / "apps/examples/wrap_your_module.cpp");
  const std::string quoted = region(example, "readme");
  ASSERT_GT(lines_of(quoted).size(), 10u);
  EXPECT_LT(lines_of(example).size(), 60u);
  const Page readme(kRoot / "README.md");
  std::vector<std::string> blocks;
  for (const auto& block : readme.blocks) {
    if (block.language == "cpp") blocks.push_back(block.text);
  }
  ASSERT_EQ(blocks.size(), 1u);
  EXPECT_EQ(blocks.front(), quoted);
}

TEST(Pages, QuoteOnlyCodeThatIsCompiled) {
  const std::string example = read_file(kRoot / "apps/examples/wrap_your_module.cpp");
  // The regions are code of the tests below.
  const std::string snippets = read_file(kRoot / "tests/unit/documentation_test.cpp");
  std::set<std::string> compiled{region(example, "readme")};
  for (const char* name : {"materialize", "own values", "scope", "tokens", "groups", "scaler", "in backward",
                           "checkpointed units", "checkpoint", "resume", "trace"}) {
    compiled.insert(region(snippets, name));
  }
  size_t blocks = 0;
  for (const auto& path : pages()) {
    const Page page(path);
    for (const auto& block : page.blocks) {
      if (block.language != "cpp") continue;
      ++blocks;
      EXPECT_TRUE(compiled.contains(block.text)) << page.name << "\n" << block.text;
    }
  }
  EXPECT_EQ(blocks, compiled.size());
}

TEST(Readme, ModesAreThoseThatAreCompiledAndThatTheReaderAccepts) {
  const std::string quickstart = read_file(kRoot / kQuickstart);
  const auto statements = lines_of(region(read_file(kRoot / "tests/unit/documentation_test.cpp"), "modes"));
  std::vector<std::string> quoted;
  for (const auto& row : table_rows(Page(kRoot / "README.md"), "Where")) {
    ASSERT_EQ(row.size(), 4u) << row.front();
    quoted.push_back(code_of(row[2]));
    const auto yaml = apps::read_yaml_entries(code_of(row[3]), "README.md");
    EXPECT_TRUE(yaml.problems.empty()) << row[3];
    ASSERT_FALSE(yaml.entries.empty()) << row[3];
    std::vector<std::string> settings;
    for (const auto& [key, entry] : yaml.entries) settings.push_back(key + "=" + entry.text);
    EXPECT_NO_THROW(apps::parse_config(quickstart, kQuickstart, settings)) << row[3];
  }
  EXPECT_GE(quoted.size(), 10u);
  EXPECT_EQ(quoted, statements);
}

TEST(Configurations, ThatComeWithTheProjectAreAcceptedAndNamedInAPage) {
  std::string text;
  for (const auto& page : pages()) text += read_file(page);
  for (const auto& path : files_below("configs", {".yaml"})) {
    EXPECT_NO_THROW(apps::read_config(path.string())) << path;
    EXPECT_NE(text.find(relative_name(path)), std::string::npos) << path << " is named in no page";
  }
}

TEST(InstallPage, QuotesProjectsThatAreBuilt) {
  std::vector<std::string> quoted;
  for (const auto& block : Page(kRoot / "docs/install.md").blocks) {
    if (block.language == "cmake") quoted.push_back(block.text);
  }
  const std::string consumer = read_file(kRoot / "tests/consumer/CMakeLists.txt");
  const std::string subdirectory = read_file(kRoot / "tests/consumer/subdirectory/CMakeLists.txt");
  EXPECT_EQ(quoted, (std::vector<std::string>{region(consumer, "find_package", "#"),
                                              region(subdirectory, "add_subdirectory", "#")}));
}

TEST(InstallPage, ListsEveryOptionWithItsDefault) {
  std::map<std::string, std::string> documented, made;
  for (const auto& row : table_rows(Page(kRoot / "docs/install.md"), "Option")) {
    EXPECT_TRUE(documented.emplace(code_of(row[0]), code_of(row[1])).second) << row[0] << " is there twice";
  }
  const auto add = [&](const std::string& text, const std::string& pattern) {
    const auto names = matches(text, pattern, 1), values = matches(text, pattern, 2);
    for (size_t i = 0; i < names.size(); ++i) {
      const std::string value = values[i] == "${PROJECT_IS_TOP_LEVEL}" ? "ON" : values[i];
      made[names[i]] = value.empty() ? "empty" : value;
    }
  };
  const std::string options =
      read_file(kRoot / "tools/cmake/HsdpOptions.cmake") + read_file(kRoot / "tools/cmake/HsdpCudaLanguage.cmake");
  add(options, "option\\((HSDP_[A-Z_]+) \"[^\"]*\" ([^ )]+)");
  add(options, "set\\((HSDP_[A-Z_]+) \"([^\"]*)\" CACHE");
  for (const auto& name : matches(read_file(kRoot / "tools/cmake/HsdpTorch.cmake"), "_find_header\\((HSDP_[A-Z_]+)")) {
    made[name] = "searched";
  }
  EXPECT_EQ(documented, made);
}

struct NetImpl : torch::nn::Module {
  NetImpl(int64_t in, int64_t out) : linear(register_module("linear", torch::nn::Linear(in, out))) {}
  torch::Tensor forward(const torch::Tensor& x) { return linear(x); }
  torch::nn::Linear linear;
};
TORCH_MODULE(Net);

double score(NetImpl& net, const torch::Tensor& x) { return net.forward(x).sum().item<double>(); }

TEST(Snippets, MaterializeGivesTheValuesOfPlainConstruction) {
  const auto env = hsdp::init({.backend = "gloo"});
  // [materialize]
  torch::manual_seed(7);
  auto net = hsdp::meta_init([] { return Net(4, 8); });
  auto model = hsdp::fully_shard(net, {.mesh = env.mesh()});
  model.to_empty(env.device());
  model.replay_init();
  // [/materialize]
  torch::manual_seed(7);
  const Net plain(4, 8);
  EXPECT_TRUE(torch::equal(hsdp::unsharded(net->linear->weight), plain->linear->weight));
  EXPECT_TRUE(torch::equal(hsdp::unsharded(net->linear->bias), plain->linear->bias));
}

TEST(Snippets, OwnValuesAndAScope) {
  const auto env = hsdp::init({.backend = "gloo"});
  auto net = hsdp::meta_init([] { return Net(4, 8); });
  auto model = hsdp::fully_shard(net, {.mesh = env.mesh()});
  torch::manual_seed(3);
  {
    // [own values]
    model.to_empty(env.device());
    torch::NoGradGuard no_grad;
    for (auto& parameter : model->parameters()) torch::nn::init::normal_(parameter, 0.0, 0.02);
    // [/own values]
  }
  torch::manual_seed(3);
  const auto weight = torch::empty({8, 4}).normal_(0.0, 0.02), bias = torch::empty({8}).normal_(0.0, 0.02);
  const auto x = torch::ones({1, 4});
  // [scope]
  hsdp::ForwardScope scope(model.core());
  const double value = score(model.module(), x);
  // [/scope]
  EXPECT_NEAR(value, (weight.sum() + bias.sum()).item<double>(), 1e-5);
}

int64_t steps_trained = 0;

void train_one_step(hsdp::FullySharded<NetImpl>& model, torch::optim::AdamW& optimizer, int64_t position) {
  EXPECT_EQ(position, steps_trained++);
  optimizer.zero_grad();
  const auto loss = model->forward(torch::full({2, 4}, static_cast<double>(position % 7))).pow(2).mean();
  loss.backward();
  optimizer.step();
}

// [resume]
void train(const hsdp::Environment& env, hsdp::FullySharded<NetImpl>& model, torch::optim::AdamW& optimizer) {
  hsdp::TrainingState state{.model = model.core(), .optimizers = {&optimizer}};
  hsdp::CheckpointFolder folder(env, "runs/mine", {.keep_latest = 3, .async = true});
  if (const auto newest = folder.newest()) {
    hsdp::load(state, newest->path);
  } else {
    model.materialize(env.device());
  }
  while (state.progress.step < 1000) {
    train_one_step(model, optimizer, state.progress.data_position);
    ++state.progress.step;
    ++state.progress.data_position;
    folder.poll();  // completes a save that was written meanwhile, and throws what it failed with
    if (state.progress.step % 100 == 0) folder.save(state);
  }
  folder.finish();
}
// [/resume]

TEST(Snippets, ResumesFromTheNewestCheckpoint) {
  const auto env = hsdp::init({.backend = "gloo"});
  const testing_support::ScratchFolder scratch;
  const auto former = fs::current_path();
  fs::current_path(scratch.path());
  const auto run = [&] {
    torch::manual_seed(7);
    auto net = hsdp::meta_init([] { return Net(4, 8); });
    auto model = hsdp::fully_shard(net, {.mesh = env.mesh()});
    torch::optim::AdamW optimizer(model->parameters());
    train(env, model, optimizer);
    return hsdp::unsharded(net->linear->weight);
  };
  const auto trained = run();
  EXPECT_EQ(steps_trained, 1000);
  EXPECT_EQ(scratch.names(), std::set<std::string>{"runs"});
  EXPECT_EQ(hsdp::find_checkpoints("runs/mine").size(), 3u);
  EXPECT_TRUE(torch::equal(run(), trained));
  EXPECT_EQ(steps_trained, 1000);
  fs::current_path(former);
}

TEST(Snippets, ATraceOfSomeSteps) {
  const auto env = hsdp::init({.backend = "gloo"});
  const testing_support::ScratchFolder scratch;
  const auto former = fs::current_path();
  fs::current_path(scratch.path());
  auto net = hsdp::meta_init([] { return Net(4, 8); });
  auto model = hsdp::fully_shard(net, {.mesh = env.mesh()});
  model.materialize(env.device());
  const auto x = torch::ones({2, 4});
  // [trace]
  hsdp::Trace trace("traces/rank" + std::to_string(env.rank()) + "_trace.json", {.record_shapes = true});
  trace.start();
  for (int step = 1; step <= 3; ++step) {
    const hsdp::NamedRange range("ProfilerStep#" + std::to_string(step));
    model->forward(x).square().mean().backward();
  }
  trace.save();
  // [/trace]
  const auto text = read_file("traces/rank0_trace.json");
  EXPECT_EQ(matches(text, "\"(ProfilerStep#[0-9]+)\"").size(), 3u);
  fs::current_path(former);
}

struct BlockImpl : torch::nn::Module {
  BlockImpl() : linear(register_module("linear", torch::nn::Linear(4, 4))) {}
  torch::Tensor forward(const torch::Tensor& x) { return torch::tanh(linear(x)).pow(2); }
  torch::nn::Linear linear;
};
TORCH_MODULE(Block);

struct DeepImpl : torch::nn::Module {
  DeepImpl() : block(register_module("block", Block())), other(register_module("other", Block())) {}
  torch::Tensor first(const torch::Tensor& x) { return block->forward(x); }
  std::pair<torch::Tensor, torch::Tensor> heads(const torch::Tensor& x) { return {torch::tanh(x), other->forward(x)}; }
  Block block, other;
};
TORCH_MODULE(Deep);

TEST(Snippets, ActivationsThatAreComputedAgain) {
  const auto env = hsdp::init({.backend = "gloo"});
  torch::manual_seed(7);
  Deep plain;
  const auto inputs = torch::ones({3, 4}).set_requires_grad(true);
  auto [y0, more0] = plain->heads(plain->first(inputs));
  const auto expected = torch::autograd::grad({(y0 + more0).sum()}, {inputs})[0];
  {
    auto net = plain;
    // [checkpoint]
    auto h = hsdp::checkpoint([&](const torch::Tensor& x) { return net->first(x); }, inputs);
    auto [y, more] = hsdp::checkpoint(&DeepImpl::heads, net.get(), h);
    (y + more).sum().backward();
    // [/checkpoint]
    EXPECT_TRUE(torch::equal(inputs.grad(), expected));
  }
  torch::manual_seed(7);
  auto net = hsdp::meta_init([] { return Deep(); });
  // [checkpointed units]
  auto model = hsdp::fully_shard(net, {.units = hsdp::each<Block>(), .activation_checkpoint = hsdp::each<Block>()});
  // [/checkpointed units]
  model.materialize(env.device());
  {
    hsdp::ForwardScope scope(model.core());
    auto [y1, more1] = net->heads(net->first(inputs));
    EXPECT_TRUE(torch::equal(torch::autograd::grad({(y1 + more1).sum()}, {inputs})[0], expected));
  }
}

TEST(Snippets, ALossOverAllTokens) {
  const auto env = hsdp::init({.backend = "gloo"});
  auto net = hsdp::meta_init([] { return Net(4, 8); });
  auto model = hsdp::fully_shard(net, {.mesh = env.mesh()});
  model.materialize(env.device());
  const auto x = torch::ones({3, 4}), targets = torch::tensor({1, -100, 2}, torch::kLong);
  // [tokens]
  model.set_gradient_divide_factor(1);           // sums over ranks, from the next reduction on
  auto total = (targets != -100).sum().view(1);  // on the device, as the group needs it
  env.communicator()->all_reduce(total, dtensor::ReduceOp::sum, {"all_reduce", "tokens"})->wait();
  auto loss = torch::nn::functional::cross_entropy(
      model->forward(x), targets, torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
  (loss / total.item<int64_t>()).backward();
  // [/tokens]
  EXPECT_EQ(total.item<int64_t>(), 2);
  EXPECT_TRUE(net->linear->weight.grad().defined());
}

TEST(Snippets, GroupsByPatternAndAGradientScaler) {
  const auto env = hsdp::init({.backend = "gloo"});
  auto net = hsdp::meta_init([] { return Net(4, 8); });
  auto model = hsdp::fully_shard(net, {.mesh = env.mesh()});
  model.materialize(env.device());
  // [groups]
  using Options = torch::optim::AdamWOptions;
  hsdp::FusedAdamW optimizer(hsdp::parameter_groups(
      model, {{"**.bias", Options(3e-4).weight_decay(0)}, {"**", Options(3e-4).weight_decay(0.1)}}));
  // [/groups]
  ASSERT_EQ(optimizer.param_groups().size(), 2u);
  EXPECT_TRUE(optimizer.param_groups()[0].params().at(0).is_same(net->linear->bias));
  const std::vector<torch::Tensor> batches{torch::ones({2, 4}), torch::zeros({2, 4})};
  const auto before = hsdp::unsharded(net->linear->weight);
  // [scaler]
  hsdp::GradScaler scaler;
  for (const auto& x : batches) {
    optimizer.zero_grad();
    scaler.scale(model->forward(x).square().mean()).backward();
    scaler.unscale_(optimizer);  // only for what looks at gradients before the step
    hsdp::clip_grad_norm_(model->parameters(), 1.0);
    scaler.step(optimizer);
    scaler.update();
  }
  // [/scaler]
  EXPECT_EQ(scaler.state().growth_tracker, 2);
  EXPECT_FALSE(torch::equal(hsdp::unsharded(net->linear->weight), before));
}

TEST(Snippets, StepsInTheMiddleOfBackward) {
  const auto env = hsdp::init({.backend = "gloo"});
  auto net = hsdp::meta_init([] { return Net(4, 8); });
  auto model = hsdp::fully_shard(net, {.mesh = env.mesh()});
  model.materialize(env.device());
  const auto before = hsdp::unsharded(net->linear->bias);
  const std::vector<torch::Tensor> batches{torch::ones({2, 4}), torch::zeros({2, 4})};
  // [in backward]
  hsdp::apply_optimizer_in_backward(model, [](const at::Tensor& parameter) {
    return std::make_unique<hsdp::FusedSGD>(std::vector<at::Tensor>{parameter}, torch::optim::SGDOptions(0.1));
  });
  for (const auto& x : batches) model->forward(x).square().mean().backward();  // steps, and leaves no gradients
  // [/in backward]
  EXPECT_FALSE(torch::equal(hsdp::unsharded(net->linear->bias), before));
  EXPECT_FALSE(net->linear->bias.grad().defined());
}

TEST(Snippets, ModesOfTheReadmeTrainWhereTheyFit) {
  const auto env = hsdp::init({.backend = "gloo"});
  const int64_t hosts = 1, ranks_of_a_host = 1;
  hsdp::FullyShardOptions options;
  options.units = hsdp::each<Block>();
  torch::manual_seed(7);
  auto net = hsdp::meta_init([] { return torch::nn::Sequential(Block(), Block()); });
  auto model = hsdp::fully_shard(net, options);
  model.materialize(env.device());
  const bool is_last = true;
  // clang-format off: a line is a row of the README.
  // [modes]
  options.mesh = env.make_mesh({env.world_size(), 1}, {"replicate", "shard"});
  options.mesh = env.mesh();
  options.mesh = env.make_mesh({hosts, env.world_size() / hosts}, {"replicate", "shard"});
  options.activation_checkpoint = hsdp::each<Block>();
  model.set_requires_gradient_sync(is_last);
  options.offload.to_host = true;
  options.reshard_after_forward = false;
  options.reshard_after_forward = ranks_of_a_host;
  options.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  options.mixed_precision = {.param_dtype = at::kHalf, .reduce_dtype = at::kFloat};
  // [/modes]
  // clang-format on
  torch::manual_seed(7);
  auto other = hsdp::meta_init([] { return torch::nn::Sequential(Block(), Block()); });
  auto all = hsdp::fully_shard(other, options);
  all.materialize(env.device());
  const auto x = torch::ones({2, 4});
  const auto expected = model->forward(x), y = all->forward(x);
  EXPECT_EQ(y.scalar_type(), at::kHalf);
  EXPECT_TRUE(torch::allclose(y.to(torch::kFloat), expected, 1e-2, 1e-3));
  y.sum().backward();
  EXPECT_EQ(other->parameters().front().grad().scalar_type(), at::kFloat);
}

// ---- messages ----

/// What the string literals of the sources can say, one of them or several in a row.
class Literals {
 public:
  Literals() {
    for (const auto& path : sources()) {
      for (auto& literal : literals_of(read_file(path))) {
        if (!literal.empty()) literals_.insert(std::move(literal));
      }
    }
  }

  bool say(const std::string& piece) const {
    if (any([&](const auto& text) { return text.find(piece) != std::string::npos; })) return true;
    for (size_t split = 1; split < piece.size(); ++split) {
      const auto head = piece.substr(0, split);
      if (any([&](const auto& text) { return text.ends_with(head); }) && start(piece.substr(split))) return true;
    }
    return false;
  }

  /// The place that a message starts with: a literal of its own, or the start of one.
  bool name(const std::string& where) const {
    return literals_.contains(where) || any([&](const auto& text) { return text.starts_with("[" + where + "] "); });
  }

 private:
  template <class Predicate>
  bool any(const Predicate& predicate) const {
    return std::any_of(literals_.begin(), literals_.end(), predicate);
  }
  /// Whole literals, and the beginning of a last one.
  bool start(const std::string& rest) const {
    return any([&](const auto& text) {
      return text.starts_with(rest) || (rest.starts_with(text) && start(rest.substr(text.size())));
    });
  }

  std::set<std::string> literals_;
};

TEST(ErrorsPage, QuotesMessagesOfTheSources) {
  const Literals literals;
  const auto said = [&](const std::string& piece) { return literals.say(piece); };
  EXPECT_FALSE(said("parameters are marshmallows"));
  const auto rows = table_rows(Page(kRoot / "docs/errors.md"), "Message");
  EXPECT_GT(rows.size(), 35u);
  for (const auto& row : rows) {
    const std::string message = code_of(row.front());
    const size_t bracket = message.find("] ");
    ASSERT_TRUE(message.starts_with('[') && bracket != std::string::npos) << message;
    const std::string where = message.substr(1, bracket - 1);
    EXPECT_TRUE(where == "…" || literals.name(where)) << message;
    // Between the values stands what the sources say word for word.
    const std::string text = message.substr(bracket + 2), value = "…";
    for (size_t begin = 0, end = 0; begin <= text.size(); begin = end + value.size()) {
      end = std::min(text.find(value, begin), text.size());
      EXPECT_TRUE(said(trimmed(text.substr(begin, end - begin))))
          << message << "\nno source says: " << text.substr(begin, end - begin);
    }
  }
}

}  // namespace documentation_test
