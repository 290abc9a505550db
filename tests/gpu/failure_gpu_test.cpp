// What ranks on several GPUs are told when one of them does something else, nothing, or dies.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iostream>
#include <string>
#include <thread>

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

}  // namespace
