#include "tests/testing/train_program.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "tests/testing/launcher_variables.h"
#include "tests/testing/multi_process.h"

namespace testing_support {
namespace {

namespace fs = std::filesystem;

bool can_be_bound(int port) {
  const int file = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int yes = 1;
  setsockopt(file, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));  // connections that are closing do not count
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(uint16_t(port));
  const bool bound = bind(file, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  close(file);
  return bound;
}

/// Also a connection of another program may have the port for a while.
bool nobody_listens_on(int port) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!can_be_bound(port)) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return true;
}

}  // namespace

const char* const kTrainConfig = R"(model:
  vocab_size: 256
  hidden_size: 16
  intermediate_size: 32
  n_layers: 2
  n_heads: 2
  max_sequence_length: 32
data:
  path: text.bin
  format: bytes
training:
  steps: 6
  global_batch_size: 6
  sequence_length: 32
  seed: 1
optimizer:
  lr: 0.01
metrics:
  folder: run
  log_every: 1
comm:
  backend: gloo
  timeout_seconds: 20
)";

Arguments with_settings(const std::vector<std::string>& settings) {
  Arguments arguments = {"--config", "config.yaml"};
  for (const auto& each : settings) arguments.insert(arguments.end(), {"--set", each});
  return arguments;
}

std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file) << path << " cannot be read";
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_text(const fs::path& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

int count_of(const std::string& part, const std::string& text) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++count;
  return count;
}

std::vector<std::string> lines_with(const std::string& start, const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    if (line.starts_with(start)) lines.push_back(line);
  }
  return lines;
}

std::string all_output(const std::vector<ProcessResult>& results) {
  std::string text;
  for (const auto& result : results) text += result.out + result.err;
  return text;
}

std::string describe(const std::vector<ProcessResult>& results) {
  std::string text;
  for (size_t rank = 0; rank < results.size(); ++rank) {
    text += "rank " + std::to_string(rank) + ": " + to_string(results[rank]);
  }
  return text;
}

void expect_success(const std::vector<ProcessResult>& results) {
  for (const auto& result : results) EXPECT_EQ(result.exit_code, 0) << describe(results);
}

TrainFolder::TrainFolder() {
  std::string name = (fs::temp_directory_path() / "hsdp_train_test_XXXXXX").string();
  if (!mkdtemp(name.data())) throw std::runtime_error("no temporary folder " + name);
  path_ = name;
  std::string text;
  for (int i = 0; i < 400; ++i) text += "the cat sat on the mat. ";
  write_text(path_ / "text.bin", text);
  write_text(path_ / "config.yaml", kTrainConfig);
}

TrainFolder::~TrainFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

void TrainProgramTest::TearDown() {
  EXPECT_EQ(leftovers_.describe(), "");
  for (const int port : ports_) EXPECT_TRUE(nobody_listens_on(port)) << port;
}

ProcessOptions TrainProgramTest::program(const Arguments& arguments, const std::string& name) const {
  ProcessOptions options;
  options.command = {std::string(HSDP_BINARY_DIR) + "/apps/" + name};
  options.command.insert(options.command.end(), arguments.begin(), arguments.end());
  options.folder = folder_.path();
  options.environment = without_launcher();
  for (const char* variable : {"TORCH_SHOW_CPP_STACKTRACES", "TORCH_CPP_LOG_LEVEL"}) {
    options.environment[variable] = std::nullopt;
  }
  options.environment["OMP_NUM_THREADS"] = "1";
  options.timeout = std::chrono::seconds(300);  // starting takes long where several tests run
  return options;
}

std::vector<ProcessOptions> TrainProgramTest::ranks(int count, const std::function<Arguments(int rank)>& arguments) {
  const int port = free_port();
  ports_.push_back(port);
  std::vector<ProcessOptions> all;
  for (int rank = 0; rank < count; ++rank) {
    all.push_back(program(arguments(rank)));
    all.back().environment["RANK"] = all.back().environment["LOCAL_RANK"] = std::to_string(rank);
    all.back().environment["WORLD_SIZE"] = std::to_string(count);
    all.back().environment["MASTER_ADDR"] = "127.0.0.1";
    all.back().environment["MASTER_PORT"] = std::to_string(port);
  }
  return all;
}

std::vector<ProcessResult> TrainProgramTest::run(int count, const Arguments& arguments) {
  return run_processes(ranks(count, [&](int) { return arguments; }));
}

std::vector<nlohmann::json> TrainProgramTest::metrics(const std::string& run) const {
  std::vector<nlohmann::json> objects;
  std::istringstream lines(read_text(folder_ / run / "metrics.jsonl"));
  for (std::string line; std::getline(lines, line);) {
    objects.push_back(nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false));
    EXPECT_TRUE(objects.back().is_object()) << line;
  }
  return objects;
}

std::vector<double> TrainProgramTest::losses(const std::string& run) const {
  std::vector<double> values;
  for (const auto& object : metrics(run)) values.push_back(object.at("loss"));
  return values;
}

}  // namespace testing_support
