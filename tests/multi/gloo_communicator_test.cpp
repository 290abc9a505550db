// Collectives between real processes over Gloo.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <thread>

#include "dtensor/communicator.h"
#include "dtensor/error.h"
#include "tests/testing/expect.h"
#include "tests/testing/multi_process.h"

namespace gloo_communicator_test {

using namespace dtensor;
using testing_support::expect_error;
using testing_support::RankContext;
using testing_support::run_ranks;
using testing_support::RunOptions;

const std::vector<at::ScalarType> kReducible = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

class GlooCommunicator : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, GlooCommunicator, ::testing::Values(1, 2, 3, 4));

// Rank r contributes r * 10 + 0, 1, 2.
TEST_P(GlooCommunicator, AllGather) {
  run_ranks(GetParam(), [](RankContext& context) {
    auto& group = *context.environment().communicator();
    EXPECT_EQ(group.rank(), context.rank());
    EXPECT_EQ(group.size(), context.world_size());
    auto dtypes = kReducible;
    dtypes.insert(dtypes.end(), {at::kBool, at::kByte});
    for (const auto dtype : dtypes) {
      const auto row = [&](int64_t rank) { return torch::arange(3, torch::kLong).add(10 * rank).to(dtype); };
      std::vector<at::Tensor> rows;
      for (int rank = 0; rank < context.world_size(); ++rank) rows.push_back(row(rank));
      const auto expected = torch::cat(rows);
      auto output = torch::zeros({3 * context.world_size()}, dtype);
      const auto input = row(context.rank());
      const auto work = group.all_gather(output, input, {"all_gather"});
      work->wait();
      EXPECT_TRUE(work->is_completed());
      EXPECT_TRUE(torch::equal(output, expected)) << dtype;
      EXPECT_EQ(output._version(), 0u);
      // The input as this rank's slice of the output.
      auto whole = torch::zeros({3 * context.world_size()}, dtype);
      const auto slice = whole.narrow(0, 3 * context.rank(), 3);
      slice.copy_(input);
      group.all_gather(whole, slice, {"all_gather"})->wait();
      EXPECT_TRUE(torch::equal(whole, expected)) << dtype;
    }
  });
}

// Element j of rank r is (r + 1) * j, so the sum over n ranks is j * n * (n + 1) / 2.
TEST_P(GlooCommunicator, ReduceScatter) {
  run_ranks(GetParam(), [](RankContext& context) {
    auto& group = *context.environment().communicator();
    const int64_t n = context.world_size();
    for (const auto dtype : kReducible) {
      const auto index = torch::arange(2 * n, torch::kLong);
      const auto input = index.mul(context.rank() + 1).to(dtype);
      const auto before = input.clone();
      const auto output = torch::full({2}, -1, dtype);
      group.reduce_scatter(output, input, {"reduce_scatter"})->wait();
      const auto expected = index.mul(n * (n + 1) / 2).to(dtype).narrow(0, 2 * context.rank(), 2);
      EXPECT_TRUE(torch::equal(output, expected)) << dtype << output;
      EXPECT_TRUE(torch::equal(input, before)) << "the input changed";
      EXPECT_EQ(output._version(), 0u);
    }
  });
}

TEST_P(GlooCommunicator, AllReduceBroadcastAndBarrier) {
  run_ranks(GetParam(), [](RankContext& context) {
    auto& group = *context.environment().communicator();
    const int64_t n = context.world_size();
    for (const auto dtype : kReducible) {
      const auto value = [&](int64_t v) { return torch::full({5}, v, dtype); };
      const auto reduced = [&](ReduceOp op) {
        const auto tensor = value(context.rank() + 1);
        group.all_reduce(tensor, op, {"all_reduce"})->wait();
        return tensor;
      };
      EXPECT_TRUE(torch::equal(reduced(ReduceOp::sum), value(n * (n + 1) / 2))) << dtype;
      EXPECT_TRUE(torch::equal(reduced(ReduceOp::max), value(n))) << dtype;
      EXPECT_TRUE(torch::equal(reduced(ReduceOp::min), value(1))) << dtype;
      for (int64_t root = 0; root < n; ++root) {
        const auto tensor = value(context.rank() + 1);
        group.broadcast(tensor, root, {"broadcast"})->wait();
        EXPECT_TRUE(torch::equal(tensor, value(root + 1))) << dtype;
      }
    }
    group.barrier({"barrier", "test"});
  });
}

TEST(GlooGroup, HalfPrecisionSumsAreRoundedOnce) {
  // 256 + 1 + 1 + 1 is 259, which rounds to 260: bfloat16 steps by 2 there, and adding one at a time would stay at 256.
  run_ranks(4, [](RankContext& context) {
    const auto input = torch::full({4}, context.rank() == 0 ? 256 : 1, torch::kBFloat16);
    const auto output = torch::zeros({1}, torch::kBFloat16);
    context.environment().communicator()->reduce_scatter(output, input, {"reduce_scatter"})->wait();
    EXPECT_EQ(output.item<float>(), 260);
  });
}

TEST(GlooGroup, ManyInFlightFinishInAnyOrder) {
  run_ranks(3, [](RankContext& context) {
    auto& group = *context.environment().communicator();
    std::vector<at::Tensor> outputs;
    std::vector<std::shared_ptr<Work>> works;
    for (int i = 0; i < 20; ++i) {
      outputs.push_back(torch::zeros({3}));
      works.push_back(group.all_gather(outputs.back(), torch::full({1}, 10.f * i + context.rank()), {"all_gather"}));
    }
    for (int i = 19; i >= 0; --i) {
      works[i]->wait();
      EXPECT_TRUE(torch::equal(outputs[i], torch::tensor({10.f * i, 10.f * i + 1, 10.f * i + 2})));
    }
  });
}

TEST(GlooGroup, ADroppedWorkIsFinishedAndItsTensorsLiveUntilThen) {
  run_ranks(2, [](RankContext& context) {
    auto& group = *context.environment().communicator();
    auto kept = torch::zeros({2});
    { group.all_gather(kept, torch::full({1}, 1.f + context.rank()), {"all_gather"}); }
    EXPECT_TRUE(torch::equal(kept, torch::tensor({1.f, 2.f})));
    { group.reduce_scatter(torch::zeros({1000}), torch::ones({2000}), {"reduce_scatter"}); }
    { group.all_reduce(torch::ones({1000}), ReduceOp::sum, {"all_reduce"}); }
    group.barrier({"barrier"});
  });
}

TEST(GlooGroup, AFinishedWorkKeepsNothingAlive) {
  run_ranks(2, [](RankContext& context) {
    auto& group = *context.environment().communicator();
    auto input = torch::ones({2}), output = torch::zeros({1});
    const auto storage = input.storage().getWeakStorageImpl();
    const auto work = group.reduce_scatter(output, input, {"reduce_scatter"});
    input.reset();
    EXPECT_FALSE(storage.expired());
    work->wait();
    // Gloo's thread lets go of its own reference a moment after the work is done.
    for (int i = 0; i < 6000 && !storage.expired(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    EXPECT_TRUE(storage.expired());
  });
}

TEST(GlooGroup, StartedGroupsEndTogether) {
  run_ranks(2, [](RankContext& context) {
    auto& group = *context.environment().communicator();
    EXPECT_FALSE(group.prefers_groups());
    reset_collective_counts();
    const auto gathered = torch::zeros({2}), reduced = torch::zeros({1});
    group.start_group();
    const auto member = group.all_gather(gathered, torch::full({1}, 1.f + context.rank()), {"all_gather", "a"});
    group.reduce_scatter(reduced, torch::ones({2}), {"reduce_scatter", "b"});
    expect_error<StateError>([&] { member->wait(); }, "wait for the work that end_group() returns");
    expect_error<StateError>([&] { group.start_group(); }, "a group is open already");
    group.end_group()->wait();
    EXPECT_TRUE(torch::equal(gathered, torch::tensor({1.f, 2.f})));
    EXPECT_EQ(reduced.item<float>(), 2);
    expect_error<StateError>([&] { group.end_group(); }, "no group is open");
    group.start_group();
    group.end_group()->wait();
    EXPECT_EQ(collective_counts().all_gathers, 1);
    EXPECT_EQ(collective_counts().reduce_scatters, 1);
  });
}

TEST(GlooGroup, CountsCollectivesAndBytesOfTheLargerSide) {
  run_ranks(2, [](RankContext& context) {
    auto& group = *context.environment().communicator();
    reset_collective_counts();
    group.all_gather(torch::zeros({6}), torch::zeros({3}), {"all_gather"})->wait();
    group.all_gather(torch::zeros({0}), torch::zeros({0}), {"all_gather"})->wait();
    group.reduce_scatter(torch::zeros({3}, torch::kDouble), torch::zeros({6}, torch::kDouble), {"reduce_scatter"})
        ->wait();
    group.all_reduce(torch::zeros({5}), ReduceOp::max, {"all_reduce"})->wait();
    group.broadcast(torch::zeros({5}), 0, {"broadcast"})->wait();
    group.barrier({"barrier"});
    group.barrier({"barrier"});
    const CollectiveCounts counts = collective_counts();
    EXPECT_EQ(counts.all_gathers, 1);
    EXPECT_EQ(counts.all_gather_bytes, 24);
    EXPECT_EQ(counts.reduce_scatters, 1);
    EXPECT_EQ(counts.reduce_scatter_bytes, 48);
    EXPECT_EQ(counts.all_reduces, 1);
    EXPECT_EQ(counts.all_reduce_bytes, 20);
    EXPECT_EQ(counts.broadcasts, 1);
    EXPECT_EQ(counts.barriers, 2);
  });
}

TEST(GlooGroup, RefusesWhatDoesNotFitAndGoesOn) {
  run_ranks(2, [](RankContext& context) {
    auto& group = *context.environment().communicator();
    expect_error<ValueError>([&] { group.all_gather(torch::zeros({5}), torch::zeros({2}), {"all_gather"}); },
                             "[all_gather] the full tensor has 5 elements and the shard 2, expected 4");
    expect_error<ValueError>([&] { group.broadcast(torch::zeros({2}), 2, {"broadcast"}); }, "root 2", "0 to 1");
    expect_error<NotSupportedError>(
        [&] { group.all_reduce(torch::zeros({2}, torch::kBool), ReduceOp::sum, {"all_reduce"}); },
        "[all_reduce] cannot reduce Bool");
    expect_error<NotSupportedError>([&] { group.all_reduce(torch::zeros({2}), ReduceOp::norm, {"all_reduce"}); },
                                    "cannot reduce by norm", "sum the powers");
    expect_error<ValueError>(
        [&] {
          group.all_reduce(torch::zeros({2, 3}).t(), ReduceOp::sum, {"all_reduce"});
        },
        "is not contiguous");
    const auto tensor = torch::ones({2});
    group.all_reduce(tensor, ReduceOp::sum, {"all_reduce"})->wait();
    EXPECT_EQ(tensor[0].item<float>(), 2);
  });
}

// The others learn of a dead rank at once, because its connections close.
TEST(GlooFailure, AKilledRankIsNamedByTheOperationThatMissesIt) {
  RunOptions options;
  options.killed = {2};
  run_ranks(
      4,
      [](RankContext& context) {
        auto& group = *context.environment().communicator();
        if (context.rank() == 2) context.kill_self();
        const auto start = std::chrono::steady_clock::now();
        const auto output = torch::zeros({4 * 12345});
        const auto work = group.all_gather(output, torch::zeros({12345}), {"all_gather", "blocks.3"});
        const std::string where = "[all_gather] blocks.3, 197,520 bytes over gloo group \"shard\" (rank " +
                                  std::to_string(context.rank()) + " of 4) failed after ";
        const auto wait = [&] { work->wait(); };
        expect_error<CommunicationError>(wait, where, " (timeout 60 s): ", " by peer",
                                         "a rank failed, left, or did not make the same call: every rank must call it");
        expect_error<CommunicationError>(wait, where);  // the same again, at once
        EXPECT_LT(seconds_since(start), 60);
      },
      options);
}

TEST(GlooFailure, ARankThatDoesNotCallEndsInATimeoutWithinItsLimit) {
  RunOptions options;
  options.communication_timeout = std::chrono::seconds(5);
  // Rank 1 must still be there when rank 0 gives up, and not wait for the barrier at the end.
  options.killed = {1};
  run_ranks(
      2,
      [](RankContext& context) {
        auto& group = *context.environment().communicator();
        if (context.rank() == 1) {
          context.await("told");
          context.kill_self();
        }
        const auto start = std::chrono::steady_clock::now();
        expect_error<CommunicationError>(
            [&] {
              group.reduce_scatter(torch::zeros({2}), torch::zeros({4}), {"reduce_scatter", "head"})->wait();
            },
            "[reduce_scatter] head, 16 bytes over gloo group \"shard\" (rank 0 of 2) failed after ", "(timeout 5 s)",
            "did not make the same call");
        EXPECT_GT(seconds_since(start), 4.5);
        expect_error<CommunicationError>([&] { group.barrier({"barrier", "step"}); }, "[barrier] step, 96 bytes over");
        context.tell("told");
      },
      options);
}

// It would hold the rank up until the run's limit.
TEST(GlooFailure, ADroppedWorkWithoutPartnerEndsAtTheTimeout) {
  RunOptions options;
  options.communication_timeout = std::chrono::seconds(5);
  options.killed = {1};
  run_ranks(
      2,
      [](RankContext& context) {
        if (context.rank() == 1) {
          context.await("told");
          context.kill_self();
        }
        { context.environment().communicator()->all_reduce(torch::zeros({3}), ReduceOp::sum, {"all_reduce"}); }
        context.tell("told");
      },
      options);
}

}  // namespace gloo_communicator_test
