// Ranks that do unlike things: what is called on one rank only, loaders of unequal length, early ends, exceptions, ^C,
// unlike seeds and settings. Every rank ends within the timeout, and says what it waited for, where, and for whom.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <csignal>
#include <functional>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "dtensor/error.h"
#include "hsdp/hsdp.h"
#include "tests/testing/expect.h"
#include "tests/testing/leftovers.h"
#include "tests/testing/multi_process.h"
#include "tests/testing/process.h"

namespace unlike_ranks_test {

using namespace testing_support;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

struct PairImpl : torch::nn::Module {
  PairImpl()
      : first(register_module("first", torch::nn::Linear(6, 31))),
        second(register_module("second", torch::nn::Linear(31, 3))) {}
  torch::Tensor forward(const torch::Tensor& x) { return second(torch::tanh(first(x))); }
  torch::nn::Linear first, second;
};
TORCH_MODULE(Pair);

struct Trainer {
  explicit Trainer(RankContext& context)
      : net(hsdp::meta_init([] { return Pair(); })),
        model(
            hsdp::fully_shard(net, {.mesh = context.environment().mesh(), .units = hsdp::each<torch::nn::Linear>()})) {
    model.materialize(at::kCPU);
    optimizer = std::make_unique<torch::optim::SGD>(model->parameters(), 0.1);
  }
  torch::Tensor loss() { return model->forward(torch::ones({2, 6})).pow(2).mean(); }
  void step() {
    optimizer->zero_grad();
    loss().backward();
    optimizer->step();
  }

  Pair net;
  hsdp::FullySharded<PairImpl> model;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  torch::Tensor kept;  // with its graph
};

// ---- if (rank == 0) around a collective ----

/// What only rank 0 calls, in a function that the message must name, and what the message says of it.
struct Lonely {
  std::string name;
  std::function<void(RankContext&, Trainer&)> call;
  std::string caller;
  std::string operation, callee;  // regular expressions
};

[[gnu::noinline]] void forward_on_rank_zero(RankContext&, Trainer& trainer) {
  const auto output = trainer.model->forward(torch::ones({2, 6}));
  ADD_FAILURE() << output.sizes();
}
[[gnu::noinline]] void backward_on_rank_zero(RankContext&, Trainer& trainer) {
  trainer.kept.backward();
  ADD_FAILURE();
}
[[gnu::noinline]] void clip_on_rank_zero(RankContext&, Trainer& trainer) {
  const double norm = hsdp::clip_grad_norm_(trainer.model->parameters(), 1.0);
  ADD_FAILURE() << norm;
}
[[gnu::noinline]] void stock_clip_on_rank_zero(RankContext&, Trainer& trainer) {
  const double norm = torch::nn::utils::clip_grad_norm_(trainer.model->parameters(), 1.0);
  ADD_FAILURE() << norm;
}
[[gnu::noinline]] void unsharded_on_rank_zero(RankContext&, Trainer& trainer) {
  const auto whole = hsdp::unsharded(trainer.net->first->weight);
  ADD_FAILURE() << whole.sizes();
}
[[gnu::noinline]] void barrier_on_rank_zero(RankContext& context, Trainer&) {
  context.environment().barrier("epoch");
  ADD_FAILURE();
}
[[gnu::noinline]] void replay_on_rank_zero(RankContext&, Trainer& trainer) {
  trainer.model.replay_init();
  ADD_FAILURE();
}

[[gnu::noinline]] void export_on_rank_zero(RankContext& context, Trainer& trainer) {
  hsdp::export_pt(trainer.model, context.directory() + "/model.pt");
  ADD_FAILURE();
}

[[gnu::noinline]] void summon_on_rank_zero(RankContext&, Trainer& trainer) {
  hsdp::SummonFull scope(trainer.model);
  ADD_FAILURE();
}

const std::vector<Lonely> kLonely = {
    {"Forward", forward_on_rank_zero, "forward_on_rank_zero", "\\[all_gather\\] first, [0-9,]+ bytes",
     "torch::nn::LinearImpl::forward"},
    {"Backward", backward_on_rank_zero, "backward_on_rank_zero",
     "\\[(all_gather|reduce_scatter)\\] (first|second), [0-9,]+ bytes", "at::Tensor::_backward"},
    {"Clip", clip_on_rank_zero, "clip_on_rank_zero", "\\[all_reduce\\] norm, [0-9]+ bytes", "hsdp::clip_grad_norm_"},
    {"StockClip", stock_clip_on_rank_zero, "stock_clip_on_rank_zero", "\\[all_reduce\\] norm, [0-9]+ bytes", "at::.*"},
    {"Unsharded", unsharded_on_rank_zero, "unsharded_on_rank_zero", "\\[all_gather\\] first\\.weight, [0-9,]+ bytes",
     "hsdp::unsharded"},
    {"Barrier", barrier_on_rank_zero, "barrier_on_rank_zero", "\\[barrier\\] epoch, [0-9]+ bytes",
     "hsdp::Environment::barrier"},
    {"ReplayInit", replay_on_rank_zero, "replay_on_rank_zero", "\\[all_gather\\] replay_init seed check, [0-9]+ bytes",
     "hsdp::ShardedModule::replay_init"},
    {"ExportPt", export_on_rank_zero, "export_on_rank_zero", "\\[all_reduce\\] export_pt, [0-9]+ bytes",
     "hsdp::export_pt"},
    {"SummonFull", summon_on_rank_zero, "summon_on_rank_zero", "\\[all_gather\\] first, [0-9,]+ bytes",
     "hsdp::SummonFull::SummonFull"},
};

class OnRankZeroOnly : public ::testing::TestWithParam<Lonely> {
 protected:
  /// The call on rank 0, whose message must have `cause`, and `others` on the rest.
  void run(const std::function<void(RankContext&, Trainer&)>& others, const std::string& cause,
           std::chrono::seconds timeout) {
    const Lonely& lonely = GetParam();
    run_ranks(
        3,
        [&](RankContext& context) {
          Trainer trainer(context);
          trainer.step();
          trainer.kept = trainer.loss();
          if (context.rank() != 0) return others(context, trainer);
          std::string text;
          try {
            lonely.call(context, trainer);
          } catch (const dtensor::CommunicationError& error) {
            text = error.what();
          }
          EXPECT_THAT(text, ContainsRegex("^" + lonely.operation + " over gloo group \"shard\" \\(rank 0 of 3\\)"));
          EXPECT_THAT(text, ContainsRegex(cause));
          EXPECT_THAT(text, ContainsRegex("; called in " + lonely.callee + " by .*" + lonely.caller +
                                          " \\(((unlike_ranks_test\\.cpp|weights\\.h|summon_full\\.h):[0-9]+|unlike_"
                                          "ranks_test\\+0x[0-9a-f]+)\\)"));
          EXPECT_THAT(text, EndsWith("every rank must call it"));
          EXPECT_EQ(text.find('\n'), std::string::npos) << text;
          expect_error<dtensor::CommunicationError>([] { hsdp::shutdown(); }, "[barrier] shutdown, ");
          context.tell("failed");
        },
        {.communication_timeout = timeout});
  }
};

// The others are done: their last call meets this one, and every rank is told at once what the other does.
TEST_P(OnRankZeroOnly, WhileTheOthersEnd) {
  run(
      [](RankContext&, Trainer&) {
        expect_error<dtensor::CommunicationError>([] { hsdp::shutdown(); }, "[barrier] shutdown, ", "): rank 0 calls ",
                                                  "expected the same call on all ranks; called in hsdp::shutdown by ",
                                                  "; every rank must call it");
      },
      "\\): rank [12] calls barrier \"shutdown\", expected the same call on all ranks", std::chrono::seconds(60));
}

// The others compute something else for so long that the timeout comes first.
TEST_P(OnRankZeroOnly, WhileTheOthersComputeAlone) {
  run(
      [](RankContext& context, Trainer&) {
        context.await("failed");
        expect_error<dtensor::CommunicationError>([] { hsdp::shutdown(); }, "[barrier] shutdown, ", " failed after ",
                                                  "every rank must call it");
      },
      "\\) failed after [0-9.]+ s \\(timeout 5 s\\): ", std::chrono::seconds(5));
}

INSTANTIATE_TEST_SUITE_P(Calls, OnRankZeroOnly, ::testing::ValuesIn(kLonely),
                         [](const auto& which) { return which.param.name; });

// ---- other unlike calls ----

// They differ in size as well, which would end a rank from the backend's own thread, without a message of ours.
TEST(UnlikeCalls, OfOtherSizesAreToldOnAllRanks) {
  run_ranks(3, [](RankContext& context) {
    auto& group = *context.environment().communicator();
    const auto work = group.all_reduce(torch::ones({context.rank() == 2 ? 100000 : 3}), dtensor::ReduceOp::sum,
                                       {"all_reduce", "count"});
    expect_error<dtensor::CommunicationError>(
        [&] { work->wait(); }, "[all_reduce] count, ",
        context.rank() == 2 ? "): rank 0 calls all_reduce \"count\" of 12 bytes of Float, expected"
                            : "): rank 2 calls all_reduce \"count\" of 400000 bytes of Float, expected",
        "every rank must call it");
    // All came to the same verdict before anything was sent, so the group is still in step.
    const auto sum = torch::ones({3});
    group.all_reduce(sum, dtensor::ReduceOp::sum, {"all_reduce", "count"})->wait();
    EXPECT_TRUE(torch::equal(sum, torch::full({3}, 3.f)));
  });
}

TEST(UnlikeCalls, OfOneSizeAreTold) {
  run_ranks(2, [](RankContext& context) {
    auto& group = *context.environment().communicator();
    const bool other = context.rank() == 1;
    struct TwinsImpl : torch::nn::Module {
      torch::nn::Linear one = register_module("one", torch::nn::Linear(4, 4));
      torch::nn::Linear two = register_module("two", torch::nn::Linear(4, 4));
    };
    const auto twins = hsdp::meta_init([] { return std::make_shared<TwinsImpl>(); });
    const auto model = hsdp::fully_shard(twins, {.mesh = context.environment().mesh()});
    model.materialize(at::kCPU);
    expect_error<dtensor::CommunicationError>(
        [&] { hsdp::unsharded(other ? twins->one->weight : twins->two->weight); }, "[all_gather] ",
        other ? "rank 0 calls all_gather \"two.weight\"" : "rank 1 calls all_gather \"one.weight\"");
    const auto reduced = torch::ones({3});
    const auto op = other ? dtensor::ReduceOp::max : dtensor::ReduceOp::min;
    expect_error<dtensor::CommunicationError>(
        [&] {
          group.all_reduce(reduced, op, {"all_reduce", "loss"})->wait();
        },
        "with another reduction or root");
  });
}

TEST(UnlikeCalls, LoadersOfUnequalLengthAreToldOnAllRanks) {
  run_ranks(3, [](RankContext& context) {
    Trainer trainer(context);
    const bool longer = context.rank() == 1;
    std::string text;
    try {
      for (int batch = 0; batch < (longer ? 4 : 3); ++batch) trainer.step();
      hsdp::shutdown();
    } catch (const dtensor::CommunicationError& error) {
      text = error.what();
    }
    EXPECT_THAT(text, AllOf(StartsWith(longer ? "[all_gather] first, " : "[barrier] shutdown, "),
                            HasSubstr(longer ? "): rank 0 calls barrier \"shutdown\", expected"
                                             : "): rank 1 calls all_gather \"first\" of "),
                            HasSubstr("; called in "), EndsWith("; every rank must call it")));
    if (!longer) return;
    // The module's own forward between the two is a frame only where it was not inlined.
    EXPECT_THAT(text, AllOf(HasSubstr("; called in torch::nn::LinearImpl::forward by unlike_ranks_test::"),
                            HasSubstr("unlike_ranks_test::Trainer::loss (")));
    expect_error<dtensor::CommunicationError>([] { hsdp::shutdown(); }, "[barrier] shutdown, ");
  });
}

// ---- how processes end ----

class Ends : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_EQ(leftovers_.describe(), ""); }

  static std::vector<ProcessOptions> ranks(int count, const std::vector<std::string>& command) {
    const auto port = std::to_string(free_port());
    std::vector<ProcessOptions> all;
    for (int rank = 0; rank < count; ++rank) {
      ProcessOptions options;
      options.command = command;
      options.environment = {{"RANK", std::to_string(rank)},
                             {"LOCAL_RANK", std::to_string(rank)},
                             {"WORLD_SIZE", std::to_string(count)},
                             {"MASTER_ADDR", "127.0.0.1"},
                             {"MASTER_PORT", port},
                             {"OMP_NUM_THREADS", "1"},
                             {"TORCHELASTIC_USE_AGENT_STORE", std::nullopt},
                             {"TORCH_SHOW_CPP_STACKTRACES", std::nullopt}};
      // Less than the program's own timeout: whoever waited for that would be ended here.
      options.timeout = std::chrono::seconds(300);
      all.push_back(options);
    }
    return all;
  }
  static std::vector<ProcessOptions> ranks_that(const std::string& habit) {
    return ranks(3, {std::string(HSDP_BINARY_DIR) + "/tests/unlike_ranks_program", habit});
  }
  static std::string describe(const std::vector<ProcessResult>& results) {
    std::string text;
    for (auto& result : results) text += to_string(result) + "\n";
    return text;
  }
  /// One line that names operation, unit, and a function of the program.
  static void expect_lost(const ProcessResult& result, const std::vector<ProcessResult>& all) {
    EXPECT_EQ(result.exit_code, 1) << describe(all);
    EXPECT_THAT(result.err, ContainsRegex("\\[(all_gather|reduce_scatter|all_reduce|barrier)\\] "
                                          "(layers\\.[0-7]|norm|shutdown), [0-9,]+ bytes over gloo group \"shard\""))
        << describe(all);
    EXPECT_THAT(result.err, ContainsRegex("; called in .* by .*(train|forward) \\(.*every rank must call it\n$"))
        << describe(all);
  }

  Leftovers leftovers_;
};

struct End {
  std::string habit;
  std::optional<int> exit_code;  // of rank 1; none: signal
  int signal = 0;
  std::string says;
};

class EndOfRankOne : public Ends, public ::testing::WithParamInterface<End> {};

TEST_P(EndOfRankOne, EndsTheOthersByName) {
  const End& end = GetParam();
  const auto results = run_processes(ranks_that(end.habit));
  EXPECT_EQ(results[1].exit_code, end.exit_code) << describe(results);
  EXPECT_EQ(results[1].signal, end.signal);
  EXPECT_THAT(results[1].err, HasSubstr(end.says));
  expect_lost(results[0], results);
  expect_lost(results[2], results);
}

INSTANTIATE_TEST_SUITE_P(Habits, EndOfRankOne,
                         ::testing::Values(End{"return", 0, 0, ""}, End{"return_in_forward", 0, 0, ""},
                                           End{"throw", 1, 0, "no more\n"}, End{"throw_in_backward", 1, 0, "no more\n"},
                                           End{"uncaught", std::nullopt, SIGABRT, "no more"}),
                         [](const auto& which) { return which.param.habit; });

TEST_F(Ends, WithoutShutdownAreFine) {
  for (auto& result : run_processes(ranks_that("no_shutdown"))) EXPECT_EQ(result.exit_code, 0) << to_string(result);
}

class Interrupt : public Ends {
 protected:
  static std::vector<Process> start() {
    std::vector<Process> started;
    for (auto& options : ranks_that("train")) started.emplace_back(options);
    for (auto& process : started) {
      for (int i = 0; i < 4800 && process.out().find("step 2") == std::string::npos; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
      }
      EXPECT_THAT(process.out(), HasSubstr("step 2"));
    }
    return started;
  }
};

TEST_F(Interrupt, OfOneRankEndsTheOthersByName) {
  auto started = start();
  started[1].signal(SIGINT);
  std::vector<ProcessResult> results;
  for (auto& process : started) results.push_back(process.wait());
  EXPECT_EQ(results[1].signal, SIGINT);
  expect_lost(results[0], results);
  expect_lost(results[2], results);
}

TEST_F(Interrupt, OfAllRanksEndsAllAtOnce) {
  auto started = start();
  for (auto& process : started) process.signal(SIGINT);
  for (auto& process : started) {
    const auto result = process.wait();
    // Who hears of the other first says so, and ends by itself.
    EXPECT_TRUE(result.signal == SIGINT || result.exit_code == 1) << to_string(result);
  }
}

// ---- an example: a sampler that cuts the data into ranks ----

TEST_F(Ends, TheSamplerExampleReadsEachPointOnceAnEpochInAnotherOrderEachTime) {
  const auto results = run_processes(ranks(2, {std::string(HSDP_BINARY_DIR) + "/apps/examples/distributed_sampler"}));
  std::map<int, std::multiset<int>> points;  // by epoch
  std::map<int, std::vector<int>> order;     // of rank 0
  for (size_t rank = 0; rank < results.size(); ++rank) {
    ASSERT_EQ(results[rank].exit_code, 0) << describe(results);
    std::istringstream lines(results[rank].out);
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      std::string skipped;
      int epoch = 0;
      words >> skipped >> epoch >> skipped >> skipped;
      for (int point; words >> point;) {
        points[epoch].insert(point);
        if (rank == 0) order[epoch].push_back(point);
      }
    }
  }
  ASSERT_EQ(points.size(), 3u) << describe(results);
  for (auto& [epoch, all] : points) {
    EXPECT_EQ(all.size(), 250u);
    EXPECT_EQ(std::set<int>(all.begin(), all.end()).size(), 250u) << "epoch " << epoch;
  }
  EXPECT_NE(order[1], order[2]);
  EXPECT_NE(order[2], order[3]);
}

}  // namespace unlike_ranks_test
