// Joining and leaving a job, with real processes.
#include "hsdp/init.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "dtensor/error.h"
#include "hsdp/backend.h"
#include "hsdp/launch/backend_builtin.h"
#include "hsdp/launch/device.h"
#include "tests/testing/expect.h"
#include "tests/testing/launcher_variables.h"
#include "tests/testing/multi_process.h"

namespace init_test {

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
        testing_support::forget_launcher();
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
        const bool cuda = hsdp::nccl_backend().missing.empty() && hsdp::device_count(c10::kCUDA) > 0;
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
        InitOptions place = gloo();
        place.local_rank = -1;
        expect_error<ValueError>([&] { hsdp::init(place); }, "[init] local rank -1, expected 0 or more");
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
        if (hsdp::nccl_backend().missing.empty()) {
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

c10::intrusive_ptr<c10d::Store> own_store(const RankContext& context) {
  return c10::make_intrusive<c10d::FileStore>(context.directory() + "/own", context.world_size());
}

TEST_P(InitRanks, BringAGroupOfTheirOwn) {
  run_ranks(
      GetParam(),
      [](RankContext& context) {
        const int n = context.world_size();
        const auto store = own_store(context);
        const auto group =
            hsdp::gloo_backend().make(store, context.rank(), n, std::chrono::seconds(20), c10::Device(c10::kCPU));
        const auto holders = group.use_count();
        ::testing::internal::CaptureStderr();
        const Environment environment = hsdp::init_from(store, group, gloo());
        EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
        EXPECT_EQ(environment.rank(), context.rank());
        EXPECT_EQ(environment.world_size(), n);
        EXPECT_EQ(environment.backend(), "gloo");
        EXPECT_TRUE(environment.device().is_cpu());
        EXPECT_GT(group.use_count(), holders);  // it is this one that carries the collectives
        EXPECT_EQ(sum_of_ranks(*environment.communicator(), context.rank()), n * (n - 1) / 2);
        // Groups of a part of the ranks meet in the store.
        if (n == 4) {
          const auto mesh = environment.make_mesh({2, 2}, {"replicate", "shard"});
          EXPECT_EQ(sum_of_ranks(mesh->communicator(1), context.rank()), context.rank() < 2 ? 1 : 5);
        }
        // As with init(), ranks that never seeded agree.
        const auto mine = torch::randint(0, 1 << 30, {1}, torch::kLong);
        auto all = torch::empty({n}, torch::kLong);
        environment.communicator()->all_gather(all, mine, {"all_gather"})->wait();
        EXPECT_TRUE(torch::equal(all, mine.expand({n})));
      },
      without_environment());
}

struct OddBackend : c10d::Backend {
  OddBackend() : Backend(0, 1) {}
  const std::string getBackendName() const override { return "odd"; }
};

TEST(InitFrom, RefusesGroupsThatDoNotFit) {
  run_ranks(
      1,
      [](RankContext& context) {
        const auto store = own_store(context);
        const auto group = hsdp::gloo_backend().make(store, 0, 1, std::chrono::seconds(20), c10::Device(c10::kCPU));
        const c10::intrusive_ptr<c10d::Backend> odd = c10::make_intrusive<OddBackend>(), none;
        expect_error<ValueError>([&] { hsdp::init_from(store, none); }, "[init_from] no group");
        expect_error<ValueError>([&] { hsdp::init_from(nullptr, group); }, "[init_from] no store beside the group");
        InitOptions options;
        options.backend = "nccl";
        expect_error<ValueError>([&] { hsdp::init_from(store, group, options); },
                                 "[init_from] backend nccl and a group over gloo, expected auto or gloo");
        expect_error<ValueError>([&] { hsdp::init_from(store, odd); }, "[init_from] a group over odd, expected",
                                 "register_backend()");
        EXPECT_EQ(hsdp::init_from(store, group).world_size(), 1);
        expect_error<StateError>([&] { hsdp::init_from(store, group); }, "[init_from]", "call shutdown() before");
      },
      without_environment());
}

TEST(Groups, AreNamedToTheirBackends) {
  run_ranks(
      4,
      [](RankContext& context) {
        static std::vector<c10::intrusive_ptr<c10d::Backend>> made;
        hsdp::register_backend("kept", c10::kMeta, [](const auto& store, auto rank, auto size, auto timeout, auto) {
          made.push_back(hsdp::gloo_backend().make(store, rank, size, timeout, c10::Device(c10::kCPU)));
          return made.back();
        });
        InitOptions options = gloo();
        options.backend = "kept";
        options.local_rank = 0;
        const auto environment = hsdp::init_from(own_store(context), context.rank(), 4, options);
        const auto mesh = environment.make_mesh({2, 2}, {"replicate", "shard"});
        for (int64_t axis : {0, 1}) EXPECT_EQ(mesh->communicator(axis).size(), 2);
        const uint64_t rank = static_cast<uint64_t>(context.rank()), row = rank / 2, column = rank % 2;
        struct Expected {
          std::string name, axis;
          std::vector<uint64_t> ranks;
        };
        const auto joined = [](uint64_t a, uint64_t b) { return std::to_string(a) + "/" + std::to_string(b); };
        const std::vector<Expected> expected{
            {"world", "world", {0, 1, 2, 3}},
            {"group/replicate/" + joined(column, column + 2) + "/use_0", "replicate", {column, column + 2}},
            {"group/shard/" + joined(2 * row, 2 * row + 1) + "/use_0", "shard", {2 * row, 2 * row + 1}}};
        ASSERT_EQ(made.size(), expected.size());
        for (size_t i = 0; i < made.size(); ++i) {
          EXPECT_EQ(made[i]->getGroupUid(), expected[i].name);
          EXPECT_EQ(made[i]->getGroupDesc(), expected[i].axis);
          const auto seen = made[i]->getBackendOptions();
          EXPECT_EQ(seen->group_name, expected[i].name);
          EXPECT_EQ(seen->global_ranks_in_group, expected[i].ranks);
        }
        made.clear();
      },
      without_environment());
}

TEST(InitFrom, TakesTheLocalRankFromTheOptions) {
  run_ranks(
      2,
      [](RankContext& context) {
        InitOptions options = gloo();
        options.local_rank = 3 - context.rank();
        const Environment environment = hsdp::init_from(own_store(context), context.rank(), 2, options);
        EXPECT_EQ(environment.rank(), context.rank());
        EXPECT_EQ(environment.local_rank(), 3 - context.rank());
      },
      without_environment());
}

// One device a process is what srun and mpirun show when they bind devices. libtorch counts one meta device.
TEST(InitDevice, OfABoundProcessIsTheVisibleOne) {
  const int port = testing_support::free_port();
  run_ranks(
      2,
      [port](RankContext& context) {
        testing_support::forget_launcher();
        hsdp::register_backend("one_device", c10::kMeta,
                               [](const auto& store, auto rank, auto size, auto timeout, auto) {
                                 return hsdp::gloo_backend().make(store, rank, size, timeout, c10::Device(c10::kCPU));
                               });
        InitOptions options = gloo();
        options.backend = "one_device";
        if (context.rank() == 1) {
          pose_as_torchrun(context, port);
          expect_error<ValueError>([&] { hsdp::init(options); }, "[init] local rank 1 but 1 visible META devices");
          testing_support::forget_launcher();
        }
        set("SLURM_PROCID", std::to_string(context.rank()));
        set("SLURM_LOCALID", std::to_string(context.rank()));
        set("SLURM_NTASKS", "2");
        set("MASTER_ADDR", "127.0.0.1");
        set("MASTER_PORT", std::to_string(port));
        const Environment environment = hsdp::init(options);
        EXPECT_EQ(environment.local_rank(), context.rank());
        EXPECT_EQ(environment.device().str(), "meta:0");
        hsdp::shutdown();
        // A place that the program names is taken at its word.
        options.local_rank = 1;
        expect_error<ValueError>([&] { hsdp::init(options); }, "[init] local rank 1 but 1 visible META devices");
      },
      without_environment());
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
        EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(120));
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

TEST(InitFailure, ThePortIsTaken) {
  run_ranks(
      1,
      [](RankContext&) {
        c10d::TCPStoreOptions other;
        other.port = 0;  // any that is free
        other.isServer = true;
        other.waitWorkers = false;
        const auto other_job = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", other);
        const std::string port = std::to_string(other_job->getPort());
        testing_support::forget_launcher();
        set("PMI_RANK", "0");
        set("PMI_SIZE", "2");
        set("MPI_LOCALRANKID", "0");
        set("MPI_LOCALNRANKS", "2");
        set("MASTER_PORT", port);
        expect_error<CommunicationError>([] { hsdp::init(gloo(std::chrono::milliseconds(2000))); },
                                         "[init] the store at 127.0.0.1:" + port + " failed on rank 0 of 2",
                                         "; another job uses the port, set MASTER_PORT to a free one on every rank");
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
        expect_error<CommunicationError>([&] { environment.barrier("epoch"); }, "[barrier] epoch, ",
                                         " bytes over gloo");
        expect_error<CommunicationError>([] { hsdp::shutdown(); }, "[barrier] shutdown");
      },
      options);
}

}  // namespace init_test
