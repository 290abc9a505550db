// A rank that dies, leaves, throws, or does something else than the others while they train: every other rank ends
// within the communication timeout with an error that names the operation and the unit, and nothing stays behind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>

#include "dtensor/error.h"
#include "hsdp/hsdp.h"
#include "tests/testing/expect.h"
#include "tests/testing/leftovers.h"
#include "tests/testing/multi_process.h"

namespace failure_test {

using testing_support::expect_error;
using testing_support::failures_of_ranks;
using testing_support::Leftovers;
using testing_support::RankContext;
using testing_support::run_ranks;
using testing_support::RunOptions;

using Clock = std::chrono::steady_clock;

constexpr int kRanks = 3;
constexpr int64_t kBlocks = 4;
/// Block i turns widths[i] features into widths[i + 1].
using Widths = std::array<int64_t, kBlocks + 1>;
constexpr Widths kUneven = {6, 31, 7, 300, 5};
/// Gathers of different units cannot be told apart by their size.
constexpr Widths kEven = {6, 6, 6, 6, 6};
constexpr std::chrono::seconds kTimeout{60};
/// What a rank may take beyond the timeout: the grace of a collective and the end of those in flight, on a machine that
/// does much else.
constexpr std::chrono::seconds kMargin{60};

const std::string kAdvice = "a rank failed, left, or did not make the same call: every rank must call it";

/// Linear layers, each a unit. `in_forward` and `in_backward` are called when the computation has come to a block.
struct TowerImpl : torch::nn::Module {
  explicit TowerImpl(const Widths& widths) {
    for (int64_t i = 0; i < kBlocks; ++i) blocks->push_back(torch::nn::Linear(widths[i], widths[i + 1]));
    register_module("blocks", blocks);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (int64_t i = 0; i < kBlocks; ++i) {
      if (in_forward) in_forward(i);
      x = torch::tanh(blocks->ptr(i)->as<torch::nn::Linear>()->forward(x));
      if (in_backward) x.register_hook([this, i](const torch::Tensor&) { in_backward(i); });
    }
    return x;
  }
  torch::nn::ModuleList blocks;
  std::function<void(int64_t block)> in_forward, in_backward;
};
TORCH_MODULE(Tower);

/// A sharded tower and its optimizer on one rank.
struct Trainer {
  explicit Trainer(RankContext& context, const Widths& widths = kUneven)
      : net(hsdp::meta_init([&] { return Tower(widths); })),
        model(hsdp::fully_shard(net, {.mesh = context.environment().mesh(), .units = hsdp::each("blocks.*")})) {
    model.materialize(torch::kCPU);
    optimizer = std::make_unique<torch::optim::SGD>(model->parameters(), 0.1);
  }

  torch::Tensor loss() { return model->forward(torch::ones({2, 6})).pow(2).mean(); }
  void step() {
    optimizer->zero_grad();
    loss().backward();
    optimizer->step();
  }
  void step_of_several_forwards(int64_t count) {
    auto sum = loss();
    for (int64_t i = 1; i < count; ++i) sum = sum + loss();
    sum.backward();
    step();
  }
  void steps(int64_t count) {
    for (int64_t i = 0; i < count; ++i) step();
  }

  Tower net;
  hsdp::FullySharded<TowerImpl> model;
  std::unique_ptr<torch::optim::SGD> optimizer;
};

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// `train` ends within the timeout with an error of `operation` for one of the blocks, and so does the farewell.
void expect_lost_ranks(RankContext& context, const std::string& operation, const std::function<void()>& train) {
  const auto start = Clock::now();
  std::string text;
  try {
    train();
    ADD_FAILURE() << "expected dtensor::CommunicationError, nothing was thrown";
  } catch (const dtensor::CommunicationError& error) {
    text = error.what();
  }
  const std::string rank = std::to_string(context.rank());
  if (text.find(", expected the same ") != std::string::npos) {
    // The ranks met in unlike collectives, and all of them noticed at once.
    EXPECT_THAT(text, ::testing::ContainsRegex("^\\[" + operation +
                                               "\\] blocks\\.[0-9], [0-9,]+ bytes over gloo group "
                                               "\"shard\" \\(rank " +
                                               rank +
                                               " of 3\\): rank [0-9] calls "
                                               "(all_gather|reduce_scatter|barrier) \"(shutdown|blocks\\.[0-9])\""));
    EXPECT_THAT(text, ::testing::HasSubstr("every rank must call it"));
    EXPECT_LT(seconds_since(start), std::chrono::duration<double>(kTimeout).count());
    if (text.find("\"shutdown\"") != std::string::npos) {
      expect_error<dtensor::CommunicationError>([] { hsdp::shutdown(); }, "[barrier] shutdown, ", kAdvice);
    }
    return;
  }
  EXPECT_THAT(text, ::testing::ContainsRegex("^\\[" + operation +
                                             "\\] blocks\\.[0-9], [0-9,]+ bytes over gloo group "
                                             "\"shard\" \\(rank " +
                                             rank + " of 3\\) failed after "));
  EXPECT_THAT(text, ::testing::HasSubstr("(timeout 60 s): "));
  EXPECT_THAT(text, ::testing::EndsWith("; " + kAdvice));
  EXPECT_EQ(text.find('\n'), std::string::npos) << text;
  expect_error<dtensor::CommunicationError>([] { hsdp::shutdown(); }, "[barrier] shutdown, ", kAdvice);
  EXPECT_LT(seconds_since(start), std::chrono::duration<double>(kTimeout + kMargin).count());
}

class Failure : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_EQ(leftovers_.describe(), ""); }

  static RunOptions options(std::set<int> killed = {}) {
    RunOptions options;
    options.communication_timeout = kTimeout;
    options.killed = std::move(killed);
    return options;
  }

  Leftovers leftovers_;
};

// Rank 1 takes part in the gather of block 1 and maybe, ahead of its use, of block 2. The others miss it later.
TEST_F(Failure, KilledInForward) {
  run_ranks(
      kRanks,
      [](RankContext& context) {
        Trainer trainer(context);
        trainer.step();
        if (context.rank() == 1) {
          trainer.net->in_forward = [&](int64_t block) {
            if (block == 1) context.kill_self();
          };
        }
        expect_lost_ranks(context, "all_gather", [&] { trainer.steps(2); });
      },
      options({1}));
}

// Before the gradients of block 3 are known, so that no gradient has been reduced on rank 1.
TEST_F(Failure, KilledInBackward) {
  run_ranks(
      kRanks,
      [](RankContext& context) {
        Trainer trainer(context);
        trainer.step();
        if (context.rank() == 1) {
          trainer.net->in_backward = [&](int64_t block) {
            if (block == kBlocks - 1) context.kill_self();
          };
        }
        expect_lost_ranks(context, "(all_gather|reduce_scatter)", [&] { trainer.steps(2); });
      },
      options({1}));
}

// All is gathered by then: what the others miss is the reduction of the last gradients.
TEST_F(Failure, KilledAtTheEndOfBackward) {
  run_ranks(
      kRanks,
      [](RankContext& context) {
        Trainer trainer(context);
        trainer.step();
        if (context.rank() == 1) {
          trainer.net->in_backward = [&](int64_t block) {
            if (block == 0) context.kill_self();
          };
        }
        expect_lost_ranks(context, "reduce_scatter", [&] { trainer.steps(2); });
      },
      options({1}));
}

TEST_F(Failure, LeavesTheProcessWhileOthersTrain) {
  run_ranks(
      kRanks,
      [](RankContext& context) {
        Trainer trainer(context);
        trainer.steps(2);
        if (context.rank() == 1) _exit(0);
        expect_lost_ranks(context, "all_gather", [&] { trainer.steps(2); });
      },
      options());
}

// It waits for the others at its own end, and they for it in their next step.
TEST_F(Failure, EndsEarlierThanTheOthers) {
  run_ranks(
      kRanks,
      [](RankContext& context) {
        Trainer trainer(context);
        trainer.steps(2);
        if (context.rank() == 1) {
          const auto start = Clock::now();
          expect_error<dtensor::CommunicationError>([] { hsdp::shutdown(); }, "[barrier] shutdown, ",
                                                    " calls all_gather \"blocks.0\"", "every rank must call it");
          EXPECT_LT(seconds_since(start), std::chrono::duration<double>(kTimeout + kMargin).count());
          return;
        }
        expect_lost_ranks(context, "all_gather", [&] { trainer.steps(2); });
      },
      options());
}

TEST_F(Failure, Throws) {
  const auto failures = failures_of_ranks(
      kRanks,
      [](RankContext& context) {
        Trainer trainer(context);
        trainer.step();
        if (context.rank() == 1) {
          trainer.net->in_forward = [](int64_t block) {
            if (block == 2) throw std::runtime_error("no more");
          };
          trainer.step();
        }
        expect_lost_ranks(context, "(all_gather|reduce_scatter)", [&] { trainer.steps(2); });
      },
      options());
  EXPECT_EQ(failures, "rank 1:\nthrew std::runtime_error: no more\n");
}

TEST_F(Failure, ThrowsInBackward) {
  const auto failures = failures_of_ranks(
      kRanks,
      [](RankContext& context) {
        Trainer trainer(context);
        trainer.step();
        if (context.rank() == 1) {
          trainer.net->in_backward = [](int64_t block) {
            if (block == 2) throw std::runtime_error("no more");
          };
          trainer.step();
        }
        expect_lost_ranks(context, "(all_gather|reduce_scatter)", [&] { trainer.steps(2); });
      },
      options());
  EXPECT_EQ(failures, "rank 1:\nthrew std::runtime_error: no more\n");
}

// The calls of the ranks are the same in kind and size at first, so that they part ways only later; each rank notices.
TEST_F(Failure, AnotherNumberOfForwards) {
  run_ranks(
      kRanks,
      [](RankContext& context) {
        Trainer trainer(context, kEven);
        trainer.step();
        expect_lost_ranks(context, "(all_gather|reduce_scatter)",
                          [&] { trainer.step_of_several_forwards(context.rank() == 1 ? 2 : 1); });
      },
      options());
}

// Forwards without gradients, as in an evaluation that only one rank does.
TEST_F(Failure, ForwardsOnOneRankOnly) {
  run_ranks(
      kRanks,
      [](RankContext& context) {
        Trainer trainer(context, kEven);
        trainer.step();
        expect_lost_ranks(context, "(all_gather|reduce_scatter)", [&] {
          if (context.rank() == 1) {
            torch::NoGradGuard no_grad;
            (void)trainer.loss();
          }
          trainer.steps(2);
        });
      },
      options());
}

// Gloo would abort a process that is sent more than it has asked for.
TEST_F(Failure, AnotherNumberOfForwardsThroughUnitsOfOtherSizes) {
  run_ranks(
      kRanks,
      [](RankContext& context) {
        Trainer trainer(context, kUneven);
        trainer.step();
        expect_lost_ranks(context, "(all_gather|reduce_scatter)",
                          [&] { trainer.step_of_several_forwards(context.rank() == 1 ? 2 : 1); });
      },
      options());
}

}  // namespace failure_test
