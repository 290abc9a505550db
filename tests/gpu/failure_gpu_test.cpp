// What ranks on several GPUs are told when one of them does something else, nothing, or dies.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>
#ifdef USE_C10D_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include "dtensor/communicator.h"
#include "dtensor/error.h"
#include "hsdp/hsdp.h"
#include "tests/gpu/device.h"
#include "tests/testing/blocks.h"

namespace {

using namespace testing_support;
using dtensor::ReduceOp;
using ::testing::HasSubstr;

constexpr auto kTimeout = std::chrono::seconds(10);
const GpuRunOptions kImpatient{.communication_timeout = kTimeout};

/// The text of the CommunicationError that `call` ends in sooner or later; empty when it does not within a minute. The
/// host sees what a device does not do only afterwards, so the call is repeated.
std::string error_of_repeated(const std::function<void()>& call) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (std::chrono::steady_clock::now() < end) {
    try {
      call();
    } catch (const dtensor::CommunicationError& error) {
      return error.what();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return {};
}

/// Ends this rank at once. What NCCL has in flight would keep a proper end waiting.
[[noreturn]] void leave() {
  std::cout.flush();
  std::_Exit(::testing::Test::HasFailure() ? 1 : 0);
}

void wait_for_file(const std::string& path) {
  while (!std::filesystem::exists(path)) std::this_thread::sleep_for(std::chrono::milliseconds(20));
}

TEST(SeveralGpus, UnlikeCallsAreNamedWhereCallsAreCompared) {
  HSDP_REQUIRE_GPUS(2);
  run_on_gpus(2, Place::own_gpu,
              [](RankContext& context) {
                auto& communicator = *context.environment().communicator();
                const auto device = context.environment().device();
                const auto one = torch::ones({4}, device), two = torch::ones({8}, device);
                std::string text;
                try {
                  if (context.rank() == 0) {
                    communicator.all_reduce(one, ReduceOp::sum, {"all_reduce", "loss"})->wait();
                  } else {
                    communicator.all_gather(two, one, {"all_gather", "blocks.3"})->wait();
                  }
                } catch (const dtensor::CommunicationError& error) {
                  text = error.what();
                }
                EXPECT_THAT(text, HasSubstr(context.rank() == 0 ? "[all_reduce] loss" : "[all_gather] blocks.3"));
                EXPECT_THAT(text, HasSubstr(context.rank() == 0 ? "all_gather" : "all_reduce"));
                EXPECT_THAT(text, HasSubstr("expected the same call on all ranks"));
              },
              {.variables = {{"HSDP_DEBUG_COLLECTIVES", "1"}}});
}

TEST(SeveralGpus, ACollectiveThatOneRankLeavesOutIsNamed) {
  HSDP_REQUIRE_GPUS(2);
  run_on_gpus(
      2, Place::own_gpu,
      [](RankContext& context) {
        auto& communicator = *context.environment().communicator();
        const auto tensor = torch::ones({256}, context.environment().device());
        communicator.all_reduce(tensor, ReduceOp::sum, {"all_reduce", "together"})->wait();
        synchronize(context.environment().device());
        const std::string done = context.directory() + "/done";
        if (context.rank() == 1) {
          wait_for_file(done);
          leave();
        }
        const auto text = error_of_repeated([&] {
          communicator.all_reduce(tensor, ReduceOp::sum, {"all_reduce", "alone"})->wait();
        });
        EXPECT_THAT(text, HasSubstr("[all_reduce] alone, 1,024 bytes over"));
        EXPECT_THAT(text, HasSubstr("(rank 0 of 2) failed after"));
        EXPECT_THAT(text, HasSubstr("(timeout 10 s)"));
        if (::testing::Test::HasFailure()) std::cout << "rank 0 was told: " << text << std::endl;
        std::filesystem::create_directory(done);
        leave();
      },
      kImpatient);
}

TEST(SeveralGpus, ARankThatDiesInTrainingIsAnErrorOfTheOthers) {
  HSDP_REQUIRE_GPUS(2);
  auto options = kImpatient;
  options.killed = {1};
  run_on_gpus(
      2, Place::own_gpu,
      [](RankContext& context) {
        const auto device = context.environment().device();
        auto net = hsdp::meta_init([] { return Blocks(3, 8); });
        auto model = hsdp::fully_shard(net, {.mesh = context.environment().mesh(), .units = hsdp::each("blocks.*")});
        model.materialize(device);
        const auto x = torch::ones({2, 8}, device);
        const auto step = [&] {
          model->forward(x).sum().backward();
          net->zero_grad();
        };
        for (int i = 0; i < 3; ++i) step();
        synchronize(device);
        if (context.rank() == 1) context.kill_self();
        const auto text = error_of_repeated(step);
        EXPECT_THAT(text, HasSubstr("(rank 0 of 2) failed after"));
        EXPECT_THAT(text, HasSubstr("a rank failed, left, or did not make the same call"));
        if (::testing::Test::HasFailure()) std::cout << "rank 0 was told: " << text << std::endl;
        leave();
      },
      options);
}

#ifdef USE_C10D_NCCL
/// Name and ranks of the group of that axis, as a dump of torch's flight recorder says, and the collectives that it
/// recorded of it, with the numbers of elements that they took in.
struct RecordedGroup {
  std::set<std::string> names;
  std::string ranks;
  std::set<std::pair<std::string, int64_t>> operations;
};
RecordedGroup recorded_group(const nlohmann::json& dump, const std::string& axis) {
  RecordedGroup group;
  for (const auto& [name, config] : dump.at("pg_config").items()) {
    if (config.at("desc") != axis) continue;
    group.names.insert(name);
    group.ranks += config.at("ranks");
  }
  for (const auto& entry : dump.at("entries")) {
    if (entry.at("process_group").at(1) != axis) continue;
    group.names.insert(entry.at("process_group").at(0));
    for (const auto& shape : entry.at("input_sizes")) {
      if (shape.size() == 1) group.operations.emplace(entry.at("profiling_name"), shape.at(0));
    }
  }
  return group;
}
#endif

class FlightRecorder : public ::testing::TestWithParam<int> {};

// What torch's watchdog writes when a collective does not end.
TEST_P(FlightRecorder, TellsGroupsAndOperationsApart) {
  HSDP_REQUIRE_GPUS(GetParam());
  HSDP_REQUIRE_REAL_GPU("the flight recorder of NCCL's groups");
#ifdef USE_C10D_NCCL
  run_on_gpus(GetParam(), Place::own_gpu,
              [](RankContext& context) {
                auto& environment = context.environment();
                std::vector<std::pair<std::string, std::string>> groups;  // axes, and this rank's group there
                const auto reduce = [&](dtensor::Communicator& communicator, const std::string& axis,
                                        const std::string& ranks) {
                  groups.emplace_back(axis, ranks);
                  const auto tensor = torch::ones({static_cast<int64_t>(100 + groups.size())}, environment.device());
                  communicator.all_reduce(tensor, ReduceOp::sum, {"all_reduce", axis})->wait();
                };
                const int rank = context.rank();
                reduce(*environment.communicator(), "world", GetParam() == 2 ? "[0, 1]" : "[0, 1, 2, 3]");
                if (GetParam() == 4) {
                  const auto mesh = mesh_of(context, {2, 2});
                  reduce(mesh->communicator(0), "replicate", rank % 2 == 0 ? "[0, 2]" : "[1, 3]");
                  reduce(mesh->communicator(1), "shard", rank < 2 ? "[0, 1]" : "[2, 3]");
                }
                synchronize(environment.device());
                const auto text = c10d::dump_nccl_trace_json(/*includeCollectives=*/true, /*onlyActive=*/false);
                const auto dump = nlohmann::json::parse(text);
                std::set<std::string> names;
                int64_t elements = 100;
                for (const auto& [axis, ranks] : groups) {
                  const auto group = recorded_group(dump, axis);
                  EXPECT_EQ(group.names.size(), 1u) << axis;
                  names.insert(group.names.begin(), group.names.end());
                  EXPECT_EQ(group.ranks, ranks) << axis;
                  EXPECT_EQ(group.operations.count({"nccl:all_reduce", ++elements}), 1u) << axis;
                }
                EXPECT_EQ(names.size(), groups.size()) << "groups of one name";
                if (::testing::Test::HasFailure()) std::cout << "rank " << rank << " recorded " << text << std::endl;
              },
              {.variables = {{"TORCH_FR_BUFFER_SIZE", "100"}, {"TORCH_NCCL_TRACE_BUFFER_SIZE", "100"}}});
#else
  GTEST_SKIP() << "a build without NCCL";
#endif
}
INSTANTIATE_TEST_SUITE_P(Ranks, FlightRecorder, ::testing::Values(2, 4), ::testing::PrintToStringParamName());

}  // namespace
