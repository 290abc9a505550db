#include "hsdp/checkpoint/optimizer_state.h"

#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <charconv>
#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "dtensor/dtensor.h"
#include "dtensor/dtensor_impl.h"
#include "dtensor/error.h"
#include "hsdp/optimizers.h"

namespace hsdp {
namespace {

using dtensor::NotSupportedError;
using dtensor::raise;
using dtensor::ValueError;
using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;

/// The classes of one kind of optimizer. The kinds below say once what is in them, by handing each member to `visit`:
/// as (name, member), tensors as (name, member, whether each state has it).
template <class OptionsClass, class StateClass, class... Optimizers>
struct Classes {
  using Options = OptionsClass;
  using State = StateClass;
  static bool have(const Optimizer& optimizer) { return (dynamic_cast<const Optimizers*>(&optimizer) || ...); }
};

template <class Options, class State, class... Optimizers>
struct AdamLike : Classes<Options, State, Optimizers...> {
  static void visit_options(auto& options, const auto& visit) {
    visit("lr", options.lr());
    visit("beta1", std::get<0>(options.betas()));
    visit("beta2", std::get<1>(options.betas()));
    visit("eps", options.eps());
    visit("weight_decay", options.weight_decay());
    visit("amsgrad", options.amsgrad());
  }
  static void visit_counts(auto& state, const auto& visit) { visit("step", state.step()); }
  static void visit_tensors(auto& state, const auto& visit) {
    visit("exp_avg", state.exp_avg(), true);
    visit("exp_avg_sq", state.exp_avg_sq(), true);
    visit("max_exp_avg_sq", state.max_exp_avg_sq(), false);
  }
};

struct Adam : AdamLike<torch::optim::AdamOptions, torch::optim::AdamParamState, torch::optim::Adam> {
  static constexpr auto kName = "Adam";
};

struct AdamW : AdamLike<torch::optim::AdamWOptions, torch::optim::AdamWParamState, torch::optim::AdamW, FusedAdamW> {
  static constexpr auto kName = "AdamW";
};

struct SGD : Classes<torch::optim::SGDOptions, torch::optim::SGDParamState, torch::optim::SGD, FusedSGD> {
  static constexpr auto kName = "SGD";
  static void visit_options(auto& options, const auto& visit) {
    visit("lr", options.lr());
    visit("momentum", options.momentum());
    visit("dampening", options.dampening());
    visit("weight_decay", options.weight_decay());
    visit("nesterov", options.nesterov());
  }
  static void visit_counts(auto&, const auto&) {}
  static void visit_tensors(auto& state, const auto& visit) { visit("momentum_buffer", state.momentum_buffer(), true); }
};

struct RMSprop : Classes<torch::optim::RMSpropOptions, torch::optim::RMSpropParamState, torch::optim::RMSprop> {
  static constexpr auto kName = "RMSprop";
  static void visit_options(auto& options, const auto& visit) {
    visit("lr", options.lr());
    visit("alpha", options.alpha());
    visit("eps", options.eps());
    visit("weight_decay", options.weight_decay());
    visit("momentum", options.momentum());
    visit("centered", options.centered());
  }
  static void visit_counts(auto& state, const auto& visit) { visit("step", state.step()); }
  static void visit_tensors(auto& state, const auto& visit) {
    visit("square_avg", state.square_avg(), true);
    visit("momentum_buffer", state.momentum_buffer(), false);
    visit("grad_avg", state.grad_avg(), false);
  }
};

struct Adagrad : Classes<torch::optim::AdagradOptions, torch::optim::AdagradParamState, torch::optim::Adagrad> {
  static constexpr auto kName = "Adagrad";
  static void visit_options(auto& options, const auto& visit) {
    visit("lr", options.lr());
    visit("lr_decay", options.lr_decay());
    visit("weight_decay", options.weight_decay());
    visit("initial_accumulator_value", options.initial_accumulator_value());
    visit("eps", options.eps());
  }
  static void visit_counts(auto& state, const auto& visit) { visit("step", state.step()); }
  static void visit_tensors(auto& state, const auto& visit) { visit("sum", state.sum(), true); }
};

template <class Kind, class... Others>
void with_kind(const char* where, const Optimizer& optimizer, const auto& visit) {
  if (Kind::have(optimizer)) return visit(Kind{});
  if constexpr (sizeof...(Others) > 0) {
    return with_kind<Others...>(where, optimizer, visit);
  } else {
    raise<NotSupportedError>(where, "the state of a ", c10::demangle(typeid(optimizer).name()),
                             ", expected torch::optim::Adam, AdamW, SGD, RMSprop, Adagrad, hsdp::FusedAdamW, "
                             "hsdp::FusedSGD, or a class derived from one of these");
  }
}

/// Calls `visit` with an object of the optimizer's kind.
void with_kind_of(const char* where, const Optimizer& optimizer, const auto& visit) {
  with_kind<Adam, AdamW, SGD, RMSprop, Adagrad>(where, optimizer, visit);
}

struct Member {
  c10::TensorImpl* parameter;
  std::string name;
};

struct Group {
  Optimizer* optimizer;
  OptimizerParamGroup* group;
  std::vector<Member> members;
};

/// All groups of the optimizers. Throws where a parameter has no name, or is in two groups.
std::vector<Group> groups_of(const char* where, const std::vector<Optimizer*>& optimizers,
                             const ParameterNames& names) {
  struct Place {
    size_t optimizer, group;
  };
  std::vector<Group> groups;
  std::map<std::string, Place> places;
  for (size_t i = 0; i < optimizers.size(); ++i) {
    if (optimizers[i] == nullptr) raise<ValueError>(where, "optimizer ", i, " is null, expected an optimizer");
    for (auto& group : optimizers[i]->param_groups()) {
      groups.push_back({optimizers[i], &group, {}});
      for (const auto& parameter : group.params()) {
        const auto known = names.find(parameter.unsafeGetTensorImpl());
        if (known == names.end()) {
          raise<ValueError>(where, "optimizer ", i, " trains a parameter of sizes ", parameter.sizes(),
                            " that is not one of the model's, expected parameters of the model alone");
        }
        const auto [first, fresh] = places.try_emplace(known->second, Place{i, groups.size()});
        // Module::parameters() has tied ones once for each name.
        if (!fresh && first->second.group == groups.size()) continue;
        if (!fresh) {
          raise<ValueError>(where, "parameter \"", known->second, "\" is trained twice, by optimizer ",
                            first->second.optimizer, " and by optimizer ", i,
                            ", expected one place for each parameter");
        }
        groups.back().members.push_back({parameter.unsafeGetTensorImpl(), known->second});
      }
    }
  }
  return groups;
}

template <class Kind>
typename Kind::Options& options_of(const char* where, OptimizerParamGroup& group) {
  if (auto* options = dynamic_cast<typename Kind::Options*>(&group.options())) return *options;
  raise<ValueError>(where, "a group of the ", Kind::kName, " optimizer has ",
                    c10::demangle(typeid(group.options()).name()), ", expected torch::optim::", Kind::kName, "Options");
}

/// Null where the parameter was never stepped.
template <class Kind>
typename Kind::State* state_of(const char* where, Optimizer& optimizer, const Member& member) {
  const auto known = optimizer.state().find(member.parameter);
  if (known == optimizer.state().end() || known->second == nullptr) return nullptr;
  if (auto* state = dynamic_cast<typename Kind::State*>(known->second.get())) return state;
  const auto& found = *known->second;
  raise<NotSupportedError>(where, "parameter \"", member.name, "\" has the state ", c10::demangle(typeid(found).name()),
                           " in a ", Kind::kName, " optimizer, expected torch::optim::", Kind::kName, "ParamState");
}

/// State that was made before the parameter had memory is one number everywhere, and gets memory only where a step
/// meets it: Adagrad's, of a parameter that was never stepped.
at::Tensor with_memory(const at::Tensor& tensor, const Member& member) {
  const auto* impl = dtensor::dtensor_impl(tensor);
  const auto* parameter = dynamic_cast<const dtensor::DTensorImpl*>(member.parameter);
  if (impl == nullptr || !impl->pending_fill() || parameter == nullptr ||
      parameter->state() != dtensor::DTensorImpl::State::distributed) {
    return tensor;
  }
  const auto options = parameter->local().options().dtype(tensor.scalar_type()).requires_grad(false);
  return dtensor::wrap_local(at::full(parameter->local().sizes(), *impl->pending_fill(), options), *parameter);
}

template <class Kind>
void capture(const char* where, const Group& group, OptimizerStates& states) {
  ParameterOptimizerState never_stepped{Kind::kName, {}, {}, {}};
  Kind::visit_options(options_of<Kind>(where, *group.group),
                      [&](const char* name, const auto& value) { never_stepped.options.emplace(name, value); });
  for (const auto& member : group.members) {
    auto& entry = states.emplace(member.name, never_stepped).first->second;
    const auto* state = state_of<Kind>(where, *group.optimizer, member);
    if (state == nullptr) continue;
    Kind::visit_tensors(*state, [&](const char* name, const at::Tensor& tensor, bool) {
      if (tensor.defined()) entry.tensors.emplace(name, with_memory(tensor, member));
    });
    if (entry.tensors.empty()) continue;
    Kind::visit_counts(*state, [&](const char* name, int64_t count) { entry.counts.emplace(name, count); });
  }
}

constexpr auto kRestore = "restore_optimizer_states";

std::string to_text(const OptionValue& value) {
  if (const auto* flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  if (const auto* integer = std::get_if<int64_t>(&value)) return std::to_string(*integer);
  char text[32];
  return {text, std::to_chars(text, text + sizeof(text), std::get<double>(value)).ptr};
}

struct Known {
  std::string name;
  bool needed;
};

/// Throws where an entry has anything but the known names, or lacks a needed one. `what` is "option", ...
template <class Map>
void check_names(const std::string& parameter, const char* what, const Map& entries, const std::vector<Known>& known) {
  std::string expected;
  for (const auto& each : known) {
    expected += (expected.empty() ? "" : ", ") + each.name + (each.needed ? "" : " where there is one");
  }
  if (known.empty()) expected = "none";
  for (const auto& [name, value] : entries) {
    if (std::any_of(known.begin(), known.end(), [&](const auto& each) { return each.name == name; })) continue;
    raise<ValueError>(kRestore, "parameter \"", parameter, "\" comes with the ", what, " \"", name, "\", expected ",
                      expected);
  }
  for (const auto& each : known) {
    if (!each.needed || entries.contains(each.name)) continue;
    raise<ValueError>(kRestore, "parameter \"", parameter, "\" comes without the ", what, " \"", each.name,
                      "\", expected ", expected);
  }
}

/// The state that an entry stands for; none where the parameter was never stepped.
template <class Kind>
std::optional<typename Kind::State> read_state(const std::string& parameter, const ParameterOptimizerState& entry) {
  if (entry.counts.empty() && entry.tensors.empty()) return std::nullopt;
  typename Kind::State state;
  std::vector<Known> counts, tensors;
  Kind::visit_counts(state, [&](const char* name, int64_t) { counts.push_back({name, true}); });
  Kind::visit_tensors(state, [&](const char* name, auto&, bool needed) { tensors.push_back({name, needed}); });
  check_names(parameter, "count", entry.counts, counts);
  check_names(parameter, "tensor", entry.tensors, tensors);
  Kind::visit_counts(state, [&](const char* name, int64_t& count) {
    count = entry.counts.at(name);
    if (count < 0) {
      raise<ValueError>(kRestore, "parameter \"", parameter, "\" comes with ", name, " ", count,
                        ", expected 0 or more");
    }
  });
  Kind::visit_tensors(state, [&](const char* name, at::Tensor& tensor, bool) {
    const auto found = entry.tensors.find(name);
    if (found == entry.tensors.end()) return;
    TORCH_INTERNAL_ASSERT(found->second.defined());
    tensor = found->second;
  });
  return state;
}

/// Throws unless the entry has the options of the kind, of their types.
template <class Kind>
void check_options(const std::string& parameter, const ParameterOptimizerState& entry, typename Kind::Options& like) {
  std::vector<Known> known;
  Kind::visit_options(like, [&](const char* name, auto&) { known.push_back({name, true}); });
  check_names(parameter, "option", entry.options, known);
  Kind::visit_options(like, [&]<class Value>(const char* name, Value&) {
    const auto& value = entry.options.at(name);
    if (std::holds_alternative<Value>(value)) return;
    raise<ValueError>(kRestore, "parameter \"", parameter, "\" comes with ", name, " ", to_text(value), ", expected a ",
                      std::is_same_v<Value, bool> ? "truth value" : "floating-point number");
  });
}

void check_same_options(const std::string& first, const ParameterOptimizerState& of_first, const std::string& second,
                        const ParameterOptimizerState& of_second) {
  for (const auto& [name, value] : of_first.options) {
    const auto& other = of_second.options.at(name);
    if (value == other) continue;
    raise<ValueError>(
        kRestore, "parameters \"", first, "\" and \"", second, "\" are in one group but come with ", name, " ",
        to_text(value), " and ", to_text(other),
        ", expected the same options throughout a group; group parameters as they were saved, or keep the "
        "program's options");
  }
}

/// What is left to do once everything is known to fit: none of it fails.
using Commits = std::vector<std::function<void()>>;

/// `states` must outlive the commits. Adds the names that have no entry to `missing`.
template <class Kind>
void prepare(const Group& group, const OptimizerStates& states, const RestoreOptions& options,
             std::vector<std::string>& missing, Commits& commits) {
  auto& group_options = options_of<Kind>(kRestore, *group.group);
  const OptimizerStates::value_type* first = nullptr;
  for (const auto& member : group.members) {
    const auto found = states.find(member.name);
    if (found == states.end()) {
      missing.push_back(member.name);
      continue;
    }
    const auto& entry = found->second;
    if (entry.kind != Kind::kName) {
      raise<ValueError>(kRestore, "parameter \"", member.name, "\" comes with the state of an ", entry.kind,
                        " optimizer, expected ", Kind::kName, ", which trains it");
    }
    if (options.options) {
      check_options<Kind>(member.name, entry, group_options);
      if (first == nullptr) first = &*found;
      check_same_options(first->first, first->second, member.name, entry);
    }
    // A program may hold the object that is there, and so it stays.
    auto* present = state_of<Kind>(kRestore, *group.optimizer, member);
    auto state = read_state<Kind>(member.name, entry);
    if (state && present != nullptr) {
      commits.emplace_back([present, state] { *present = *state; });
    } else if (state) {
      commits.emplace_back([optimizer = group.optimizer, parameter = member.parameter, state] {
        optimizer->state()[parameter] = std::make_unique<typename Kind::State>(*state);
      });
    } else {
      commits.emplace_back(
          [optimizer = group.optimizer, parameter = member.parameter] { optimizer->state().erase(parameter); });
    }
  }
  if (first == nullptr) return;
  commits.emplace_back([&group_options, &values = first->second.options] {
    Kind::visit_options(group_options, [&]<class Value>(const char* name, Value& option) {
      option = std::get<Value>(values.at(name));
    });
  });
}

// Graphs that were recorded of steps go on from their own memory.
void sync_states(const std::vector<Optimizer*>& optimizers) {
  for (auto* optimizer : optimizers) {
    if (auto* captured = dynamic_cast<CapturableStep*>(optimizer)) captured->sync_state();
  }
}

void refuse_missing(const std::vector<std::string>& names) {
  constexpr size_t kShown = 10;
  std::string text;
  for (size_t i = 0; i < names.size() && i < kShown; ++i) text += (i > 0 ? ", \"" : "\"") + names[i] + "\"";
  if (names.size() > kShown) text += " and " + std::to_string(names.size() - kShown) + " more";
  raise<ValueError>(kRestore, "no optimizer state for ", text, ", expected an entry for each trained parameter");
}

}  // namespace

OptimizerStates optimizer_states(const std::vector<Optimizer*>& optimizers, const ParameterNames& names) {
  constexpr auto kWhere = "optimizer_states";
  sync_states(optimizers);
  OptimizerStates states;
  for (const auto& group : groups_of(kWhere, optimizers, names)) {
    with_kind_of(kWhere, *group.optimizer, [&]<class Kind>(const Kind&) { capture<Kind>(kWhere, group, states); });
  }
  return states;
}

std::function<void()> prepare_optimizer_states(const std::vector<Optimizer*>& optimizers, const ParameterNames& names,
                                               const OptimizerStates& states, const RestoreOptions& options) {
  // So that a count that is written is not taken for the one that the host knew.
  sync_states(optimizers);
  Commits commits;
  std::vector<std::string> missing;
  for (const auto& group : groups_of(kRestore, optimizers, names)) {
    with_kind_of(kRestore, *group.optimizer,
                 [&]<class Kind>(const Kind&) { prepare<Kind>(group, states, options, missing, commits); });
  }
  if (!options.allow_missing && !missing.empty()) refuse_missing(missing);
  return [commits = std::move(commits), optimizers] {
    for (const auto& commit : commits) commit();
    sync_states(optimizers);
  };
}

void restore_optimizer_states(const std::vector<Optimizer*>& optimizers, const ParameterNames& names,
                              const OptimizerStates& states, const RestoreOptions& options) {
  prepare_optimizer_states(optimizers, names, states, options)();
}

}  // namespace hsdp
