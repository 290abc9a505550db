// Joining and leaving a job, with real processes.
#include "hsdp/init.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "dtensor/error.h"
#include "hsdp/launch/backend.h"
#include "hsdp/launch/device.h"
#include "tests/testing/expect.h"
#include "tests/testing/multi_process.h"

namespace {

using namespace dtensor;
using hsdp::Environment;
using hsdp::InitOptions;
using testing_support::expect_error;
using testing_support::RankContext;
using testing_support::run_ranks;
using testing_support::RunOptions;

void set(const char* name, const std::string& value) { setenv(name, value.c_str(), 1); }

/// What a launcher would set. The port was free a moment ago.
void pose_as_torchrun(const RankContext& context, int port) {
  set("RANK", std::to_string(context.rank()));
  set("LOCAL_RANK", std::to_string(context.rank()));
  set("WORLD_SIZE", std::to_string(context.world_size()));
  set("MASTER_ADDR", "127.0.0.1");
  set("MASTER_PORT", std::to_string(port));
}

InitOptions gloo(std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  InitOptions options;
  options.backend = "gloo";
  options.timeout = timeout;
  return options;
}

RunOptions without_environment() {
  RunOptions options;
  options.make_environment = false;
  return options;
}

double sum_of_ranks(Communicator& group, int rank) {
  const auto tensor = torch::full({1}, rank, torch::kDouble);
  group.all_reduce(tensor, ReduceOp::sum, {"all_reduce"})->wait();
  return tensor.item<double>();
}

TEST(Init, AloneIsAWorldOfOne) {
  run_ranks(
      1,
      [](RankContext&) {
        for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK"}) unsetenv(name);
        ::testing::internal::CaptureStderr();
        const Environment environment = hsdp::init(gloo());
        EXPECT_EQ(::testing::internal::GetCapturedStderr(), "hsdp: 1 rank, alone, cpu\n");
        EXPECT_EQ(environment.rank(), 0);
        EXPECT_EQ(environment.world_size(), 1);
        EXPECT_EQ(environment.local_rank(), 0);
        EXPECT_EQ(environment.backend(), "none");
        EXPECT_TRUE(environment.device().is_cpu());
        EXPECT_EQ(environment.mesh()->to_string(), "mesh(cpu, shard=1)");
        EXPECT_EQ(environment.communicator()->describe(), "self, rank 0 of 1");
        EXPECT_EQ(environment.make_mesh({1, 1}, {"replicate", "shard"})->communicator(0).size(), 1);
        environment.barrier();
      },
      without_environment());
}

TEST(Init, IsIdempotentUntilShutdown) {
  run_ranks(
      1,
      [](RankContext&) {
        expect_error<StateError>([] { hsdp::current_environment(); }, "[current_environment]",
                                 "call hsdp::init() first");
        hsdp::shutdown();  // nothing to do yet
        const Environment first = hsdp::init(gloo());
        EXPECT_EQ(hsdp::init(gloo()).mesh(), first.mesh());
        EXPECT_EQ(hsdp::current_environment().mesh(), first.mesh());
        expect_error<StateError>([] { hsdp::init(gloo(std::chrono::seconds(5))); },
                                 "[init] called again with backend gloo and timeout 5 s, first with gloo and 20 s");
        expect_error<StateError>([] { hsdp::init_from(nullptr, 0, 1); }, "[init_from]", "call shutdown() before");
        hsdp::shutdown();
        EXPECT_NE(hsdp::init(gloo(std::chrono::seconds(5))).mesh(), first.mesh());
        EXPECT_EQ(first.mesh()->size(), 1);  // a handle outlives the shutdown
      },
      without_environment());
}

TEST(Init, AutoTrainsOnADeviceWhereOneIsVisible) {
  run_ranks(
      1,
      [](RankContext&) {
        const bool cuda = hsdp::nccl_available() && hsdp::cuda_device_count() > 0;
        const Environment environment = hsdp::init();
        EXPECT_EQ(environment.device().str(), cuda ? "cuda:0" : "cpu");
        EXPECT_GT(hsdp::peak_memory_bytes(c10::Device(c10::kCPU)), 1 << 20);
      },
      without_environment());
}

TEST(Init, RefusesBadOptions) {
  run_ranks(
      1,
      [](RankContext&) {
        InitOptions options = gloo();
        options.backend = "mpi";
        expect_error<ValueError>([&] { hsdp::init(options); }, "[init] backend 'mpi', expected auto, gloo or nccl");
        expect_error<ValueError>([] { hsdp::init(gloo(std::chrono::seconds(0))); }, "[init] timeout 0 s");
        expect_error<ValueError>([] { hsdp::init_from(nullptr, 2, 2, gloo()); }, "[init_from] rank 2 of 2");
        expect_error<ValueError>([] { hsdp::init_from(nullptr, 0, 2, gloo()); }, "[init_from] no store for 2 ranks");
        set("RANK", "0");
        expect_error<ValueError>([] { hsdp::init(gloo()); }, "[init] environment has RANK but not WORLD_SIZE");
        // A refused call leaves nothing behind.
        unsetenv("RANK");
        EXPECT_EQ(hsdp::init(gloo()).world_size(), 1);
      },
      without_environment());
}

TEST(Init, RefusesNcclWithoutADeviceForTheRank) {
  run_ranks(
      1,
      [](RankContext&) {
        InitOptions options;
        options.backend = "nccl";
        set("LOCAL_RANK", "63");
        set("RANK", "63");
        set("WORLD_SIZE", "64");
        set("MASTER_ADDR", "127.0.0.1");
        set("MASTER_PORT", "29400");
        if (hsdp::nccl_available()) {
          expect_error<ValueError>([&] { hsdp::init(options); }, "[init] local rank 63 but ", "visible CUDA devices");
        } else {
          expect_error<NotSupportedError>([&] { hsdp::init(options); }, "[init] backend nccl in a build without NCCL");
        }
      },
      without_environment());
}

class InitRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, InitRanks, ::testing::Values(2, 3, 4));

TEST_P(InitRanks, MeetThroughTheLaunchersAddress) {
  const int port = testing_support::free_port();
  run_ranks(
      GetParam(),
      [port](RankContext& context) {
        pose_as_torchrun(context, port);
        ::testing::internal::CaptureStderr();
        const Environment environment = hsdp::init(gloo());
        const std::string expected =
            "hsdp: " + std::to_string(context.world_size()) + " ranks from torchrun, gloo, cpu\n";
        EXPECT_EQ(::testing::internal::GetCapturedStderr(), context.rank() == 0 ? expected : "");
        EXPECT_EQ(environment.rank(), context.rank());
        EXPECT_EQ(environment.local_rank(), context.rank());
        EXPECT_EQ(environment.world_size(), context.world_size());
        EXPECT_EQ(environment.backend(), "gloo");
        EXPECT_EQ(std::signal(SIGPIPE, SIG_IGN), SIG_IGN);  // what was set before
        EXPECT_EQ(environment.communicator()->describe(), "gloo, axis shard, rank " + std::to_string(context.rank()) +
                                                              " of " + std::to_string(context.world_size()));
        const int n = context.world_size();
        EXPECT_EQ(sum_of_ranks(*environment.communicator(), context.rank()), n * (n - 1) / 2);
      },
      without_environment());
}

TEST_P(InitRanks, MeetInAStoreOfTheirOwn) {
  for (const auto store : {RunOptions::Store::file, RunOptions::Store::tcp}) {
    RunOptions options;
    options.store = store;
    run_ranks(
        GetParam(),
        [](RankContext& context) {
          const int n = context.world_size();
          EXPECT_EQ(sum_of_ranks(*context.environment().communicator(), context.rank()), n * (n - 1) / 2);
          EXPECT_EQ(hsdp::current_environment().mesh(), context.environment().mesh());
        },
        options);
  }
}

// {2, 2}: rank r sits at (r / 2, r % 2); its groups are the ranks of the same column and of the same row.
TEST(InitMesh, EveryAxisHasItsOwnGroups) {
  run_ranks(4, [](RankContext& context) {
    const auto mesh = context.environment().make_mesh({2, 2}, {"replicate", "shard"});
    const int row = context.rank() / 2, column = context.rank() % 2;
    EXPECT_EQ(mesh->coordinate(), (std::vector<int64_t>{row, column}));
    EXPECT_EQ(mesh->communicator(0).describe(), "gloo, axis replicate, rank " + std::to_string(row) + " of 2");
    EXPECT_EQ(mesh->communicator(1).describe(), "gloo, axis shard, rank " + std::to_string(column) + " of 2");
    EXPECT_EQ(sum_of_ranks(mesh->communicator(0), context.rank()), 2 * column + 2);
    EXPECT_EQ(sum_of_ranks(mesh->communicator(1), context.rank()), 4 * row + 1);
    // The same mesh again has groups of its own.
    const auto again = context.environment().make_mesh({2, 2}, {"replicate", "shard"});
    EXPECT_NE(again->shared_communicator(0), mesh->shared_communicator(0));
    EXPECT_EQ(sum_of_ranks(again->communicator(0), context.rank()), 2 * column + 2);
    EXPECT_EQ(sum_of_ranks(mesh->communicator(1), context.rank()), 4 * row + 1);
  });
}

TEST(InitMesh, AnAxisOverAllRanksUsesTheWorld) {
  run_ranks(3, [](RankContext& context) {
    const auto mesh = context.environment().make_mesh({1, 3}, {"replicate", "shard"});
    EXPECT_EQ(mesh->communicator(0).size(), 1);
    EXPECT_EQ(sum_of_ranks(mesh->communicator(1), context.rank()), 3);
  });
}

TEST(InitMesh, RefusesSizesThatDoNotFitTheWorld) {
  run_ranks(2, [](RankContext& context) {
    const auto& environment = context.environment();
    expect_error<ValueError>(
        [&] {
          environment.make_mesh({2, 4}, {"replicate", "shard"});
        },
        "[make_mesh] mesh(cpu, replicate=2, shard=4) has 8 ranks and the world 2");
    expect_error<ValueError>([&] { environment.make_mesh({1}, {"shard"}); }, "has 1 ranks and the world 2");
    expect_error<ValueError>([&] { environment.make_mesh({2}, {"a", "b"}); }, "[DeviceMesh] 2 names for 1 axes");
    EXPECT_EQ(sum_of_ranks(*environment.communicator(), context.rank()), 1);
  });
}

TEST(InitFailure, AMissingRankEndsTheOthersWithinTheTimeout) {
  const int port = testing_support::free_port();
  RunOptions options = without_environment();
  options.killed = {2};
  run_ranks(
      3,
      [port](RankContext& context) {
        if (context.rank() == 2) context.kill_self();
        pose_as_torchrun(context, port);
        const auto start = std::chrono::steady_clock::now();
        expect_error<CommunicationError>([] { hsdp::init(gloo(std::chrono::milliseconds(2000))); }, "[init] ",
                                         " of 3 (timeout 2 s): ", "every rank must start");
        EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
      },
      options);
}

TEST(InitFailure, NobodyListens) {
  const int port = testing_support::free_port();
  run_ranks(
      1,
      [port](RankContext&) {
        set("RANK", "1");
        set("LOCAL_RANK", "1");
        set("WORLD_SIZE", "2");
        set("MASTER_ADDR", "127.0.0.1");
        set("MASTER_PORT", std::to_string(port));
        ::testing::internal::CaptureStderr();
        expect_error<CommunicationError>(
            [] { hsdp::init(gloo(std::chrono::milliseconds(2000))); },
            "[init] the store at 127.0.0.1:" + std::to_string(port) + " failed on rank 1 of 2 (timeout 2 s): ");
        EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");  // the error is the only report
      },
      without_environment());
}

// The rank that leaves first must not take anything with it that the others still need to notice.
TEST(InitFailure, ARankThatEndsLeavesTheOthersWithAnError) {
  const int port = testing_support::free_port();
  RunOptions options = without_environment();
  options.killed = {0};
  run_ranks(
      3,
      [port](RankContext& context) {
        pose_as_torchrun(context, port);
        const Environment environment = hsdp::init(gloo(std::chrono::seconds(5)));
        if (context.rank() == 0) context.kill_self();
        expect_error<CommunicationError>([&] { environment.barrier("epoch"); }, "[barrier] epoch, 4 bytes over gloo");
        expect_error<CommunicationError>([] { hsdp::shutdown(); }, "[barrier] shutdown");
      },
      options);
}

}  // namespace
