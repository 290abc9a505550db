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
#include <set>
#include <string>
#include <thread>
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

namespace {

using namespace testing_support;
using ::testing::HasSubstr;

class Recorded : public ::testing::Environment {
 public:
  void SetUp() override {
    register_private_device(PrivateStreams::recorded);
    hsdp::register_backend("recorded", c10::DeviceType::PrivateUse1, make_recorded_backend);
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
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::vector<torch::Tensor>& parameters) {
  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.05).momentum(0.9));
}

constexpr const char* kStep = "step ";

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

// ---- what the log has to show ----

bool is_on_compute_stream(const LogEntry& entry) { return entry.stream.id == 0; }
bool is_product(const LogEntry& entry) {
  return entry.kind == Logged::launch && entry.name.find("mm") != std::string::npos;
}

/// Entries [begin, end) of one step of training.
std::pair<size_t, size_t> step_of(const StreamLog& log, int64_t step) {
  const auto begins = std::find_if(log.begin(), log.end(), [&](const LogEntry& entry) {
    return entry.kind == Logged::note && entry.name == kStep + std::to_string(step);
  });
  const auto ends = std::find_if(
      begins, log.end(), [](const LogEntry& entry) { return entry.kind == Logged::note && entry.name == kSteadyEnds; });
  TORCH_CHECK(begins != log.end() && ends != log.end(), "no step ", step);
  return {begins - log.begin(), ends - log.begin()};
}

/// First members of groups, and collectives that are by themselves.
std::vector<size_t> collectives_of(const StreamLog& log, std::pair<size_t, size_t> step, const std::string& name) {
  std::vector<size_t> found;
  bool in_group = false, has_one = false;
  for (size_t i = step.first; i < step.second; ++i) {
    if (log[i].kind == Logged::group_start) {
      in_group = true;
      has_one = false;
    }
    if (log[i].kind == Logged::group_end) in_group = false;
    if (log[i].kind != Logged::collective || log[i].name != name || (in_group && has_one)) continue;
    has_one = true;
    found.push_back(i);
  }
  return found;
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

/// Products on the compute stream that run at the same time as collective `index` where streams and host allow it.
int64_t concurrent_products(const HappensBefore& check, const StreamLog& log, size_t index, const std::string& label) {
  int64_t count = 0;
  for (size_t i = 0; i < log.size(); ++i) {
    if (!is_product(log[i]) || !is_on_compute_stream(log[i]) || (!label.empty() && log[i].label != label)) continue;
    count += !check.is_ordered(i, index) && !check.is_ordered(index, i);
  }
  return count;
}

void expect_streams(const Case& c, const StreamLog& log) {
  const auto step = step_of(log, kSteps - 1);
  const auto gathers = collectives_of(log, step, "all_gather"), scatters = collectives_of(log, step, "reduce_scatter");
  if (c.mesh.back() == 1) return;
  ASSERT_GE(gathers.size(), 5u);
  ASSERT_EQ(scatters.size(), c.scatters);
  // Gathers and reductions have a stream each, of high priority; a clipped norm is a matter of the compute stream.
  std::set<int64_t> gather_streams, scatter_streams, all_reduce_streams;
  for (auto i : gathers) gather_streams.insert(log[i].stream.id);
  for (auto i : scatters) scatter_streams.insert(log[i].stream.id);
  if (!c.clips) {
    for (auto i : collectives_of(log, step, "all_reduce")) all_reduce_streams.insert(log[i].stream.id);
  }
  ASSERT_EQ(gather_streams.size(), 1u);
  ASSERT_EQ(scatter_streams.size(), 1u);
  EXPECT_EQ(all_reduce_streams.size(), c.mesh.size() == 2 ? 1u : 0u);
  std::set<int64_t> all{0};
  for (const auto& streams : {gather_streams, scatter_streams, all_reduce_streams}) {
    for (auto stream : streams) {
      EXPECT_TRUE(all.insert(stream).second) << "stream " << stream << " is used twice";
      EXPECT_LT(
          recorded::priority(c10::Stream(
              c10::Stream::UNSAFE,
              c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(log[gathers[0]].stream.device)),
              stream)),
          0);
    }
  }
  int64_t copies = 0;
  for (size_t i = step.first; i < step.second; ++i) {
    if (log[i].kind != Logged::launch || !log[i].label.starts_with("FSDP::all_gather_copy_in")) continue;
    ++copies;
    EXPECT_EQ(log[i].stream.id, *gather_streams.begin()) << to_string(log, i);
  }
  if (c.options.mixed_precision.param_dtype) {
    EXPECT_GT(copies, 0);
  }
}

/// The gather of the next unit and the reduction of the last one can run beside the computing of this one.
void expect_overlap(const StreamLog& log, const HappensBefore& check) {
  const auto step = step_of(log, kSteps - 1);
  const auto gathers = collectives_of(log, step, "all_gather"), scatters = collectives_of(log, step, "reduce_scatter");
  std::map<std::string, size_t> forward;  // the first gather of each unit
  for (auto i : gathers) forward.try_emplace(log[i].label, i);
  for (int64_t block = 1; block < 4; ++block) {
    const auto gather = forward.find("FSDP::all_gather (blocks." + std::to_string(block) + ")");
    ASSERT_NE(gather, forward.end());
    EXPECT_GE(concurrent_products(check, log, gather->second, "forward blocks." + std::to_string(block - 1)), 1)
        << "gather of block " << block;
  }
  // In backward every gather but the first, and every reduction but the last two.
  std::vector<size_t> in_backward;
  for (auto i : gathers) {
    if (forward.at(log[i].label) != i) in_backward.push_back(i);
  }
  for (size_t i = 1; i < in_backward.size(); ++i) {
    EXPECT_GE(concurrent_products(check, log, in_backward[i], ""), 1) << to_string(log, in_backward[i]);
  }
  for (size_t i = 0; i + 2 < scatters.size(); ++i) {
    EXPECT_GE(concurrent_products(check, log, scatters[i], ""), 1) << to_string(log, scatters[i]);
  }
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

// ---- mistakes, planted into what was recorded ----

// Operators of the recorded device run at once, so a run in which an order is forgotten has the same log but for it.

StreamLog without(StreamLog log, size_t index) {
  log.erase(log.begin() + static_cast<std::ptrdiff_t>(index));
  return log;
}

/// The entry moves to right behind `after`.
StreamLog moved(StreamLog log, size_t index, size_t after) {
  const LogEntry entry = log[index];
  log.erase(log.begin() + static_cast<std::ptrdiff_t>(index));
  log.insert(log.begin() + static_cast<std::ptrdiff_t>(after < index ? after + 1 : after), entry);
  return log;
}

bool finds(const StreamLog& log) { return !HappensBefore(log).violations().empty(); }

/// One step, and enough after it for what it left behind to be used and freed.
StreamLog shortened(const StreamLog& log) {
  return {log.begin(), log.begin() + static_cast<std::ptrdiff_t>(step_of(log, kWarmUp + 1).second)};
}

void expect_every_needed_wait_found(const StreamLog& log) {
  const HappensBefore check(log);
  const auto step = step_of(log, kWarmUp);
  int64_t needed = 0, found = 0, redundant = 0;
  std::string missed;
  for (const auto& wait : check.waits()) {
    if (wait.entry < step.first || wait.entry >= step.second) continue;
    if (!wait.needed) {
      ++redundant;
      continue;
    }
    ++needed;
    if (finds(without(log, wait.entry))) {
      ++found;
    } else {
      missed += to_string(log, wait.entry > 8 ? wait.entry - 8 : 0, wait.entry + 4) + "--\n";
    }
  }
  std::cout << "waits of a step: " << needed << " order something, " << found << " are found when dropped, "
            << redundant << " order nothing new\n";
  EXPECT_GT(needed, 10);
  EXPECT_EQ(missed, "");
}

void expect_every_early_release_found(const StreamLog& log) {
  const auto step = step_of(log, kWarmUp);
  std::map<uint64_t, StreamName> homes;
  std::map<uint64_t, size_t> elsewhere;  // the last launch on another stream than the home
  int64_t tried = 0;
  std::string missed;
  for (size_t i = 0; i < step.second; ++i) {
    const auto& entry = log[i];
    if (entry.kind == Logged::allocate && !entry.pinned) homes[entry.block] = entry.stream;
    if (entry.kind == Logged::launch || entry.kind == Logged::collective) {
      for (const auto* ranges : {&entry.reads, &entry.writes}) {
        for (const auto& range : *ranges) {
          const auto home = homes.find(range.block);
          if (home != homes.end() && home->second != entry.stream) elsewhere[range.block] = i;
        }
      }
    }
    const auto last = elsewhere.find(entry.block);
    if (entry.kind != Logged::release || i < step.first || last == elsewhere.end()) continue;
    ++tried;
    // Before the members of a group run there is nothing to overtake.
    size_t after = last->second;
    while (log[after].kind == Logged::collective && log[after + 1].call.communicator == log[after].call.communicator) {
      ++after;
    }
    if (!finds(moved(log, i, after))) missed += to_string(log, i) + " to behind " + to_string(log, after) + '\n';
  }
  EXPECT_GT(tried, 5);
  EXPECT_EQ(missed, "");
}

void expect_every_lost_bracket_found(const StreamLog& log) {
  const auto step = step_of(log, kWarmUp);
  int64_t groups = 0;
  for (size_t i = step.first; i < step.second; ++i) {
    if (log[i].kind == Logged::group_start) {
      EXPECT_TRUE(finds(without(log, i))) << to_string(log, i);
    }
    if (log[i].kind != Logged::group_end) continue;
    ++groups;
    EXPECT_TRUE(finds(without(log, i))) << to_string(log, i);
    // Swapped with what follows it on its stream: the event that everybody waits for.
    size_t next = i + 1;
    while (log[next].stream != log[i].stream || log[next].kind == Logged::allocate) ++next;
    EXPECT_TRUE(finds(moved(log, i, next))) << to_string(log, i) << " behind " << to_string(log, next);
  }
  EXPECT_GT(groups, 5);
}

void expect_every_mistake_found(const Case& c, const StreamLog& all) {
  const auto log = shortened(all);
  ASSERT_FALSE(finds(log));
  expect_every_needed_wait_found(log);
  if (c.ranks() == 1) return;
  expect_every_early_release_found(log);
  expect_every_lost_bracket_found(log);
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
        expect_streams(c, log);
        if (c.overlaps && c.ranks() > 1) expect_overlap(log, check);
        if (c.ranks() > 1) expect_alike_on_all_ranks(context, log);
        if (c.plants && context.rank() == 0) expect_every_mistake_found(c, log);
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

TEST(Time, ACollectiveThatNeverEndsIsReportedWithUnitBytesAndRank) {
  RunOptions options;
  options.communication_timeout = std::chrono::seconds(10);
  options.killed = {2};  // no such rank: the two that there are end without meeting again
  run_on_device(
      2,
      [](RankContext& context) {
        const auto device = context.environment().device();
        auto net = hsdp::meta_init([] { return Chain(kEven); });
        auto model = hsdp::fully_shard(net, {.mesh = context.environment().mesh(), .units = hsdp::each("blocks.*")});
        model.materialize(device);
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

}  // namespace
