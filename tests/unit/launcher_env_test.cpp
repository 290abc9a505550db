#include "hsdp/launch/launcher_env.h"

#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dtensor/error.h"
#include "hsdp/launch/slurm_node_list.h"
#include "tests/testing/expect.h"

namespace launcher_env_test {

using dtensor::ValueError;
using hsdp::first_slurm_node;
using hsdp::LauncherEnv;
using hsdp::read_launcher_env;
using testing_support::expect_error;
using Variables = std::map<std::string, std::string>;

LauncherEnv read(const Variables& variables) {
  return read_launcher_env([&](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

Variables torchrun() {
  return {{"RANK", "3"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}, {"MASTER_ADDR", "node7"}, {"MASTER_PORT", "29400"}};
}

Variables with(Variables variables, const std::string& name, const std::string& value) {
  variables[name] = value;
  return variables;
}

Variables without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

Variables with_all(Variables variables, const Variables& others) {
  variables.insert(others.begin(), others.end());
  return variables;
}

/// What srun sets on several nodes: rank 5 of 8 is the second task of the third node.
Variables slurm() {
  return {{"SLURM_PROCID", "5"},
          {"SLURM_NTASKS", "8"},
          {"SLURM_LOCALID", "1"},
          {"SLURM_NODEID", "2"},
          {"SLURM_JOB_ID", "7300042"},
          {"SLURM_STEP_ID", "0"},
          {"SLURM_JOB_NODELIST", "n[01-04]"},
          {"SLURM_JOB_NAME", "train"},
          {"SLURM_TASK_PID", "4711"}};
}

/// What mpirun of Open MPI sets on one host.
Variables open_mpi() {
  return {{"OMPI_COMM_WORLD_RANK", "3"},
          {"OMPI_COMM_WORLD_SIZE", "4"},
          {"OMPI_COMM_WORLD_LOCAL_RANK", "3"},
          {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}};
}

/// What mpiexec of MPICH sets on one host.
Variables pmi() { return {{"PMI_RANK", "3"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "3"}, {"MPI_LOCALNRANKS", "4"}}; }

TEST(LauncherEnv, NothingMeansAlone) {
  const LauncherEnv env = read({});
  EXPECT_EQ(env.source, "alone");
  EXPECT_EQ(env.rank, 0);
  EXPECT_EQ(env.world_size, 1);
  EXPECT_EQ(env.local_rank, 0);
}

TEST(LauncherEnv, AddressesAloneAreNoLauncher) {
  EXPECT_EQ(read({{"MASTER_ADDR", "node7"}, {"MASTER_PORT", "29400"}, {"OMP_NUM_THREADS", "1"}}).source, "alone");
}

TEST(LauncherEnv, Torchrun) {
  const LauncherEnv env = read(torchrun());
  EXPECT_EQ(env.source, "torchrun");
  EXPECT_EQ(env.rank, 3);
  EXPECT_EQ(env.world_size, 8);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.master_addr, "node7");
  EXPECT_EQ(env.master_port, 29400);
  EXPECT_FALSE(env.launcher_serves_store);
  EXPECT_EQ(env.restart_count, 0);
}

TEST(LauncherEnv, AgentStoreNeedsTheExactWord) {
  EXPECT_TRUE(read(with(torchrun(), "TORCHELASTIC_USE_AGENT_STORE", "True")).launcher_serves_store);
  EXPECT_FALSE(read(with(torchrun(), "TORCHELASTIC_USE_AGENT_STORE", "False")).launcher_serves_store);
  EXPECT_FALSE(read(with(torchrun(), "TORCHELASTIC_USE_AGENT_STORE", "1")).launcher_serves_store);
}

TEST(LauncherEnv, RestartCount) {
  EXPECT_EQ(read(with(torchrun(), "TORCHELASTIC_RESTART_COUNT", "2")).restart_count, 2);
}

TEST(LauncherEnv, Slurm) {
  const LauncherEnv env = read(slurm());
  EXPECT_EQ(env.source, "Slurm");
  EXPECT_EQ(env.rank, 5);
  EXPECT_EQ(env.world_size, 8);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_TRUE(env.may_bind_devices);
  EXPECT_EQ(env.master_addr, "n01");
  EXPECT_EQ(env.master_port, 15042);
  EXPECT_FALSE(env.launcher_serves_store);
  EXPECT_EQ(env.job, "7300042.0");
}

TEST(LauncherEnv, SlurmMeetsOnTheFirstNodeOfTheStep) {
  EXPECT_EQ(read(with(slurm(), "SLURM_STEP_NODELIST", "n[03-04]")).master_addr, "n03");
}

TEST(LauncherEnv, SlurmPortIsTheEndOfTheJobsNumber) {
  EXPECT_EQ(read(with(slurm(), "SLURM_JOB_ID", "7")).master_port, 15007);
  EXPECT_EQ(read(with(slurm(), "SLURM_JOB_ID", "19999")).master_port, 24999);
  EXPECT_EQ(read(with(slurm(), "SLURM_JOB_ID", "20000")).master_port, 15000);
}

TEST(LauncherEnv, SlurmNeedsNoAddressThatIsGiven) {
  Variables variables = without(without(slurm(), "SLURM_JOB_ID"), "SLURM_JOB_NODELIST");
  variables = with(with(variables, "MASTER_ADDR", "login"), "MASTER_PORT", "29400");
  EXPECT_EQ(read(variables).master_addr, "login");
  EXPECT_EQ(read(variables).master_port, 29400);
  const LauncherEnv both = read(with(with(slurm(), "MASTER_ADDR", "login"), "MASTER_PORT", "29400"));
  EXPECT_EQ(both.master_addr, "login");
  EXPECT_EQ(both.master_port, 29400);
}

TEST(LauncherEnv, OneTaskOfSlurmMeetsNobody) {
  const LauncherEnv env = read({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}, {"SLURM_LOCALID", "0"}});
  EXPECT_EQ(env.source, "Slurm");
  EXPECT_EQ(env.world_size, 1);
  EXPECT_EQ(env.master_addr, "");
}

// salloc's shell knows the allocation and is no task; batch scripts and interactive steps look like task 0.
TEST(LauncherEnv, ShellsOfSlurmAreAlone) {
  const Variables allocation = {
      {"SLURM_NTASKS", "4"}, {"SLURM_JOB_ID", "42"}, {"SLURM_JOB_NODELIST", "n1"}, {"SLURM_JOB_NAME", "train"}};
  EXPECT_EQ(read(allocation).source, "alone");
  const Variables batch =
      with_all(allocation, {{"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}, {"SLURM_TASK_PID", "9"}});
  EXPECT_EQ(read(batch).source, "alone");
  EXPECT_EQ(read(batch).world_size, 1);
  EXPECT_EQ(read(without(batch, "SLURM_NTASKS")).source, "alone");  // sbatch without -n
  for (const char* name : {"bash", "interactive"}) {
    EXPECT_EQ(read(with(without(batch, "SLURM_TASK_PID"), "SLURM_JOB_NAME", name)).source, "alone") << name;
  }
}

// A step inside such a job is one all the same.
TEST(LauncherEnv, TasksInAnInteractiveJobOfSlurmMeet) {
  for (const char* name : {"bash", "interactive"}) {
    const LauncherEnv env = read(with(slurm(), "SLURM_JOB_NAME", name));
    EXPECT_EQ(env.source, "Slurm");
    EXPECT_EQ(env.world_size, 8);
  }
}

TEST(LauncherEnv, OpenMpiOnOneHost) {
  const LauncherEnv env = read(open_mpi());
  EXPECT_EQ(env.source, "Open MPI");
  EXPECT_EQ(env.rank, 3);
  EXPECT_EQ(env.world_size, 4);
  EXPECT_EQ(env.local_rank, 3);
  EXPECT_TRUE(env.may_bind_devices);
  EXPECT_EQ(env.master_addr, "127.0.0.1");
  EXPECT_EQ(env.master_port, 29500);
  EXPECT_FALSE(env.launcher_serves_store);
}

TEST(LauncherEnv, PmiOnOneHost) {
  const LauncherEnv env = read(pmi());
  EXPECT_EQ(env.source, "PMI (mpiexec)");
  EXPECT_EQ(env.rank, 3);
  EXPECT_EQ(env.world_size, 4);
  EXPECT_EQ(env.local_rank, 3);
  EXPECT_EQ(env.master_addr, "127.0.0.1");
  EXPECT_EQ(env.master_port, 29500);
}

TEST(LauncherEnv, MpiOnSeveralHostsNeedsTheAddress) {
  const Variables open_mpi_on_two = with(open_mpi(), "OMPI_COMM_WORLD_LOCAL_SIZE", "2");
  const Variables pmi_on_two = with(pmi(), "MPI_LOCALNRANKS", "2");
  expect_error<ValueError>([&] { read(open_mpi_on_two); },
                           "[init] environment has OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, "
                           "OMPI_COMM_WORLD_LOCAL_RANK but not MASTER_ADDR, expected all variables of Open MPI; ",
                           "mpirun -x MASTER_ADDR=HOST");
  expect_error<ValueError>([&] { read(pmi_on_two); },
                           "[init] environment has PMI_RANK, PMI_SIZE, MPI_LOCALRANKID but not MASTER_ADDR, expected "
                           "all variables of PMI (mpiexec); ",
                           "mpiexec -genv MASTER_ADDR HOST");
  // Unknown is not one.
  expect_error<ValueError>([] { read(without(open_mpi(), "OMPI_COMM_WORLD_LOCAL_SIZE")); }, "but not MASTER_ADDR");
  expect_error<ValueError>([] { read(without(pmi(), "MPI_LOCALNRANKS")); }, "but not MASTER_ADDR");
  for (const auto& variables : {open_mpi_on_two, pmi_on_two}) {
    EXPECT_EQ(read(with(variables, "MASTER_ADDR", "n1")).master_addr, "n1");
    EXPECT_EQ(read(with(variables, "MASTER_ADDR", "n1")).master_port, 29500);
    EXPECT_EQ(read(with(with(variables, "MASTER_ADDR", "n1"), "MASTER_PORT", "80")).master_port, 80);
  }
}

TEST(LauncherEnv, JobsThatShareAPortAreToldApart) {
  EXPECT_EQ(read(with(open_mpi(), "PMIX_NAMESPACE", "358940673")).job, "358940673");
  EXPECT_EQ(read(open_mpi()).job, "");
  EXPECT_NE(read(slurm()).job, read(with(slurm(), "SLURM_JOB_ID", "7310042")).job);
  EXPECT_NE(read(slurm()).job, read(with(slurm(), "SLURM_STEP_ID", "1")).job);
}

TEST(LauncherEnv, OneProcessOfMpiMeetsNobody) {
  EXPECT_EQ(read({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}, {"MPI_LOCALRANKID", "0"}}).world_size, 1);
}

TEST(LauncherEnv, TheFirstFamilyDecides) {
  // torchrun inside srun.
  EXPECT_EQ(read(with_all(torchrun(), slurm())).source, "torchrun");
  EXPECT_EQ(read(with_all(torchrun(), slurm())).rank, 3);
  EXPECT_EQ(read(with_all(torchrun(), with_all(open_mpi(), pmi()))).source, "torchrun");
  // srun --mpi=pmi2 sets two of PMI's names as well.
  EXPECT_EQ(read(with_all(slurm(), {{"PMI_RANK", "5"}, {"PMI_SIZE", "8"}})).source, "Slurm");
  EXPECT_EQ(read(with_all(open_mpi(), pmi())).source, "Open MPI");
}

// Every process that mpirun starts in a batch script, or through one task a node, inherits the same rank from Slurm.
TEST(LauncherEnv, MpirunInsideASlurmJobDecides) {
  EXPECT_EQ(read(with_all(slurm(), open_mpi())).source, "Open MPI");
  EXPECT_EQ(read(with_all(slurm(), open_mpi())).rank, 3);
  EXPECT_EQ(read(with_all(slurm(), pmi())).source, "PMI (mpiexec)");
}

struct Missing {
  std::string family;
  Variables complete;
  const char* name;
};

class LauncherEnvMissing : public ::testing::TestWithParam<Missing> {};

TEST_P(LauncherEnvMissing, IsNamed) {
  const auto& [family, complete, name] = GetParam();
  for (const bool empty : {false, true}) {
    const Variables variables = empty ? with(complete, name, "") : without(complete, name);
    expect_error<ValueError>([&] { read(variables); }, "[init] environment has ",
                             std::string(" but not ") + name + ", expected all variables of " + family + "; ");
  }
}

std::vector<Missing> each_missing() {
  std::vector<Missing> all;
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}) {
    all.push_back({"torchrun", torchrun(), name});
  }
  for (const char* name : {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_NODELIST", "SLURM_JOB_ID"}) {
    all.push_back({"Slurm", slurm(), name});
  }
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"}) {
    all.push_back({"Open MPI", open_mpi(), name});
  }
  for (const char* name : {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"}) {
    all.push_back({"PMI (mpiexec)", pmi(), name});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Each, LauncherEnvMissing, ::testing::ValuesIn(each_missing()));

TEST(LauncherEnv, AllMissingVariablesAreNamed) {
  expect_error<ValueError>(
      [] {
        read({{"SLURM_PROCID", "0"}});
      },
      "environment has SLURM_PROCID but not SLURM_NTASKS, SLURM_LOCALID, SLURM_JOB_NODELIST, SLURM_JOB_ID",
      "start the program with srun, or unset SLURM_PROCID and SLURM_LOCALID");
  expect_error<ValueError>(
      [] {
        read({{"OMPI_COMM_WORLD_RANK", "0"}});
      },
      "environment has OMPI_COMM_WORLD_RANK but not OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK", "mpirun");
  // The habit of batch scripts for Python.
  expect_error<ValueError>(
      [] {
        read(with_all(slurm(), {{"WORLD_SIZE", "8"}, {"MASTER_ADDR", "n01"}}));
      },
      "environment has WORLD_SIZE, MASTER_ADDR but not RANK, LOCAL_RANK, MASTER_PORT, expected all "
      "variables of torchrun; start the program with torchrun --no-python, or unset RANK, "
      "WORLD_SIZE and LOCAL_RANK");
  expect_error<ValueError>(
      [] {
        read({{"RANK", "0"}});
      },
      "environment has RANK but not WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT", "torchrun --no-python");
}

struct BadValue {
  Variables complete;
  const char *name, *value, *expected;
};

class LauncherEnvBadValue : public ::testing::TestWithParam<BadValue> {};

TEST_P(LauncherEnvBadValue, IsRefusedWithNameAndValue) {
  const auto& [complete, name, value, expected] = GetParam();
  expect_error<ValueError>(
      [&, &complete = complete, &name = name, &value = value] { read(with(complete, name, value)); },
      std::string("[init] environment variable ") + name + " is ", value, expected);
}

INSTANTIATE_TEST_SUITE_P(Torchrun, LauncherEnvBadValue,
                         ::testing::Values(BadValue{torchrun(), "RANK", "three", "whole number"},
                                           BadValue{torchrun(), "RANK", "3x", "whole number"},
                                           BadValue{torchrun(), "RANK", " 3", "whole number"},
                                           BadValue{torchrun(), "RANK", "1.5", "whole number"},
                                           BadValue{torchrun(), "RANK", "99999999999999999999", "whole number"},
                                           BadValue{torchrun(), "RANK", "-1", "0 to 7"},
                                           BadValue{torchrun(), "RANK", "8", "0 to 7"},
                                           BadValue{torchrun(), "WORLD_SIZE", "0", "1 to"},
                                           BadValue{torchrun(), "WORLD_SIZE", "-4", "1 to"},
                                           BadValue{torchrun(), "LOCAL_RANK", "8", "0 to 7"},
                                           BadValue{torchrun(), "MASTER_PORT", "0", "1 to 65535"},
                                           BadValue{torchrun(), "MASTER_PORT", "65536", "1 to 65535"},
                                           BadValue{torchrun(), "MASTER_PORT", "http", "whole number"},
                                           BadValue{torchrun(), "TORCHELASTIC_RESTART_COUNT", "-1", "0 to"}));

INSTANTIATE_TEST_SUITE_P(
    Slurm, LauncherEnvBadValue,
    ::testing::Values(
        BadValue{slurm(), "SLURM_PROCID", "8", "0 to 7"}, BadValue{slurm(), "SLURM_PROCID", "-1", "0 to 7"},
        BadValue{slurm(), "SLURM_PROCID", "first", "whole number"}, BadValue{slurm(), "SLURM_NTASKS", "0", "1 to"},
        BadValue{slurm(), "SLURM_NTASKS", "2(x4)", "whole number"}, BadValue{slurm(), "SLURM_LOCALID", "8", "0 to 7"},
        BadValue{slurm(), "SLURM_JOB_ID", "12_3", "whole number"}, BadValue{slurm(), "SLURM_JOB_ID", "-2", "0 to"},
        BadValue{slurm(), "MASTER_PORT", "0", "1 to 65535"},
        BadValue{slurm(), "SLURM_JOB_NODELIST", "n[01-04", "expected a node list like n[01-03,7]"},
        BadValue{slurm(), "SLURM_STEP_NODELIST", "n]", "expected a node list like n[01-03,7]"}));

INSTANTIATE_TEST_SUITE_P(Mpi, LauncherEnvBadValue,
                         ::testing::Values(BadValue{open_mpi(), "OMPI_COMM_WORLD_RANK", "4", "0 to 3"},
                                           BadValue{open_mpi(), "OMPI_COMM_WORLD_LOCAL_RANK", "4", "0 to 3"},
                                           BadValue{open_mpi(), "MASTER_PORT", "x", "whole number"},
                                           BadValue{pmi(), "PMI_RANK", "4", "0 to 3"},
                                           BadValue{pmi(), "MPI_LOCALRANKID", "-1", "0 to 3"}));

// ---- Slurm's node lists ----

TEST(SlurmNodeList, FirstNode) {
  for (const auto& [list, first] : std::vector<std::pair<std::string, std::string>>{
           {"a", "a"},
           {"a,b", "a"},
           {"host[5-9]", "host5"},
           {"n[01-03,7]", "n01"},
           {"n[08-11]", "n08"},
           {"n[7,01-03]", "n7"},
           {"n[0100]", "n0100"},
           {"rack[1-2]n[3,5]", "rack1n3"},
           {"rack[2]-n[10-12].cluster.example,login-1", "rack2-n10.cluster.example"},
           {"login-1,n[1-2]", "login-1"},
           {"[1-2]", "1"},
           {"127.0.0.[1-2]", "127.0.0.1"},
           {"n[5-5]", "n5"},
           {"n[1-65536]", "n1"}}) {
    EXPECT_EQ(first_slurm_node("SLURM_JOB_NODELIST", list), first) << list;
  }
}

TEST(SlurmNodeList, RefusesWhatSlurmDoesNotWrite) {
  for (const auto& [list, problem] : std::vector<std::pair<std::string, std::string>>{
           {"", "an empty name"},
           {",a", "an empty name"},
           {"a,", "an empty name"},
           {"a,,b", "an empty name"},
           {"n[1-3", "a bracket that is never closed"},
           {"n[", "a bracket that is never closed"},
           {"n1-3]", "a bracket that was never opened"},
           {"n[1]]", "a bracket that was never opened"},
           {"n[[1-3]]", "a bracket inside a bracket"},
           {"n[3-1]", "range 3-1 runs backwards"},
           {"a,n[03-01]", "range 03-01 runs backwards"},
           {"n[]", "'' in brackets is no number"},
           {"n[1,]", "'' in brackets is no number"},
           {"n[-3]", "'' in brackets is no number"},
           {"n[3-]", "'' in brackets is no number"},
           {"n[a-b]", "'a' in brackets is no number"},
           {"n[1-2-3]", "'2-3' in brackets is no number"},
           {"n[0x1]", "'0x1' in brackets is no number"},
           {"n[1, 2]", "' 2' in brackets is no number"},
           {"n[1-99999999999999999999]", "'99999999999999999999' in brackets is no number"},
           {"n[1-65537]", "range 1-65537 has more than 65536 numbers"},
           {"n[0-18446744073709551615]", "has more than 65536 numbers"},
           {"n 1", "a blank in a name"},
           {"a\tb", "a blank in a name"},
           {"a, b", "a blank in a name"}}) {
    expect_error<ValueError>([&, &text = list] { first_slurm_node("SLURM_JOB_NODELIST", text); },
                             "[init] environment variable SLURM_JOB_NODELIST is '" + list + "': ",
                             problem + ", expected a node list like n[01-03,7]");
  }
}

}  // namespace launcher_env_test
