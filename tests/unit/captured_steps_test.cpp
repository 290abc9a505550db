// Steps of FusedAdamW and FusedSGD in a graph: what is recorded once and replayed is what steps one by one are, and the
// counts that replays have made reach whoever reads them. A recorder on the host stands in for a device's graphs.
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "dtensor/dispatch.h"
#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "dtensor/graph_capture.h"
#include "hsdp/checkpoint/optimizer_state.h"
#include "hsdp/grad_scaler.h"
#include "hsdp/optimizers.h"
#include "tests/testing/expect.h"
#include "tests/testing/offline_mesh.h"

namespace {

using testing_support::expect_error;
using torch::optim::AdamWOptions;
using torch::optim::AdamWParamState;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;
using torch::optim::SGDParamState;
using Parameters = std::vector<torch::Tensor>;

constexpr auto kRecorderKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

/// Calls that write to tensors are kept while it records, and not done, as a device does; replay() does them on the
/// same memory with the same numbers.
class HostGraph {
 public:
  void record(const std::function<void()>& step) {
    recording_ = this;
    try {
      const c10::impl::IncludeDispatchKeyGuard on_top(kRecorderKey);
      step();
    } catch (...) {
      recording_ = nullptr;
      throw;
    }
    recording_ = nullptr;
  }
  void replay() const {
    const torch::NoGradGuard no_grad;
    const dtensor::ShardedRulesGuard sharded;
    for (const auto& [operation, arguments] : calls_) {
      auto stack = arguments;
      operation.callBoxed(stack);
    }
  }
  size_t size() const { return calls_.size(); }

  static uint64_t current(c10::Device) { return reinterpret_cast<uint64_t>(recording_); }
  static void take(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
    const c10::impl::ExcludeDispatchKeyGuard below(kRecorderKey);
    const auto& schema = operation.schema();
    if (!schema.is_mutable()) return operation.callBoxed(*stack);
    const auto arguments = torch::jit::last(*stack, schema.arguments().size()).vec();
    recording_->calls_.emplace_back(operation, arguments);
    torch::jit::drop(*stack, arguments.size());
    if (!schema.returns().empty()) stack->push_back(arguments.front());
  }

 private:
  static inline HostGraph* recording_ = nullptr;
  std::vector<std::pair<c10::OperatorHandle, std::vector<c10::IValue>>> calls_;
};

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&HostGraph::take>());
}

class CapturedSteps : public ::testing::Test {
 protected:
  void SetUp() override { dtensor::register_graph_capture(c10::kCPU, {HostGraph::current, nullptr}); }
  void TearDown() override { dtensor::register_graph_capture(c10::kCPU, {}); }
};

/// Parameters with gradients that stay where they are; "late" has none before its third step.
struct Net {
  std::map<std::string, torch::Tensor> parameters;

  Net() {
    parameters["weight"] = torch::linspace(-1, 1, 12).view({3, 4});
    parameters["bias"] = torch::linspace(1, 2, 3);
    parameters["column"] = torch::linspace(-2, 1, 6).view({2, 3}).t();
    parameters["double"] = torch::linspace(-1, 2, 5, torch::kDouble);
    parameters["late"] = torch::linspace(0.5, 1, 4);
    for (auto& [name, parameter] : parameters) parameter = parameter.detach().clone().requires_grad_();
  }
  std::vector<OptimizerParamGroup> groups() const {
    return {OptimizerParamGroup(
                {parameters.at("weight"), parameters.at("bias"), parameters.at("double"), parameters.at("late")}),
            OptimizerParamGroup({parameters.at("column")})};
  }
  hsdp::ParameterNames names() const {
    hsdp::ParameterNames names;
    for (const auto& [name, parameter] : parameters) names.emplace(parameter.unsafeGetTensorImpl(), name);
    return names;
  }
  void set_gradients(int step) {
    for (auto& [name, parameter] : parameters) {
      if (name == "late" && step < 2) continue;
      const auto gradient = (parameter.detach() * 0.3 + step).sin();
      if (parameter.grad().defined()) {
        parameter.mutable_grad().copy_(gradient);
      } else {
        parameter.mutable_grad() = gradient;
      }
    }
  }
};

/// What is recorded or done step by step.
template <class O>
struct Run {
  template <class Options>
  explicit Run(const Options& options) : optimizer(net.groups(), options) {}
  void step(int number) {
    net.set_gradients(number);
    optimizer.step();
  }
  void replay(int number) {
    net.set_gradients(number);
    graph.replay();
  }
  void record() {
    graph.record([this] { optimizer.step(); });
  }
  int64_t host_count(const std::string& name) {
    return static_cast<AdamWParamState&>(*optimizer.state().at(net.parameters.at(name).unsafeGetTensorImpl())).step();
  }
  hsdp::OptimizerStates states() { return hsdp::optimizer_states({&optimizer}, net.names()); }
  hsdp::OptimizerStates copied_states() {
    auto result = states();
    for (auto& [name, entry] : result) {
      for (auto& [key, tensor] : entry.tensors) tensor = tensor.clone();
    }
    return result;
  }
  std::string saved() {
    std::stringstream stream;
    torch::save(optimizer, stream);
    return stream.str();
  }
  void load(const std::string& bytes) {
    std::stringstream stream(bytes);
    torch::load(optimizer, stream);
  }

  Net net;
  O optimizer;
  HostGraph graph;
};

template <class O>
void expect_same(Run<O>& actual, Run<O>& expected) {
  for (const auto& [name, parameter] : expected.net.parameters) {
    EXPECT_TRUE(torch::equal(actual.net.parameters.at(name), parameter)) << name;
  }
  const auto ours = actual.states(), theirs = expected.states();
  for (const auto& [name, entry] : theirs) {
    SCOPED_TRACE(name);
    EXPECT_EQ(ours.at(name).counts, entry.counts);
    ASSERT_EQ(ours.at(name).tensors.size(), entry.tensors.size());
    for (const auto& [key, tensor] : entry.tensors) EXPECT_TRUE(torch::equal(ours.at(name).tensors.at(key), tensor));
  }
}

using AdamWRun = Run<hsdp::FusedAdamW>;
using SGDRun = Run<hsdp::FusedSGD>;

AdamWOptions adamw(bool amsgrad = false) {
  return AdamWOptions(0.05).betas({0.8, 0.95}).weight_decay(0.1).amsgrad(amsgrad);
}

/// Both after steps 0, 1 and 2, and `first` with its step recorded: three steps each, of "late" one.
template <class O>
void warm_up(Run<O>& first, Run<O>& second) {
  for (auto* run : {&first, &second}) {
    for (int step = 0; step < 3; ++step) run->step(step);
  }
  first.record();
}

TEST_F(CapturedSteps, ReplaysOfAdamWAreStepsOneByOne) {
  for (const bool amsgrad : {false, true}) {
    AdamWRun recorded(adamw(amsgrad)), eager(adamw(amsgrad));
    warm_up(recorded, eager);
    // Recording does nothing: one addition and one kernel for each group and dtype, and one for "late".
    EXPECT_EQ(recorded.graph.size(), 3u + 3u + 1u);
    expect_same(recorded, eager);
    for (int step = 3; step < 8; ++step) {
      recorded.replay(step);
      eager.step(step);
    }
    EXPECT_EQ(recorded.host_count("weight"), 3);
    recorded.optimizer.sync_state();
    EXPECT_EQ(recorded.host_count("weight"), 8);
    EXPECT_EQ(recorded.host_count("late"), 6);
    expect_same(recorded, eager);
    // Steps that are done go on from there, and replays from these.
    for (auto* run : {&recorded, &eager}) run->step(8);
    recorded.replay(9);
    eager.step(9);
    expect_same(recorded, eager);
    EXPECT_EQ(recorded.host_count("weight"), 10);
  }
}

TEST_F(CapturedSteps, ReplaysOfSGDAreStepsOneByOne) {
  const auto options = SGDOptions(0.1).momentum(0.9).dampening(0.25).weight_decay(0.1);
  SGDRun recorded(options), eager(options);
  warm_up(recorded, eager);
  for (int step = 3; step < 6; ++step) {
    recorded.replay(step);
    eager.step(step);
  }
  for (auto* run : {&recorded, &eager}) run->step(6);
  expect_same(recorded, eager);
}

TEST_F(CapturedSteps, ShardedParametersAreRecordedToo) {
  const auto mesh = testing_support::offline_mesh(3, 1);
  std::vector<torch::Tensor> trained;
  std::vector<std::unique_ptr<hsdp::FusedAdamW>> optimizers;
  for (int i = 0; i < 2; ++i) {
    trained.push_back(dtensor::DTensor::distribute(torch::linspace(-1, 1, 28).view({7, 4}), mesh, {dtensor::Shard(0)})
                          .as_parameter(true)
                          .tensor());
    optimizers.push_back(std::make_unique<hsdp::FusedAdamW>(Parameters{trained[i]}, adamw()));
    trained[i].mutable_grad() =
        dtensor::DTensor::distribute(torch::linspace(1, 2, 28).view({7, 4}), mesh, {dtensor::Shard(0)}).tensor();
    optimizers[i]->step();
  }
  HostGraph graph;
  graph.record([&] { optimizers[0]->step(); });
  for (int i = 0; i < 4; ++i) {
    graph.replay();
    optimizers[1]->step();
  }
  EXPECT_TRUE(torch::equal(dtensor::DTensor(trained[0]).to_local(), dtensor::DTensor(trained[1]).to_local()));
  optimizers[0]->sync_state();
  auto& state = static_cast<AdamWParamState&>(*optimizers[0]->state().at(trained[0].unsafeGetTensorImpl()));
  EXPECT_EQ(state.step(), 5);
}

// Parameters that were stepped together may part ways.
TEST_F(CapturedSteps, StepsOfSomeParametersAloneCountForThem) {
  AdamWRun recorded(adamw()), eager(adamw());
  warm_up(recorded, eager);
  recorded.replay(3);
  eager.step(3);
  for (auto* run : {&recorded, &eager}) {
    run->net.set_gradients(4);
    auto& parameter = run->net.parameters.at("weight");
    const auto gradient = parameter.grad();
    parameter.mutable_grad().reset();
    run->optimizer.step();
    parameter.mutable_grad() = gradient;
  }
  recorded.replay(5);
  eager.step(5);
  expect_same(recorded, eager);
  EXPECT_EQ(recorded.host_count("weight"), 5);
  EXPECT_EQ(recorded.host_count("bias"), 6);
}

TEST_F(CapturedSteps, GroupsThatComeLaterAreSteppedOutside) {
  AdamWRun recorded(adamw()), eager(adamw());
  warm_up(recorded, eager);
  for (auto* run : {&recorded, &eager}) {
    auto& later = run->net.parameters["later"] = torch::ones({3}).requires_grad_();
    run->optimizer.add_param_group(OptimizerParamGroup({later}, std::make_unique<AdamWOptions>(adamw())));
    run->net.set_gradients(3);
  }
  // The recorded step knows nothing of it.
  eager.net.parameters.at("later").mutable_grad().reset();
  eager.optimizer.step();
  recorded.graph.replay();
  for (auto* run : {&recorded, &eager}) run->step(4);
  expect_same(recorded, eager);
  EXPECT_EQ(recorded.host_count("later"), 1);
  // Now it can be recorded as well, in another graph that goes on from the same counts.
  HostGraph both;
  both.record([&] { recorded.optimizer.step(); });
  recorded.net.set_gradients(5);
  both.replay();
  eager.step(5);
  expect_same(recorded, eager);
}

TEST_F(CapturedSteps, AParameterThatIsTwiceInAGroupIsCountedOnce) {
  const auto parameter = torch::ones({3}).requires_grad_();
  hsdp::FusedAdamW optimizer({parameter, parameter}, adamw());
  parameter.mutable_grad() = torch::ones({3});
  optimizer.step();
  HostGraph graph;
  graph.record([&] { optimizer.step(); });
  graph.replay();
  optimizer.step();
  optimizer.sync_state();
  EXPECT_EQ(static_cast<AdamWParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl())).step(), 3);
}

// ---- who reads and writes state ----

hsdp::OptimizerStates loaded_by_the_stock_class(const std::string& file) {
  Net net;
  torch::optim::AdamW stock(net.groups(), AdamWOptions(1));
  std::stringstream stream(file);
  torch::load(stock, stream);
  return hsdp::optimizer_states({&stock}, net.names());
}

TEST_F(CapturedSteps, FilesHaveTheCountsOfReplays) {
  AdamWRun recorded(adamw()), eager(adamw());
  warm_up(recorded, eager);
  for (int step = 3; step < 6; ++step) {
    recorded.replay(step);
    eager.step(step);
  }
  const auto loaded = loaded_by_the_stock_class(recorded.saved());
  EXPECT_EQ(loaded.at("weight").counts.at("step"), 6);
  EXPECT_EQ(loaded.at("late").counts.at("step"), 4);
}

// The counts of the file are those that the host knew last, so that a count alone does not tell that it was written.
TEST_F(CapturedSteps, ReplaysGoOnFromWhatWasLoaded) {
  AdamWRun recorded(adamw(true)), eager(adamw(true));
  warm_up(recorded, eager);
  const auto file = recorded.saved();
  const auto states = recorded.copied_states();
  const std::vector<std::function<void(AdamWRun&)>> loads{
      [&](AdamWRun& run) { run.load(file); },
      [&](AdamWRun& run) { hsdp::restore_optimizer_states({&run.optimizer}, run.net.names(), states, {}); }};
  for (const auto& load : loads) {
    for (int step = 3; step < 6; ++step) {
      recorded.replay(step);
      eager.step(step);
    }
    const auto names = recorded.net.names();
    for (auto* run : {&recorded, &eager}) load(*run);
    EXPECT_EQ(recorded.host_count("weight"), 3);
    recorded.replay(6);
    eager.step(6);
    expect_same(recorded, eager);
    EXPECT_EQ(recorded.host_count("weight"), 4);
    EXPECT_EQ(recorded.host_count("late"), 2);
  }
}

TEST_F(CapturedSteps, ReplaysOfSGDGoOnFromWhatWasLoaded) {
  const auto options = SGDOptions(0.1).momentum(0.9);
  SGDRun recorded(options), eager(options);
  warm_up(recorded, eager);
  const auto file = recorded.saved();
  for (int step = 3; step < 5; ++step) {
    recorded.replay(step);
    eager.step(step);
  }
  for (auto* run : {&recorded, &eager}) run->load(file);
  recorded.replay(5);
  eager.step(5);
  expect_same(recorded, eager);
}

TEST_F(CapturedSteps, WhatAProgramWritesIsTakenOver) {
  AdamWRun recorded(adamw()), eager(adamw());
  warm_up(recorded, eager);
  recorded.replay(3);
  eager.step(3);
  recorded.optimizer.sync_state();
  for (auto* run : {&recorded, &eager}) {
    auto& state = run->optimizer.state();
    auto& weight = static_cast<AdamWParamState&>(*state.at(run->net.parameters.at("weight").unsafeGetTensorImpl()));
    weight.step(41);
    weight.exp_avg(torch::full({3, 4}, 0.25));
    state.erase(run->net.parameters.at("column").unsafeGetTensorImpl());
  }
  recorded.optimizer.sync_state();
  recorded.replay(4);
  eager.step(4);
  expect_same(recorded, eager);
  EXPECT_EQ(recorded.host_count("weight"), 42);
  EXPECT_EQ(recorded.host_count("column"), 1);
  // step() sees it without being told.
  for (auto* run : {&recorded, &eager}) {
    auto& state = run->optimizer.state();
    auto& weight = static_cast<AdamWParamState&>(*state.at(run->net.parameters.at("weight").unsafeGetTensorImpl()));
    weight.step(7);
    weight.exp_avg_sq(torch::full({3, 4}, 2.0));
    run->step(5);
  }
  recorded.replay(6);
  eager.step(6);
  expect_same(recorded, eager);
}

// Another dtype makes the graph void, but what it has counted stays.
TEST_F(CapturedSteps, CountsOutliveTheGraph) {
  AdamWRun recorded(adamw()), eager(adamw());
  warm_up(recorded, eager);
  for (int step = 3; step < 5; ++step) {
    recorded.replay(step);
    eager.step(step);
  }
  for (auto* run : {&recorded, &eager}) {
    for (auto& [name, parameter] : run->net.parameters) {
      parameter.mutable_grad().reset();
      parameter.set_data(parameter.detach().to(torch::kDouble));
    }
    run->step(5);
  }
  EXPECT_EQ(loaded_by_the_stock_class(recorded.saved()).at("weight").counts.at("step"), 6);
  expect_same(recorded, eager);
  EXPECT_EQ(recorded.host_count("weight"), 6);
}

TEST_F(CapturedSteps, StateThatAStepDoesNotUseMayLieAnyhow) {
  AdamWRun recorded(adamw()), eager(adamw());
  for (auto* run : {&recorded, &eager}) {
    for (int step = 0; step < 3; ++step) run->step(step);
    auto& state = run->optimizer.state();
    auto& weight = static_cast<AdamWParamState&>(*state.at(run->net.parameters.at("weight").unsafeGetTensorImpl()));
    weight.max_exp_avg_sq(torch::zeros({3, 4}, torch::kDouble));
  }
  recorded.record();
  const auto file = recorded.saved();
  recorded.replay(3);
  eager.step(3);
  for (auto* run : {&recorded, &eager}) run->load(file);
  recorded.replay(4);
  eager.step(4);
  expect_same(recorded, eager);
}

TEST_F(CapturedSteps, StepsThatAScalerSkipsDoNotCount) {
  AdamWRun recorded(adamw()), eager(adamw());
  warm_up(recorded, eager);
  recorded.replay(3);
  eager.step(3);
  for (auto* run : {&recorded, &eager}) {
    EXPECT_FALSE(run->optimizer.step_scaled({}, torch::ones({1})));
    EXPECT_TRUE(run->optimizer.step_scaled(torch::full({1}, 4.0), torch::zeros({1})));
  }
  recorded.replay(4);
  eager.step(4);
  expect_same(recorded, eager);
  EXPECT_EQ(recorded.host_count("weight"), 6);
}

// ---- refused ----

TEST_F(CapturedSteps, AFirstStepIsRefused) {
  AdamWRun adam(adamw());
  adam.net.set_gradients(2);
  expect_error<dtensor::NotSupportedError>([&] { adam.record(); }, "[FusedAdamW] the first step() while a graph is",
                                           "shape [3, 4]", "step once before");
  EXPECT_TRUE(adam.optimizer.state().empty());
  SGDRun sgd(SGDOptions(0.1).momentum(0.5));
  sgd.net.set_gradients(2);
  expect_error<dtensor::NotSupportedError>([&] { sgd.record(); }, "[FusedSGD] the first step() while a graph is");
  EXPECT_EQ(adam.graph.size() + sgd.graph.size(), 0u);
  SGDRun without(SGDOptions(0.1));
  without.net.set_gradients(2);
  without.record();
  EXPECT_EQ(without.graph.size(), 3u);
}

TEST_F(CapturedSteps, AParameterThatWasNeverSteppedIsRefused) {
  AdamWRun run(adamw());
  run.step(0);
  run.net.set_gradients(2);
  expect_error<dtensor::NotSupportedError>([&] { run.record(); }, "shape [4]", "step once before");
  EXPECT_EQ(run.graph.size(), 0u);
  run.step(2);
  run.record();
  SGDRun sgd(SGDOptions(0.1).momentum(0.5));
  sgd.step(0);
  sgd.net.set_gradients(2);
  expect_error<dtensor::NotSupportedError>([&] { sgd.record(); }, "shape [4]", "step once before");
  EXPECT_EQ(sgd.graph.size(), 0u) << "none of its groups";
}

TEST_F(CapturedSteps, StateThatWasWrittenSinceIsRefused) {
  AdamWRun run(adamw());
  run.step(2);
  const auto file = run.saved();
  run.step(3);
  run.load(file);
  expect_error<dtensor::NotSupportedError>([&] { run.record(); }, "or the first since its state was written");
  run.step(4);
  run.record();
  // Now the graph's memory takes it.
  run.load(file);
  HostGraph again;
  again.record([&] { run.optimizer.step(); });
  EXPECT_EQ(again.size(), run.graph.size());
  auto& state =
      static_cast<AdamWParamState&>(*run.optimizer.state().at(run.net.parameters.at("weight").unsafeGetTensorImpl()));
  state.exp_avg(state.exp_avg().clone());
  expect_error<dtensor::NotSupportedError>([&] { again.record([&] { run.optimizer.step(); }); }, "step once before");
}

TEST_F(CapturedSteps, WhatTheHostWaitsForIsRefused) {
  AdamWRun adam(adamw());
  SGDRun sgd(SGDOptions(0.1).momentum(0.5));
  adam.step(2);
  sgd.step(2);
  HostGraph graph;
  const auto refuses = [&](const std::function<void()>& call, const std::string& text) {
    expect_error<dtensor::NotSupportedError>([&] { graph.record(call); }, text, "while a graph is captured");
  };
  refuses([&] { adam.optimizer.step_scaled({}, torch::zeros({1})); }, "[FusedAdamW] step_scaled()");
  refuses([&] { sgd.optimizer.step_scaled(torch::ones({1}), torch::zeros({1})); }, "[FusedSGD] step_scaled()");
  hsdp::GradScaler scaler;
  scaler.scale(torch::ones({}));
  refuses([&] { scaler.step(adam.optimizer); }, "[FusedAdamW] step_scaled()");
  adam.record();
  sgd.record();
  refuses([&] { adam.optimizer.sync_state(); }, "[FusedAdamW] sync_state()");
  refuses([&] { sgd.optimizer.sync_state(); }, "[FusedSGD] sync_state()");
  refuses([&] { adam.saved(); }, "[FusedAdamW] save()");
  refuses([&] { adam.states(); }, "[FusedAdamW] sync_state()");
}

TEST_F(CapturedSteps, ParametersOfWhichAGraphWouldHaveSomeAreRefused) {
  AdamWRun run(adamw());
  run.step(2);
  static int asked;
  asked = 0;
  // As if every second group and dtype lay elsewhere.
  dtensor::register_graph_capture(c10::kCPU, {[](c10::Device) -> uint64_t { return ++asked % 2; }, nullptr});
  expect_error<dtensor::NotSupportedError>([&] { run.optimizer.step(); }, "[FusedAdamW] step() of parameters on cpu",
                                           "take an optimizer for each device");
  EXPECT_EQ(run.host_count("weight"), 1);
}

}  // namespace
