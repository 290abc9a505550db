#include "hsdp/launch/launcher_env.h"

#include <gtest/gtest.h>

#include <map>

#include "dtensor/error.h"
#include "tests/testing/expect.h"

namespace {

using dtensor::ValueError;
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

class LauncherEnvMissing : public ::testing::TestWithParam<const char*> {};

TEST_P(LauncherEnvMissing, IsNamed) {
  for (const bool empty : {false, true}) {
    Variables variables = torchrun();
    variables.erase(GetParam());
    if (empty) variables[GetParam()] = "";
    expect_error<ValueError>([&] { read(variables); }, "[init] environment has ",
                             std::string(" but not ") + GetParam() + ", expected all variables of torchrun");
  }
}

INSTANTIATE_TEST_SUITE_P(Each, LauncherEnvMissing,
                         ::testing::Values("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"));

TEST(LauncherEnv, AllMissingVariablesAreNamed) {
  expect_error<ValueError>(
      [] {
        read({{"RANK", "0"}});
      },
      "environment has RANK but not WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT", "torchrun --no-python");
}

struct BadValue {
  const char *name, *value, *expected;
};

class LauncherEnvBadValue : public ::testing::TestWithParam<BadValue> {};

TEST_P(LauncherEnvBadValue, IsRefusedWithNameAndValue) {
  const auto& [name, value, expected] = GetParam();
  expect_error<ValueError>([&] { read(with(torchrun(), name, value)); },
                           std::string("[init] environment variable ") + name + " is ", value, expected);
}

INSTANTIATE_TEST_SUITE_P(
    All, LauncherEnvBadValue,
    ::testing::Values(BadValue{"RANK", "three", "whole number"}, BadValue{"RANK", "3x", "whole number"},
                      BadValue{"RANK", " 3", "whole number"}, BadValue{"RANK", "1.5", "whole number"},
                      BadValue{"RANK", "99999999999999999999", "whole number"}, BadValue{"RANK", "-1", "0 to 7"},
                      BadValue{"RANK", "8", "0 to 7"}, BadValue{"WORLD_SIZE", "0", "1 to"},
                      BadValue{"WORLD_SIZE", "-4", "1 to"}, BadValue{"LOCAL_RANK", "8", "0 to 7"},
                      BadValue{"MASTER_PORT", "0", "1 to 65535"}, BadValue{"MASTER_PORT", "65536", "1 to 65535"},
                      BadValue{"MASTER_PORT", "http", "whole number"},
                      BadValue{"TORCHELASTIC_RESTART_COUNT", "-1", "0 to"}));

}  // namespace
