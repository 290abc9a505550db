// What optimizers keep for a parameter, by its name: captured from one optimizer, restored into another that has the
// parameters in another order and other groups.
#include "hsdp/checkpoint/optimizer_state.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "dtensor/error.h"
#include "hsdp/optimizers.h"
#include "tests/testing/expect.h"

namespace optimizer_state_test {

using hsdp::OptimizerStates;
using hsdp::OptionValue;
using hsdp::ParameterNames;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;

using Options = std::map<std::string, OptionValue>;
using Groups = std::vector<OptimizerParamGroup>;

/// Four parameters; "late" gets its first gradient in the third step.
struct Net {
  std::map<std::string, torch::Tensor> parameters;

  Net() {
    const std::vector<std::pair<std::string, std::vector<int64_t>>> shapes{
        {"weight", {3, 4}}, {"bias", {4}}, {"scale", {}}, {"late", {2, 2}}};
    for (const auto& [name, sizes] : shapes) {
      const auto seed = static_cast<double>(name.size());
      const auto values =
          torch::linspace(-seed, seed, 12).index({torch::indexing::Slice(0, c10::multiply_integers(sizes))});
      parameters[name] = values.clone().view(sizes).requires_grad_();
    }
  }
  torch::Tensor operator[](const std::string& name) const { return parameters.at(name); }
  OptimizerParamGroup group(const std::vector<std::string>& names) const {
    std::vector<torch::Tensor> members;
    for (const auto& name : names) members.push_back(parameters.at(name));
    return OptimizerParamGroup(members);
  }
  Groups two_groups() const { return {group({"weight", "late"}), group({"bias", "scale"})}; }
  /// In another order, and the second group in two.
  Groups three_groups() const { return {group({"scale"}), group({"late", "weight"}), group({"bias"})}; }
  ParameterNames names() const {
    ParameterNames names;
    for (const auto& [name, tensor] : parameters) names.emplace(tensor.unsafeGetTensorImpl(), name);
    return names;
  }
  void copy_values(const Net& other) {
    torch::NoGradGuard no_grad;
    for (auto& [name, tensor] : parameters) tensor.copy_(other[name]);
  }
  void set_gradients(int step) {
    for (auto& [name, tensor] : parameters) {
      if (name == "late" && step < 2) continue;
      tensor.mutable_grad() = (tensor.detach() * 0.3 + step).sin();
    }
  }
};

void train(Net& net, Optimizer& optimizer, int first, int last) {
  for (int step = first; step < last; ++step) {
    net.set_gradients(step);
    optimizer.step();
  }
}

OptimizerStates copied(OptimizerStates states) {
  for (auto& [name, entry] : states) {
    for (auto& [key, tensor] : entry.tensors) tensor = tensor.clone();
  }
  return states;
}

void expect_equal(const OptimizerStates& actual, const OptimizerStates& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (const auto& [name, entry] : expected) {
    SCOPED_TRACE(name);
    ASSERT_TRUE(actual.contains(name));
    const auto& other = actual.at(name);
    EXPECT_EQ(other.kind, entry.kind);
    EXPECT_EQ(other.options, entry.options);
    EXPECT_EQ(other.counts, entry.counts);
    ASSERT_EQ(other.tensors.size(), entry.tensors.size());
    for (const auto& [key, tensor] : entry.tensors) {
      ASSERT_TRUE(other.tensors.contains(key)) << key;
      EXPECT_TRUE(torch::equal(other.tensors.at(key), tensor)) << key;
    }
  }
}

/// expect_error for a list of parts; a refused call can be repeated.
template <class Error, class Call>
void expect_message(const Call& call, const std::vector<std::string>& parts) {
  for (const auto& part : parts) testing_support::expect_error<Error>(call, part);
}

struct Case {
  std::string name, kind;
  /// The first has the options of `options`, the second others.
  std::function<std::unique_ptr<Optimizer>(const Groups&)> make, make_otherwise;
  Options options;
  std::set<std::string> counts, tensors;
  /// Of a parameter that was never stepped.
  std::set<std::string> counts_before, tensors_before = {};
};

template <class O, class OptionsClass>
std::function<std::unique_ptr<Optimizer>(const Groups&)> maker(const OptionsClass& options) {
  return [options](const Groups& groups) { return std::make_unique<O>(groups, options); };
}

template <class O, class OptionsClass>
Case adam_like(const std::string& name, const std::string& kind, bool amsgrad) {
  auto options = OptionsClass(0.02).betas({0.8, 0.95}).eps(1e-6).weight_decay(0.125).amsgrad(amsgrad);
  Case result{
      name,
      kind,
      maker<O>(options),
      maker<O>(OptionsClass(0.5)),
      {{"lr", 0.02}, {"beta1", 0.8}, {"beta2", 0.95}, {"eps", 1e-6}, {"weight_decay", 0.125}, {"amsgrad", amsgrad}},
      {"step"},
      {"exp_avg", "exp_avg_sq"},
      {}};
  if (amsgrad) result.tensors.insert("max_exp_avg_sq");
  return result;
}

template <class O>
Case sgd(const std::string& name, double momentum, double dampening, bool nesterov) {
  using torch::optim::SGDOptions;
  Case result{
      name,
      "SGD",
      maker<O>(SGDOptions(0.1).momentum(momentum).dampening(dampening).weight_decay(0.25).nesterov(nesterov)),
      maker<O>(SGDOptions(0.5)),
      {{"lr", 0.1}, {"momentum", momentum}, {"dampening", dampening}, {"weight_decay", 0.25}, {"nesterov", nesterov}},
      {},
      {},
      {}};
  if (momentum != 0) result.tensors.insert("momentum_buffer");
  return result;
}

Case rmsprop(const std::string& name, double momentum, bool centered) {
  using torch::optim::RMSprop;
  using torch::optim::RMSpropOptions;
  Case result{name,
              "RMSprop",
              maker<RMSprop>(
                  RMSpropOptions(0.03).alpha(0.75).eps(1e-5).weight_decay(0.5).momentum(momentum).centered(centered)),
              maker<RMSprop>(RMSpropOptions(0.5)),
              {{"lr", 0.03},
               {"alpha", 0.75},
               {"eps", 1e-5},
               {"weight_decay", 0.5},
               {"momentum", momentum},
               {"centered", centered}},
              {"step"},
              {"square_avg"},
              {}};
  if (momentum != 0) result.tensors.insert("momentum_buffer");
  if (centered) result.tensors.insert("grad_avg");
  return result;
}

Case adagrad() {
  using torch::optim::Adagrad;
  using torch::optim::AdagradOptions;
  return {"Adagrad",
          "Adagrad",
          maker<Adagrad>(AdagradOptions(0.04).lr_decay(0.125).weight_decay(0.5).initial_accumulator_value(2).eps(1e-7)),
          maker<Adagrad>(AdagradOptions(0.5)),
          {{"lr", 0.04}, {"lr_decay", 0.125}, {"weight_decay", 0.5}, {"initial_accumulator_value", 2.0}, {"eps", 1e-7}},
          {"step"},
          {"sum"},
          {"step"},
          {"sum"}};
}

/// As a program would write it to change the step.
class OwnAdamW : public torch::optim::AdamW {
 public:
  using AdamW::AdamW;
};

std::vector<Case> cases() {
  using namespace torch::optim;
  return {adam_like<Adam, AdamOptions>("Adam", "Adam", false),
          adam_like<Adam, AdamOptions>("AdamAmsgrad", "Adam", true),
          adam_like<AdamW, AdamWOptions>("AdamW", "AdamW", false),
          adam_like<AdamW, AdamWOptions>("AdamWAmsgrad", "AdamW", true),
          adam_like<OwnAdamW, AdamWOptions>("DerivedAdamW", "AdamW", false),
          adam_like<hsdp::FusedAdamW, AdamWOptions>("FusedAdamW", "AdamW", false),
          adam_like<hsdp::FusedAdamW, AdamWOptions>("FusedAdamWAmsgrad", "AdamW", true),
          sgd<SGD>("SGD", 0, 0, false),
          sgd<SGD>("SGDMomentum", 0.75, 0.25, false),
          sgd<SGD>("SGDNesterov", 0.75, 0, true),
          sgd<hsdp::FusedSGD>("FusedSGD", 0, 0, false),
          sgd<hsdp::FusedSGD>("FusedSGDMomentum", 0.75, 0.25, false),
          rmsprop("RMSprop", 0, false),
          rmsprop("RMSpropMomentum", 0.75, false),
          rmsprop("RMSpropCentered", 0.75, true),
          adagrad()};
}

template <class Map>
std::set<std::string> keys(const Map& map) {
  std::set<std::string> keys;
  for (const auto& [key, value] : map) keys.insert(key);
  return keys;
}

class EveryOptimizer : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Kinds, EveryOptimizer, ::testing::ValuesIn(cases()),
                         [](const auto& which) { return which.param.name; });

TEST_P(EveryOptimizer, HasItsKindOptionsCountsAndTensors) {
  const auto& expected = GetParam();
  Net net;
  const auto optimizer = expected.make(net.two_groups());
  train(net, *optimizer, 0, 2);
  const auto states = hsdp::optimizer_states({optimizer.get()}, net.names());
  EXPECT_EQ(keys(states), (std::set<std::string>{"bias", "late", "scale", "weight"}));
  for (const auto& [name, entry] : states) {
    SCOPED_TRACE(name);
    EXPECT_EQ(entry.kind, expected.kind);
    EXPECT_EQ(entry.options, expected.options);
    const bool stepped = name != "late";
    EXPECT_EQ(keys(entry.counts), stepped ? expected.counts : expected.counts_before);
    EXPECT_EQ(keys(entry.tensors), stepped ? expected.tensors : expected.tensors_before);
    for (const auto& [key, count] : entry.counts) EXPECT_EQ(count, stepped ? 2 : 0) << key;
    for (const auto& [key, tensor] : entry.tensors) EXPECT_EQ(tensor.sizes(), net[name].sizes()) << key;
  }
}

TEST_P(EveryOptimizer, GoesOnInOtherGroupsAsIfNothingHadHappened) {
  Net net;
  const auto optimizer = GetParam().make(net.two_groups());
  train(net, *optimizer, 0, 2);
  const auto saved = copied(hsdp::optimizer_states({optimizer.get()}, net.names()));
  Net resumed;
  resumed.copy_values(net);
  const auto other = GetParam().make_otherwise(resumed.three_groups());
  hsdp::restore_optimizer_states({other.get()}, resumed.names(), copied(saved), {});
  expect_equal(hsdp::optimizer_states({other.get()}, resumed.names()), saved);
  train(net, *optimizer, 2, 4);
  train(resumed, *other, 2, 4);
  expect_equal(hsdp::optimizer_states({other.get()}, resumed.names()),
               hsdp::optimizer_states({optimizer.get()}, net.names()));
  for (const auto& [name, tensor] : net.parameters) EXPECT_TRUE(torch::equal(resumed[name], tensor)) << name;
}

TEST_P(EveryOptimizer, ComesFromAndGoesToOneOptimizerForEachParameter) {
  Net net;
  const auto optimizer = GetParam().make(net.two_groups());
  train(net, *optimizer, 0, 2);
  const auto saved = copied(hsdp::optimizer_states({optimizer.get()}, net.names()));
  Net apart;
  std::vector<std::unique_ptr<Optimizer>> owners;
  std::vector<Optimizer*> optimizers;
  for (const auto& [name, tensor] : apart.parameters) {
    owners.push_back(GetParam().make_otherwise({apart.group({name})}));
    optimizers.push_back(owners.back().get());
  }
  hsdp::restore_optimizer_states(optimizers, apart.names(), saved, {});
  expect_equal(hsdp::optimizer_states(optimizers, apart.names()), saved);
}

TEST_P(EveryOptimizer, KeepsTheProgramsOptionsWhereAsked) {
  Net net;
  const auto optimizer = GetParam().make(net.two_groups());
  train(net, *optimizer, 0, 2);
  auto saved = copied(hsdp::optimizer_states({optimizer.get()}, net.names()));
  Net resumed;
  const auto other = GetParam().make_otherwise(resumed.three_groups());
  const auto own = hsdp::optimizer_states({other.get()}, resumed.names()).at("bias").options;
  ASSERT_NE(own, GetParam().options);
  saved.at("weight").options["lr"] = 7.0;  // unlike the rest of its group
  saved.at("bias").options.clear();
  hsdp::restore_optimizer_states({other.get()}, resumed.names(), saved, {.options = false});
  for (auto& [name, entry] : saved) entry.options = own;
  expect_equal(hsdp::optimizer_states({other.get()}, resumed.names()), saved);
}

TEST_P(EveryOptimizer, StateGoesBackToThatOfAParameterThatWasNeverStepped) {
  Net net;
  const auto optimizer = GetParam().make(net.two_groups());
  const auto before = copied(hsdp::optimizer_states({optimizer.get()}, net.names()));
  Net restarted;
  const auto other = GetParam().make(restarted.three_groups());
  train(restarted, *other, 0, 4);
  hsdp::restore_optimizer_states({other.get()}, restarted.names(), before, {});
  expect_equal(hsdp::optimizer_states({other.get()}, restarted.names()), before);
}

TEST(OptimizerState, FusedAndPlainOptimizersTakeOverFromEachOther) {
  Net net, resumed;
  torch::optim::AdamW plain(net.two_groups(), torch::optim::AdamWOptions(0.02));
  hsdp::FusedAdamW fused(resumed.three_groups(), torch::optim::AdamWOptions(0.5));
  train(net, plain, 0, 2);
  const auto saved = copied(hsdp::optimizer_states({&plain}, net.names()));
  hsdp::restore_optimizer_states({&fused}, resumed.names(), copied(saved), {});
  expect_equal(hsdp::optimizer_states({&fused}, resumed.names()), saved);
  train(resumed, fused, 2, 3);
  const auto later = copied(hsdp::optimizer_states({&fused}, resumed.names()));
  EXPECT_EQ(later.at("bias").counts, (std::map<std::string, int64_t>{{"step", 3}}));
  hsdp::restore_optimizer_states({&plain}, net.names(), later, {});
  expect_equal(hsdp::optimizer_states({&plain}, net.names()), later);
}

TEST(OptimizerState, GroupsHaveTheirOwnOptions) {
  Net net;
  torch::optim::SGD optimizer(net.two_groups(), torch::optim::SGDOptions(0.1));
  optimizer.param_groups()[1].options().set_lr(0.3);
  const auto states = hsdp::optimizer_states({&optimizer}, net.names());
  EXPECT_EQ(states.at("weight").options.at("lr"), OptionValue(0.1));
  EXPECT_EQ(states.at("late").options.at("lr"), OptionValue(0.1));
  EXPECT_EQ(states.at("scale").options.at("lr"), OptionValue(0.3));
  torch::optim::SGD other(net.three_groups(), torch::optim::SGDOptions(0.5));
  hsdp::restore_optimizer_states({&other}, net.names(), states, {});
  EXPECT_EQ(other.param_groups()[0].options().get_lr(), 0.3);
  EXPECT_EQ(other.param_groups()[1].options().get_lr(), 0.1);
  EXPECT_EQ(other.param_groups()[2].options().get_lr(), 0.3);
}

TEST(OptimizerState, ObjectsThatAProgramHoldsStay) {
  Net net;
  torch::optim::AdamW optimizer(net.two_groups(), torch::optim::AdamWOptions(0.1));
  train(net, optimizer, 0, 2);
  auto* held = static_cast<torch::optim::AdamWParamState*>(optimizer.state()[net["bias"].unsafeGetTensorImpl()].get());
  auto& options = optimizer.param_groups()[1].options();
  auto states = copied(hsdp::optimizer_states({&optimizer}, net.names()));
  states.at("bias").counts["step"] = 41;
  states.at("bias").options["lr"] = states.at("scale").options["lr"] = 0.25;
  hsdp::restore_optimizer_states({&optimizer}, net.names(), states, {});
  EXPECT_EQ(optimizer.state()[net["bias"].unsafeGetTensorImpl()].get(), held);
  EXPECT_EQ(held->step(), 41);
  EXPECT_EQ(options.get_lr(), 0.25);
  // Neither are tensors copied.
  EXPECT_TRUE(held->exp_avg().is_same(states.at("bias").tensors.at("exp_avg")));
}

TEST(OptimizerState, TensorsThatAStateNoLongerHasAreGone) {
  Net net, plain_net;
  torch::optim::Adam with(net.two_groups(), torch::optim::AdamOptions(0.1).amsgrad(true));
  torch::optim::Adam without(plain_net.two_groups(), torch::optim::AdamOptions(0.1));
  train(net, with, 0, 2);
  train(plain_net, without, 0, 2);
  const auto states = copied(hsdp::optimizer_states({&without}, plain_net.names()));
  hsdp::restore_optimizer_states({&with}, net.names(), states, {});
  expect_equal(hsdp::optimizer_states({&with}, net.names()), states);
}

TEST(OptimizerState, MissingParametersKeepTheirStateWhereAllowedAndSurplusEntriesArePassedOver) {
  Net net, resumed;
  torch::optim::SGD optimizer(net.two_groups(), torch::optim::SGDOptions(0.1).momentum(0.5));
  train(net, optimizer, 0, 2);
  auto states = copied(hsdp::optimizer_states({&optimizer}, net.names()));
  states.erase("bias");
  states.emplace("elsewhere", states.at("weight"));
  torch::optim::SGD other(resumed.two_groups(), torch::optim::SGDOptions(0.5).momentum(0.25));
  train(resumed, other, 0, 3);
  auto expected = copied(hsdp::optimizer_states({&other}, resumed.names()));
  hsdp::restore_optimizer_states({&other}, resumed.names(), states, {.allow_missing = true});
  states.erase("elsewhere");
  expected.at("bias").options = states.at("scale").options;  // those of its group
  states.emplace("bias", expected.at("bias"));
  expect_equal(hsdp::optimizer_states({&other}, resumed.names()), states);

  // A group of which nothing is known stays as it is.
  hsdp::restore_optimizer_states({&other}, resumed.names(), {}, {.allow_missing = true});
  expect_equal(hsdp::optimizer_states({&other}, resumed.names()), states);
}

TEST(OptimizerState, EmptyGroupsAndNoOptimizersAreFine) {
  Net net;
  EXPECT_TRUE(hsdp::optimizer_states({}, net.names()).empty());
  torch::optim::SGD optimizer({net.group({}), net.group({"bias"})}, torch::optim::SGDOptions(0.1));
  const auto states = hsdp::optimizer_states({&optimizer}, net.names());
  EXPECT_EQ(keys(states), (std::set<std::string>{"bias"}));
  hsdp::restore_optimizer_states({&optimizer}, net.names(), states, {});
  hsdp::restore_optimizer_states({}, net.names(), states, {});
}

/// Both functions refuse the optimizers.
template <class Error>
void expect_refused(const std::vector<Optimizer*>& optimizers, const ParameterNames& names,
                    const std::vector<std::string>& parts) {
  expect_message<Error>([&] { hsdp::optimizer_states(optimizers, names); }, parts);
  expect_message<Error>([&] { hsdp::restore_optimizer_states(optimizers, names, {}, {.allow_missing = true}); }, parts);
}

TEST(OptimizerState, OtherOptimizersAreRefused) {
  Net net;
  torch::optim::LBFGS optimizer({net.group({"bias"})}, torch::optim::LBFGSOptions(0.1));
  expect_refused<dtensor::NotSupportedError>({&optimizer}, net.names(), {"torch::optim::LBFGS", "AdamW"});
}

TEST(OptimizerState, NoOptimizerIsRefused) {
  Net net;
  torch::optim::SGD optimizer(net.two_groups(), torch::optim::SGDOptions(0.1));
  expect_refused<dtensor::ValueError>({&optimizer, nullptr}, net.names(), {"optimizer 1 is null"});
}

TEST(OptimizerState, ParametersWithoutANameAreRefused) {
  Net net;
  torch::optim::SGD first({net.group({"bias"})}, torch::optim::SGDOptions(0.1));
  torch::optim::SGD second({torch::zeros({5, 7}, torch::requires_grad())}, torch::optim::SGDOptions(0.1));
  expect_refused<dtensor::ValueError>({&first, &second}, net.names(), {"optimizer 1", "[5, 7]"});
}

TEST(OptimizerState, ParametersThatAreTrainedTwiceAreRefused) {
  Net net;
  torch::optim::SGD first(net.two_groups(), torch::optim::SGDOptions(0.1));
  torch::optim::SGD second({net.group({"scale"})}, torch::optim::SGDOptions(0.1));
  expect_refused<dtensor::ValueError>({&first, &second}, net.names(), {"\"scale\"", "optimizer 0", "optimizer 1"});
  torch::optim::SGD twice({net.group({"bias"}), net.group({"scale", "bias"})}, torch::optim::SGDOptions(0.1));
  expect_refused<dtensor::ValueError>({&twice}, net.names(), {"\"bias\"", "optimizer 0 and by optimizer 0"});
}

// Module::parameters() lists a tied parameter once for each of its names.
TEST(OptimizerState, AParameterMayBeTwiceInAGroup) {
  Net net, other;
  torch::optim::Adam adam({net.group({"weight", "bias", "weight"})}, torch::optim::AdamOptions(0.1));
  net.set_gradients(0);
  adam.step();
  const auto states = hsdp::optimizer_states({&adam}, net.names());
  EXPECT_EQ(states.size(), 2u);
  EXPECT_EQ(states.at("weight").counts.at("step"), 2);
  torch::optim::Adam fresh({other.group({"weight", "weight", "bias"})}, torch::optim::AdamOptions(0.5));
  hsdp::restore_optimizer_states({&fresh}, other.names(), copied(states), {});
  expect_equal(hsdp::optimizer_states({&fresh}, other.names()), states);
}

TEST(OptimizerState, OptionsOfAnotherOptimizerAreRefused) {
  Net net;
  torch::optim::Adam optimizer(net.two_groups(), torch::optim::AdamOptions(0.1));
  optimizer.param_groups()[1].set_options(std::make_unique<torch::optim::SGDOptions>(0.1));
  expect_refused<dtensor::ValueError>({&optimizer}, net.names(), {"Adam", "torch::optim::SGDOptions"});
}

TEST(OptimizerState, StateOfAnotherClassIsRefused) {
  Net net;
  torch::optim::Adam optimizer(net.two_groups(), torch::optim::AdamOptions(0.1));
  auto states = hsdp::optimizer_states({&optimizer}, net.names());
  optimizer.state()[net["scale"].unsafeGetTensorImpl()] = std::make_unique<torch::optim::SGDParamState>();
  const std::vector<std::string> parts{"\"scale\"", "torch::optim::SGDParamState", "AdamParamState"};
  expect_message<dtensor::NotSupportedError>([&] { hsdp::optimizer_states({&optimizer}, net.names()); }, parts);
  expect_message<dtensor::NotSupportedError>(
      [&] { hsdp::restore_optimizer_states({&optimizer}, net.names(), states, {}); }, parts);
}

TEST(OptimizerState, MissingEntriesAreListed) {
  std::vector<torch::Tensor> parameters;
  ParameterNames names;
  for (int i = 0; i < 12; ++i) {
    parameters.push_back(torch::zeros({2}, torch::requires_grad()));
    names.emplace(parameters.back().unsafeGetTensorImpl(), "p" + std::to_string(i));
  }
  torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(0.1));
  expect_message<dtensor::ValueError>([&] { hsdp::restore_optimizer_states({&optimizer}, names, {}, {}); },
                                      {"\"p0\", \"p1\"", "\"p9\" and 2 more"});
  auto states = hsdp::optimizer_states({&optimizer}, names);
  states.erase("p7");
  expect_message<dtensor::ValueError>([&] { hsdp::restore_optimizer_states({&optimizer}, names, states, {}); },
                                      {"state for \"p7\", expected"});
}

struct Damage {
  std::string name;
  /// Does it to the entry of "scale", which comes last.
  std::function<void(OptimizerStates&)> apply;
  std::vector<std::string> parts;
};

std::vector<Damage> damages() {
  const auto scale = [](OptimizerStates& states) -> hsdp::ParameterOptimizerState& { return states.at("scale"); };
  return {
      {"NoEntry", [](auto& states) { states.erase("scale"); }, {"\"scale\"", "entry"}},
      {"AnotherKind", [=](auto& states) { scale(states).kind = "SGD"; }, {"\"scale\"", "SGD", "AdamW"}},
      {"NoKind", [=](auto& states) { scale(states).kind = ""; }, {"\"scale\"", "AdamW"}},
      {"UnknownCount",
       [=](auto& states) { scale(states).counts["steps"] = 2; },
       {"\"scale\"", "count \"steps\"", "step"}},
      {"NoCount", [=](auto& states) { scale(states).counts.clear(); }, {"\"scale\"", "without the count \"step\""}},
      {"NegativeCount", [=](auto& states) { scale(states).counts["step"] = -3; }, {"\"scale\"", "step -3"}},
      {"UnknownTensor",
       [=](auto& states) { scale(states).tensors["momentum_buffer"] = torch::zeros({}); },
       {"\"scale\"", "tensor \"momentum_buffer\"", "exp_avg, exp_avg_sq, max_exp_avg_sq"}},
      {"NoTensor",
       [=](auto& states) { scale(states).tensors.erase("exp_avg_sq"); },
       {"\"scale\"", "without the tensor \"exp_avg_sq\""}},
      {"NoTensors",
       [=](auto& states) { scale(states).tensors.clear(); },
       {"\"scale\"", "without the tensor \"exp_avg\""}},
      {"UnknownOption",
       [=](auto& states) { scale(states).options["momentum"] = 0.5; },
       {"\"scale\"", "option \"momentum\"", "beta1"}},
      {"NoOption",
       [=](auto& states) { scale(states).options.erase("eps"); },
       {"\"scale\"", "without the option \"eps\""}},
      {"IntegerOption",
       [=](auto& states) { scale(states).options["lr"] = int64_t{1}; },
       {"\"scale\"", "lr 1", "floating-point"}},
      {"NumberForAFlag",
       [=](auto& states) { scale(states).options["amsgrad"] = 1.0; },
       {"\"scale\"", "amsgrad 1", "truth value"}},
      {"UnlikeItsGroup",
       [=](auto& states) { scale(states).options["lr"] = 0.10000000000000002; },
       {"\"bias\" and \"scale\"", "lr 0.1 and 0.10000000000000002"}},
      {"UnlikeFlag",
       [=](auto& states) { scale(states).options["amsgrad"] = true; },
       {"\"bias\" and \"scale\"", "amsgrad false and true"}},
  };
}

class DamagedStates : public ::testing::TestWithParam<Damage> {};
INSTANTIATE_TEST_SUITE_P(Damages, DamagedStates, ::testing::ValuesIn(damages()),
                         [](const auto& which) { return which.param.name; });

TEST_P(DamagedStates, AreRefusedAndNothingHasChanged) {
  Net net, resumed;
  torch::optim::AdamW optimizer(net.two_groups(), torch::optim::AdamWOptions(0.1));
  train(net, optimizer, 0, 2);
  auto states = copied(hsdp::optimizer_states({&optimizer}, net.names()));
  torch::optim::AdamW other(resumed.two_groups(), torch::optim::AdamWOptions(0.5));
  train(resumed, other, 0, 3);
  const auto before = copied(hsdp::optimizer_states({&other}, resumed.names()));
  GetParam().apply(states);
  expect_message<dtensor::ValueError>([&] { hsdp::restore_optimizer_states({&other}, resumed.names(), states, {}); },
                                      GetParam().parts);
  expect_equal(hsdp::optimizer_states({&other}, resumed.names()), before);
}

}  // namespace optimizer_state_test
