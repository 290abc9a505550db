// Whole training steps on the recorded device: streams, events, groups and lifetimes are right whatever the speeds of
// device and host, and what is left out of them is found.
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "dtensor/collective_watch.h"
#include "dtensor/error.h"
#include "hsdp/hsdp.h"
#include "hsdp/optimizer_in_backward.h"
#include "tests/testing/blocks.h"
#include "tests/testing/happens_before.h"
#include "tests/testing/on_device.h"
#include "tests/testing/private_streams.h"
#include "tests/testing/recorded_backend.h"
#include "tests/testing/stream_rules.h"

namespace {

using namespace testing_support;
using ::testing::HasSubstr;

/// Those of this process, for tests that abort them.
std::vector<c10::intrusive_ptr<c10d::Backend>>& backends() {
  static std::vector<c10::intrusive_ptr<c10d::Backend>> made;
  return made;
}

class Recorded : public ::testing::Environment {
 public:
  void SetUp() override {
    register_private_device(PrivateStreams::recorded);
    hsdp::register_backend("recorded", c10::DeviceType::PrivateUse1, [](auto& store, auto... arguments) {
      return backends().emplace_back(make_recorded_backend(store, arguments...));
    });
    recorded::watch_operators();
  }
};
[[maybe_unused]] const auto* const registered = ::testing::AddGlobalTestEnvironment(new Recorded);

// ---- what is trained ----

/// Blocks, each meant to be a unit, that say in the log when they compute; a head that the root holds.
struct ChainImpl : torch::nn::Module {
  explicit ChainImpl(std::vector<int64_t> widths) {
    for (size_t i = 0; i + 2 < widths.size(); ++i) blocks->push_back(torch::nn::Linear(widths[i], widths[i + 1]));
    register_module("blocks", blocks);
    head = register_module("head", torch::nn::Linear(widths[widths.size() - 2], widths.back()));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (size_t i = 0; i < blocks->size(); ++i) {
      const LogLabel label("forward blocks." + std::to_string(i));
      x = torch::tanh(blocks[i]->as<torch::nn::Linear>()->forward(x));
    }
    const LogLabel label("forward head");
    return head(x);
  }
  torch::nn::ModuleList blocks;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Chain);

const std::vector<int64_t> kEven{8, 8, 8, 8, 8, 8}, kUneven{6, 7, 3, 5, 9, 2};
constexpr int64_t kSteps = 4, kWarmUp = 2;

struct Case {
  std::string name;
  std::vector<int64_t> mesh;
  hsdp::FullyShardOptions options = {};
  std::vector<int64_t> widths = kEven;
  int64_t micro_batches = 1;
  /// Before each micro-batch.
  std::function<void(const hsdp::FullySharded<ChainImpl>&, int64_t micro)> prepare = {};
  /// Between forward and backward.
  std::function<void(const hsdp::FullySharded<ChainImpl>&)> between = {};
  bool clips = false;
  bool in_backward = false;
  double tolerance = 1e-11;
  /// The host waits in each step, as it has to where it works on gradients itself.
  bool host_waits = false;
  bool overlaps = true;
  size_t scatters = 5;  // of a step
  bool plants = true;   // mistakes into its log

  int ranks() const {
    int64_t product = 1;
    for (auto size : mesh) product *= size;
    return static_cast<int>(product);
  }
  StepSetting setting() const {
    return {.shards = mesh.back() > 1,
            .replicates = mesh.size() == 2,
            .casts = options.mixed_precision.param_dtype.has_value(),
            .clips = clips,
            .offloads = options.offload.to_host,
            .scatters = scatters};
  }
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::vector<torch::Tensor>& parameters) {
  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.05).momentum(0.9));
}

/// Trains for some steps beside the plain module and compares the parameters after each. Labels: each step begins with
/// a note, and those after the first few are steady.
void train(RankContext& context, const Case& c, const std::function<void(int64_t step)>& before_step = {}) {
  auto& environment = context.environment();
  const auto device = environment.device();
  torch::manual_seed(7);
  Chain plain(c.widths);
  torch::manual_seed(7);
  auto net = hsdp::meta_init([&] { return Chain(c.widths); });
  auto options = c.options;
  options.mesh = mesh_of(context, c.mesh);
  options.units = hsdp::each("blocks.*");
  auto model = hsdp::fully_shard(net, options);
  model.materialize(device);
  const auto expected = plain->named_parameters();
  auto theirs = make_optimizer(plain->parameters());
  std::unique_ptr<torch::optim::Optimizer> ours;
  if (c.in_backward) {
    hsdp::apply_optimizer_in_backward(model, [](const at::Tensor& parameter) { return make_optimizer({parameter}); });
  } else {
    ours = make_optimizer(model->parameters());
  }
  const Share share(context);
  const auto rows = [&](int64_t step, int64_t micro, bool target, int64_t begin, int64_t end) {
    return rows_of(step, 2 * micro + (target ? 2 : 1), {12, target ? c.widths.back() : c.widths.front()}, begin, end);
  };
  for (int64_t step = 0; step < kSteps; ++step) {
    std::vector<torch::Tensor> x, y;
    for (int64_t micro = 0; micro < c.micro_batches; ++micro) {
      // An input that requires grad makes backward need the first unit, too.
      x.push_back(rows(step, micro, false, share.begin, share.end).to(device).set_requires_grad(true));
      y.push_back(rows(step, micro, true, share.begin, share.end).to(device));
    }
    recorded::note(kStep + std::to_string(step));
    if (before_step) before_step(step);
    if (step >= kWarmUp && !c.host_waits) recorded::note(kSteadyBegins);
    if (ours) ours->zero_grad();
    for (int64_t micro = 0; micro < c.micro_batches; ++micro) {
      if (c.prepare) c.prepare(model, micro);
      auto out = model->forward(x[micro]);
      if (c.between) c.between(model);
      auto loss = (out - y[micro]).square().mean();
      out.reset();
      loss.backward();
    }
    if (c.clips) hsdp::clip_grad_norm_on_device_(model->parameters(), 0.5);
    if (ours) ours->step();
    recorded::note(kSteadyEnds);

    theirs->zero_grad();
    for (int64_t micro = 0; micro < c.micro_batches; ++micro) {
      (plain->forward(rows(step, micro, false, 0, 12)) - rows(step, micro, true, 0, 12)).square().mean().backward();
    }
    if (c.clips) torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.5);
    theirs->step();
    for (auto& parameter : model->named_parameters()) {
      const double difference = largest_difference(hsdp::unsharded(parameter.value()).cpu(), expected[parameter.key()]);
      EXPECT_LE(difference, c.tolerance) << parameter.key() << " after step " << step;
    }
  }
}

void expect_alike_on_all_ranks(RankContext& context, const StreamLog& log) {
  const auto path = [&](int64_t rank) { return context.directory() + "/collectives." + std::to_string(rank); };
  {
    std::ofstream file(path(context.rank()));
    for (const auto& [communicator, call] : collective_sequence(log)) file << communicator << '\t' << call << '\n';
  }
  context.environment().barrier();
  if (context.rank() != 0) return;
  std::vector<CollectiveSequence> ranks;
  for (int64_t rank = 0; rank < context.world_size(); ++rank) {
    auto& sequence = ranks.emplace_back();
    std::ifstream file(path(rank));
    for (std::string line; std::getline(file, line);) {
      const auto tab = line.find('\t');
      sequence.emplace_back(line.substr(0, tab), line.substr(tab + 1));
    }
    EXPECT_GT(sequence.size(), 0u);
  }
  EXPECT_EQ(compare_collectives(ranks), "");
}

constexpr auto kBFloat16 = torch::kBFloat16;
constexpr auto kFloat = torch::kFloat;

std::vector<Case> cases() {
  using Model = hsdp::FullySharded<ChainImpl>;
  const hsdp::MixedPrecisionPolicy mixed{.param_dtype = kBFloat16, .reduce_dtype = kFloat};
  const auto last_only = [](const Model& model, int64_t micro) {
    model.units().set_requires_gradient_sync(micro == 1);
  };
  return {
      {.name = "Alone", .mesh = {1}, .plants = false},
      {.name = "AloneMixed", .mesh = {1}, .options = {.mixed_precision = mixed}, .tolerance = 0.1},
      {.name = "Two", .mesh = {2}},
      {.name = "Four", .mesh = {4}, .plants = false},
      {.name = "Mixed", .mesh = {2}, .options = {.mixed_precision = mixed}, .tolerance = 0.1},
      {.name = "Replicated", .mesh = {2, 2}},
      {.name = "ReplicatedMixed", .mesh = {2, 2}, .options = {.mixed_precision = mixed}, .tolerance = 0.1},
      {.name = "Uneven", .mesh = {2}, .widths = kUneven},
      {.name = "UnevenColumns",
       .mesh = {2},
       .options = {.shard_placement_fn = [](const std::string&, const at::Tensor& parameter) -> std::optional<int64_t> {
         return parameter.dim() - 1;
       }},
       .widths = kUneven},
      {.name = "Accumulated", .mesh = {2}, .micro_batches = 2, .prepare = last_only, .overlaps = false},
      {.name = "AccumulatedMixed",
       .mesh = {2},
       .options = {.mixed_precision = mixed},
       .micro_batches = 2,
       .prepare = last_only,
       .tolerance = 0.1,
       .overlaps = false},
      {.name = "AccumulatedShards",
       .mesh = {2, 2},
       .micro_batches = 2,
       .prepare = [](const Model& model, int64_t micro) { model.units().set_requires_all_reduce(micro == 1); },
       .overlaps = false,
       .scatters = 10},
      {.name = "Offloaded", .mesh = {2}, .options = {.offload = {.to_host = true}}, .host_waits = true},
      {.name = "OffloadedMixed",
       .mesh = {2},
       .options = {.mixed_precision = mixed, .offload = {.to_host = true}},
       .tolerance = 0.1,
       .host_waits = true},
      // Gradients that need no landing are copied one reduction later than they could be: their waits are dispensable.
      {.name = "OffloadedAlone",
       .mesh = {1},
       .options = {.offload = {.to_host = true}},
       .host_waits = true,
       .plants = false},
      {.name = "Clipped", .mesh = {2}, .clips = true},
      {.name = "Checkpointed", .mesh = {2}, .options = {.activation_checkpoint = hsdp::each("blocks.*")}},
      {.name = "ByHand",
       .mesh = {2},
       .prepare = [](const Model& model, int64_t) { model.units("blocks.*").unshard(/*async=*/true); },
       .between = [](const Model& model) { model.units("blocks.*").reshard(); },
       .overlaps = false},
      {.name = "InBackward", .mesh = {2}, .in_backward = true},
      {.name = "Kept", .mesh = {2}, .options = {.reshard_after_forward = false}},
      {.name = "KeptInPart", .mesh = {4}, .options = {.reshard_after_forward = 2}},
      {.name = "NoPrefetch", .mesh = {2}, .options = {.prefetch = false}, .overlaps = false, .plants = false},
  };
}

Case case_named(const std::string& name) {
  for (const auto& c : cases()) {
    if (c.name == name) return c;
  }
  TORCH_CHECK(false, "no case ", name);
}

// ---- all of it, for each setting ----

/// A run takes seconds, on a machine that does much else at once many of them; and the others wait while rank 0 alone
/// looks for mistakes.
RunOptions patient() {
  RunOptions options;
  options.timeout = std::chrono::seconds(600);
  options.communication_timeout = std::chrono::seconds(300);
  return options;
}

class Order : public ::testing::TestWithParam<Case> {};

TEST_P(Order, IsRightWhateverTheSpeedsAndMistakesAreFound) {
  const Case& c = GetParam();
  run_on_device(
      c.ranks(),
      [&](RankContext& context) {
        // Events are complete when they are looked at the second time: late, but before anybody has to wait.
        recorded::set_query_policy([](int64_t nth) { return nth >= 2; });
        train(context, c);
        const auto log = recorded::log();
        const HappensBefore check(log);
        EXPECT_EQ(check.report(), "");
        EXPECT_EQ(wrong_streams(c.setting(), log, kSteps - 1), "");
        if (c.overlaps && c.ranks() > 1) expect_overlap(log, check, kSteps - 1);
        if (c.options.offload.to_host) expect_copies_overlap(log, check, kSteps - 1);
        if (c.ranks() > 1) expect_alike_on_all_ranks(context, log);
        if (c.plants && context.rank() == 0) expect_every_mistake_found(c.setting(), log, kWarmUp);
      },
      patient());
}

INSTANTIATE_TEST_SUITE_P(Cases, Order, ::testing::ValuesIn(cases()),
                         [](const auto& which) { return which.param.name; });

// The same with a device that really drops a wait: the log is what it would have been.
TEST(LiveMistakes, AWaitThatTheDeviceDropsIsFound) {
  run_on_device(
      2,
      [](RankContext& context) {
        const Case c = case_named("Two");
        recorded::set_query_policy([](int64_t nth) { return nth >= 2; });
        const auto recorded_run = [&](int64_t dropped) {
          const auto begin = static_cast<std::ptrdiff_t>(recorded::log_size());
          train(context, c, [&](int64_t step) {
            if (step == kWarmUp) recorded::drop_wait(dropped);
          });
          const auto all = recorded::log();
          return StreamLog(all.begin() + begin, all.end());
        };
        const auto right = recorded_run(-1);
        const HappensBefore check(right);
        ASSERT_EQ(check.report(), "");
        const auto step = step_of(right, kWarmUp);
        std::vector<int64_t> needed;
        int64_t n = 0;
        for (const auto& wait : check.waits()) {
          if (wait.entry < step.first || wait.entry >= step.second) continue;
          if (wait.needed) needed.push_back(n);
          ++n;
        }
        ASSERT_GT(needed.size(), 10u);
        for (size_t which : {size_t{0}, needed.size() / 3, 2 * needed.size() / 3}) {
          const auto wrong = recorded_run(needed[which]);
          const HappensBefore second(wrong);
          ASSERT_FALSE(second.violations().empty()) << "wait " << needed[which];
          EXPECT_GE(second.violations()[0].second, step_of(wrong, kWarmUp).first);
        }
      },
      patient());
}

// ---- time ----

// Events look complete very late: the host is held up before it is too far ahead, and reads nothing too early.
TEST(Time, AHostThatSeesEventsCompleteLateIsHeldUpNotWrong) {
  run_on_device(
      2,
      [](RankContext& context) {
        Case c = case_named("Two");
        c.host_waits = true;
        recorded::set_query_policy([](int64_t nth) { return nth >= 8; });
        train(context, c);
        const auto log = recorded::log();
        EXPECT_EQ(HappensBefore(log).report(), "");
        expect_alike_on_all_ranks(context, log);
      },
      patient());
}

// The watch looks at collectives in their order, so that it has left the first one alone when it reports the second.
TEST(Time, ACollectiveThatHasEndedIsNotReportedWhenItsTimeIsOver) {
  run_ranks(1,
            [](RankContext&) {
              const c10::Device device(c10::DeviceType::PrivateUse1, 0);
              const auto stream = c10::impl::VirtualGuardImpl(device.type()).getNewStream(device);
              dtensor::CollectiveWatch watch(std::make_shared<const dtensor::Group>(
                  dtensor::Group{"recorded", "alone", 0, 1, std::chrono::milliseconds(300), device}));
              const auto start = [&](const char* subject) {
                recorder::add({.kind = Logged::collective, .name = subject, .stream = recorder::name_of(stream)});
                auto done = std::make_shared<c10::Event>(device.type());
                done->record(stream);
                watch.started({"all_gather", subject, 8, 1}, std::move(done));
              };
              ::testing::internal::CaptureStderr();
              start("one that ends");
              // Of those that start between two looks, which come every 20 ms, the last one stands for all.
              std::this_thread::sleep_for(std::chrono::milliseconds(200));
              recorded::stall(stream);
              start("one that does not");
              std::string error;
              for (const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
                   error.empty() && std::chrono::steady_clock::now() < end;) {
                std::this_thread::sleep_for(std::chrono::milliseconds(20));
                try {
                  watch.check();
                } catch (const dtensor::CommunicationError& failure) {
                  error = failure.what();
                }
              }
              EXPECT_THAT(error, HasSubstr("[all_gather] one that does not, 8 bytes over recorded group"));
              EXPECT_THAT(::testing::internal::GetCapturedStderr(), ::testing::Not(HasSubstr("one that ends")));
              recorded::resume();
            },
            {.make_environment = false});
}

hsdp::FullySharded<ChainImpl> chain_of_units(RankContext& context) {
  auto net = hsdp::meta_init([] { return Chain(kEven); });
  auto model = hsdp::fully_shard(net, {.mesh = context.environment().mesh(), .units = hsdp::each("blocks.*")});
  model.materialize(context.environment().device());
  return model;
}

TEST(Time, ACollectiveThatNeverEndsIsReportedWithUnitBytesAndRank) {
  RunOptions options;
  options.communication_timeout = std::chrono::seconds(10);
  options.killed = {2};  // no such rank: the two that there are end without meeting again
  run_on_device(
      2,
      [](RankContext& context) {
        const auto device = context.environment().device();
        auto model = chain_of_units(context);
        const auto x = torch::ones({2, 8}, device);
        model->forward(x).sum().backward();
        context.environment().barrier();
        ::testing::internal::CaptureStderr();
        hang_collective(0);
        // The host goes on, until what it has to look at does not come: it is not held up there for ever.
        std::string error;
        int64_t forwards = 0;
        try {
          for (; forwards < 1000; ++forwards) model->forward(x);
        } catch (const dtensor::CommunicationError& failure) {
          error = failure.what();
        }
        EXPECT_GT(forwards, 0);
        const auto names_it = ::testing::AllOf(HasSubstr("[all_gather]"), HasSubstr("bytes over recorded group"),
                                               HasSubstr("(rank " + std::to_string(context.rank()) + " of 2)"),
                                               HasSubstr("(timeout 10 s): it has not ended on the device"));
        // Once to whoever looks at the screen, should the host be held up in a call to the device, and then to the
        // host.
        EXPECT_THAT(::testing::internal::GetCapturedStderr(), names_it);
        EXPECT_THAT(error, names_it);
      },
      options);
}

// As a watchdog does when it gives a communicator up: what is started afterwards says so and leaves no group open.
TEST(Time, ACommunicatorThatWasAbortedIsNamedWithUnitBytesAndRank) {
  RunOptions options;
  options.timeout = std::chrono::seconds(60);
  options.killed = {2};  // no such rank: the two that there are end without meeting again
  run_on_device(
      2,
      [](RankContext& context) {
        const auto device = context.environment().device();
        auto model = chain_of_units(context);
        recorded::set_query_policy([](int64_t nth) { return nth >= 2; });
        const auto x = torch::ones({2, 8}, device);
        for (int i = 0; i < 3; ++i) model->forward(x).sum().backward();
        context.environment().barrier();
        for (const auto& backend : backends()) backend->abort();
        const auto begin = recorded::log_size();
        // The second attempt finds what the first one left behind.
        for (int attempt = 0; attempt < 2; ++attempt) {
          std::string error;
          try {
            model->forward(x);
          } catch (const dtensor::CommunicationError& failure) {
            error = failure.what();
          }
          // A weight, a bias, and what the ranks compare.
          EXPECT_THAT(error,
                      HasSubstr("[all_gather] blocks.0, 3 collectives, 640 bytes over recorded group \"shard\" (rank " +
                                std::to_string(context.rank()) + " of 2)"));
          EXPECT_THAT(error, HasSubstr("the communicator was aborted"));
        }
        const auto log = recorded::log();
        EXPECT_TRUE(std::none_of(log.begin() + static_cast<std::ptrdiff_t>(begin), log.end(), [](const auto& entry) {
          return entry.kind == Logged::collective || entry.kind == Logged::group_start;
        }));
      },
      options);
}

// ---- groups, as the library asks a communicator for them ----

/// Writes down what it is told and passes it on.
class LoggedGroups final : public dtensor::Communicator {
 public:
  using OperationName = dtensor::OperationName;
  using Work = dtensor::Work;
  LoggedGroups(std::shared_ptr<dtensor::Communicator> below, std::vector<GroupCall>& calls)
      : below_(std::move(below)), calls_(&calls) {}
  int64_t rank() const override { return below_->rank(); }
  int64_t size() const override { return below_->size(); }
  std::string describe() const override { return below_->describe(); }
  bool prefers_groups() const override { return below_->prefers_groups(); }
  std::shared_ptr<Work> all_gather(const at::Tensor& output, const at::Tensor& input, OperationName name) override {
    add(name);
    return below_->all_gather(output, input, name);
  }
  std::shared_ptr<Work> reduce_scatter(const at::Tensor& output, const at::Tensor& input, OperationName name) override {
    add(name);
    return below_->reduce_scatter(output, input, name);
  }
  std::shared_ptr<Work> all_reduce(const at::Tensor& tensor, dtensor::ReduceOp op, OperationName name) override {
    add(name);
    return below_->all_reduce(tensor, op, name);
  }
  std::shared_ptr<Work> broadcast(const at::Tensor& tensor, int64_t root, OperationName name) override {
    add(name);
    return below_->broadcast(tensor, root, name);
  }
  void start_group() override {
    calls_->push_back({GroupCall::start});
    below_->start_group();
  }
  std::shared_ptr<Work> end_group() override {
    calls_->push_back({GroupCall::end});
    return below_->end_group();
  }
  void barrier(OperationName name) override { below_->barrier(name); }

 private:
  void add(OperationName name) { calls_->push_back({GroupCall::member, name.operation, std::string(name.subject)}); }

  std::shared_ptr<dtensor::Communicator> below_;
  std::vector<GroupCall>* calls_;
};

TEST(Groups, ThatTheLibraryAsksForPairAndAreOfOneUnit) {
  for (const char* name : {"Two", "ReplicatedMixed"}) {
    Case c = case_named(name);
    run_on_device(
        c.ranks(),
        [&](RankContext& context) {
          recorded::set_query_policy([](int64_t nth) { return nth >= 2; });
          std::vector<GroupCall> calls;
          c.options.transport = [&calls](std::shared_ptr<dtensor::Communicator> communicator) {
            return hsdp::make_transport(std::make_shared<LoggedGroups>(std::move(communicator), calls));
          };
          train(context, c);
          EXPECT_EQ(wrong_groups(calls), "");
          std::map<std::string, size_t> starts;
          for (size_t i = 0; i + 1 < calls.size(); ++i) {
            if (calls[i].kind == GroupCall::start) ++starts[calls[i + 1].operation];
          }
          EXPECT_GE(starts["all_gather"], 5u * kSteps);
          EXPECT_EQ(starts["reduce_scatter"], 5u * kSteps);
          // One forgotten end, one start too many, one member of another unit.
          for (size_t i = 0; i < calls.size(); ++i) {
            auto wrong = calls;
            if (calls[i].kind == GroupCall::member) {
              wrong[i].subject += " of another";
              // Alone in its group it may be anybody's.
              if (calls[i - 1].kind != GroupCall::member && calls[i + 1].kind != GroupCall::member) continue;
            } else {
              wrong.erase(wrong.begin() + static_cast<std::ptrdiff_t>(i));
            }
            EXPECT_NE(wrong_groups(wrong), "") << "call " << i;
            if (calls[i].kind != GroupCall::start) continue;
            wrong = calls;
            wrong.insert(wrong.begin() + static_cast<std::ptrdiff_t>(i), {GroupCall::start});
            EXPECT_NE(wrong_groups(wrong), "") << "call " << i;
          }
        },
        patient());
  }
}

}  // namespace
