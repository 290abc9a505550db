// The training program as each launcher starts it: two processes that know of each other through one family of
// variables only.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tests/testing/launcher_variables.h"
#include "tests/testing/leftovers.h"
#include "tests/testing/multi_process.h"
#include "tests/testing/process.h"

namespace launchers_test {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using testing_support::free_port;
using testing_support::ProcessOptions;
using testing_support::ProcessResult;
using testing_support::run_process;
using testing_support::run_processes;
using testing_support::to_string;

using Variables = std::map<std::string, std::string>;

const char* const kConfig = R"(model:
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
  steps: 5
  global_batch_size: 4
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

bool is_free(int port) {
  const int file = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  const bool free = bind(file, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  close(file);
  return free;
}

/// The number of a job whose port nobody uses.
std::string free_slurm_job() {
  int digits = getpid() % 10000;
  while (!is_free(15000 + digits)) digits = (digits + 1) % 10000;
  return std::to_string(7300000 + digits);
}

/// As torchrun sets them.
Variables torchrun(int rank, const std::string& port) {
  const std::string number = std::to_string(rank);
  return {{"RANK", number},
          {"LOCAL_RANK", number},
          {"WORLD_SIZE", "2"},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", port}};
}

/// As srun sets them; the names of the nodes are addresses of this host.
Variables slurm(int rank, const std::string& job) {
  const std::string number = std::to_string(rank);
  return {{"SLURM_PROCID", number},
          {"SLURM_LOCALID", number},
          {"SLURM_NTASKS", "2"},
          {"SLURM_JOB_ID", job},
          {"SLURM_JOB_NODELIST", "127.0.0.[1-2]"}};
}

Variables open_mpi(int rank, const std::string& port) {
  const std::string number = std::to_string(rank);
  return {{"OMPI_COMM_WORLD_RANK", number},
          {"OMPI_COMM_WORLD_SIZE", "2"},
          {"OMPI_COMM_WORLD_LOCAL_RANK", number},
          {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
          {"MASTER_PORT", port}};
}

Variables pmi(int rank, const std::string& port) {
  const std::string number = std::to_string(rank);
  return {{"PMI_RANK", number},
          {"PMI_SIZE", "2"},
          {"MPI_LOCALRANKID", number},
          {"MPI_LOCALNRANKS", "2"},
          {"MASTER_PORT", port}};
}

class Launchers : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "hsdp_launchers_test_XXXXXX").string();
    ASSERT_TRUE(mkdtemp(name.data()));
    folder_ = name;
    std::ofstream text(folder_ / "text.bin");
    for (int i = 0; i < 400; ++i) text << "the cat sat on the mat. ";
    std::ofstream(folder_ / "config.yaml") << kConfig;
  }
  void TearDown() override {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
    EXPECT_EQ(leftovers_.describe(), "");
  }

  /// The program with these variables of a launcher and no other.
  ProcessOptions program(const Variables& variables, const std::string& run = "run") const {
    ProcessOptions options;
    options.command = {std::string(HSDP_BINARY_DIR) + "/apps/hsdp_train", "--config", "config.yaml", "--set",
                       "metrics.folder=" + run};
    options.folder = folder_.string();
    options.environment = testing_support::without_launcher();
    options.environment["OMP_NUM_THREADS"] = "1";
    for (const auto& [variable, value] : variables) options.environment[variable] = value;
    return options;
  }

  /// Loss and gradient norm of every step that a run wrote.
  std::vector<std::pair<double, double>> numbers(const std::string& run) const {
    std::vector<std::pair<double, double>> all;
    std::ifstream lines(folder_ / run / "metrics.jsonl");
    for (std::string line; std::getline(lines, line);) {
      const auto object = nlohmann::json::parse(line);
      all.emplace_back(object.at("loss"), object.at("grad_norm"));
    }
    return all;
  }

  /// Two processes with the variables of ranks 0 and 1 say that they came from `source`, and train bit for bit as two
  /// with torchrun's.
  void expect_trains_alike(const Variables& first, const Variables& second, const std::string& source) const {
    const std::string port = std::to_string(free_port());
    for (const auto& [run, variables] : {std::pair{"expected", std::pair{torchrun(0, port), torchrun(1, port)}},
                                         std::pair{"run", std::pair{first, second}}}) {
      const auto results = run_processes({program(variables.first, run), program(variables.second, run)});
      ASSERT_EQ(results[0].exit_code, 0) << to_string(results[0]) << to_string(results[1]);
      ASSERT_EQ(results[1].exit_code, 0) << to_string(results[0]) << to_string(results[1]);
      const std::string launcher = run == std::string("run") ? source : "torchrun";
      EXPECT_EQ(results[0].err, "hsdp: 2 ranks from " + launcher + ", gloo, cpu\n");
      EXPECT_EQ(results[1].err + results[1].out, "");
    }
    EXPECT_EQ(numbers("run").size(), 5u);
    EXPECT_EQ(numbers("run"), numbers("expected"));
  }

  fs::path folder_;
  testing_support::Leftovers leftovers_;
};

TEST_F(Launchers, Slurm) {
  const std::string job = free_slurm_job();
  expect_trains_alike(slurm(0, job), slurm(1, job), "Slurm");
}

TEST_F(Launchers, OpenMpi) {
  const std::string port = std::to_string(free_port());
  expect_trains_alike(open_mpi(0, port), open_mpi(1, port), "Open MPI");
}

TEST_F(Launchers, Pmi) {
  const std::string port = std::to_string(free_port());
  expect_trains_alike(pmi(0, port), pmi(1, port), "PMI (mpiexec)");
}

// A batch script's variables reach every process that mpirun starts in it.
TEST_F(Launchers, MpirunInsideASlurmJob) {
  const std::string port = std::to_string(free_port()), job = free_slurm_job();
  const auto inside = [&](Variables variables) {
    variables.merge(slurm(0, job));
    return variables;
  };
  expect_trains_alike(inside(open_mpi(0, port)), inside(open_mpi(1, port)), "Open MPI");
}

// Two hosts with a task of srun each, and torchrun in each of the tasks.
TEST_F(Launchers, TorchrunInsideSrun) {
  const std::string python = std::string(HSDP_SOURCE_DIR) + "/.venv/bin/python";
  if (!fs::exists(python)) GTEST_SKIP() << python << " is not there: torchrun comes with its torch; run tools/setup.sh";
  const std::string port = std::to_string(free_port()), job = free_slurm_job();
  std::vector<ProcessOptions> tasks;
  for (const int task : {0, 1}) {
    tasks.push_back(program(slurm(task, job)));
    const std::vector<std::string> launcher = {python,
                                               "-m",
                                               "torch.distributed.run",
                                               "--no-python",
                                               "--nnodes",
                                               "2",
                                               "--node-rank",
                                               std::to_string(task),
                                               "--nproc-per-node",
                                               "1",
                                               "--master-addr",
                                               "127.0.0.1",
                                               "--master-port",
                                               port};
    auto& command = tasks.back().command;
    command.insert(command.begin(), launcher.begin(), launcher.end());
    tasks.back().environment["TMPDIR"] = folder_.string();  // it leaves empty folders for logs there
  }
  const auto results = run_processes(tasks);
  ASSERT_EQ(results[0].exit_code, 0) << to_string(results[0]) << to_string(results[1]);
  ASSERT_EQ(results[1].exit_code, 0) << to_string(results[0]) << to_string(results[1]);
  EXPECT_THAT(results[0].err, HasSubstr("hsdp: 2 ranks from torchrun, gloo, cpu\n"));
  const std::string other = std::to_string(free_port());
  run_processes({program(torchrun(0, other), "expected"), program(torchrun(1, other), "expected")});
  EXPECT_EQ(numbers("run"), numbers("expected"));
  EXPECT_EQ(numbers("run").size(), 5u);
}

TEST_F(Launchers, ABatchScriptOfSlurmTrainsAlone) {
  Variables variables = slurm(0, free_slurm_job());
  variables["SLURM_TASK_PID"] = "4711";
  const auto result = run_process(program(variables));
  EXPECT_EQ(result.exit_code, 0) << to_string(result);
  EXPECT_EQ(result.err, "hsdp: 1 rank, alone, cpu\n");
}

TEST_F(Launchers, AnIncompleteFamilyIsRefusedByName) {
  Variables variables = slurm(1, "42");
  variables.erase("SLURM_LOCALID");
  const auto result = run_process(program(variables));
  EXPECT_EQ(result.exit_code, 2) << to_string(result);
  EXPECT_THAT(result.err,
              HasSubstr("[init] environment has SLURM_PROCID, SLURM_NTASKS, SLURM_JOB_NODELIST, SLURM_JOB_ID "
                        "but not SLURM_LOCALID, expected all variables of Slurm; start the program with srun, "
                        "or unset SLURM_PROCID and SLURM_LOCALID\n"));
}

TEST_F(Launchers, ANodeThatCannotBeReachedEndsEveryRank) {
  const std::string job = free_slurm_job();
  std::vector<ProcessOptions> ranks;
  for (const int rank : {0, 1}) {
    ranks.push_back(program(slurm(rank, job)));
    ranks.back().environment["SLURM_JOB_NODELIST"] = "no-such-node[1-2].invalid";
    ranks.back().command.insert(ranks.back().command.end(), {"--set", "comm.timeout_seconds=3"});
  }
  for (const auto& result : run_processes(ranks)) {
    EXPECT_EQ(result.exit_code, 1) << to_string(result);
    EXPECT_THAT(result.err, HasSubstr("[init] the store at no-such-node1.invalid:"));
    EXPECT_THAT(result.err, HasSubstr("every rank must start, with the same addresses, within the timeout"));
  }
}

}  // namespace launchers_test
