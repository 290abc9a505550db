#include "hsdp/parameter_groups.h"

#include <algorithm>
#include <unordered_map>

#include "dtensor/error.h"
#include "hsdp/name_pattern.h"

namespace hsdp {
namespace {

using dtensor::raise;
using dtensor::ValueError;

struct Named {
  at::Tensor parameter;
  std::vector<std::string> names;
};

/// In the order of the module's names; a tied parameter at its first one.
std::vector<Named> named_parameters(const torch::nn::Module& module) {
  std::vector<Named> parameters;
  std::unordered_map<const c10::TensorImpl*, size_t> places;
  for (const auto& entry : module.named_parameters()) {
    const auto [place, fresh] = places.try_emplace(entry.value().unsafeGetTensorImpl(), parameters.size());
    if (fresh) parameters.push_back({entry.value(), {}});
    parameters[place->second].names.push_back(entry.key());
  }
  return parameters;
}

bool fits(const GroupRule& rule, const Named& named) {
  return std::any_of(named.names.begin(), named.names.end(),
                     [&](const auto& name) { return matches_pattern(rule.pattern(), name); });
}

// `"a.weight", "a.bias" and 3 more`
std::string listed(const std::vector<std::string>& names) {
  constexpr size_t kShown = 20;
  std::string text;
  for (size_t i = 0; i < names.size() && i < kShown; ++i) text += (i > 0 ? ", \"" : "\"") + names[i] + "\"";
  if (names.size() > kShown) text += " and " + std::to_string(names.size() - kShown) + " more";
  return text;
}

[[noreturn]] void refuse_idle_rule(const GroupRule& rule, const std::vector<Named>& parameters) {
  std::vector<std::string> fitting, trainable;
  for (const auto& named : parameters) {
    if (fits(rule, named)) fitting.push_back(named.names.front());
    if (named.parameter.requires_grad()) trainable.push_back(named.names.front());
  }
  if (!fitting.empty()) {
    raise<ValueError>("parameter_groups", "pattern \"", rule.pattern(), "\" gets no parameter, since all that fit it, ",
                      listed(fitting),
                      ", are frozen or went to earlier patterns, expected at least one; the first "
                      "pattern that fits a parameter takes it, so narrow ones come first");
  }
  raise<ValueError>("parameter_groups", "pattern \"", rule.pattern(),
                    "\" fits no parameter, expected at least one; those that require grad are ",
                    trainable.empty() ? "none" : listed(trainable),
                    "; * stands for any characters but a dot, ** for any characters");
}

}  // namespace

std::vector<torch::optim::OptimizerParamGroup> parameter_groups(const torch::nn::Module& module,
                                                                const std::vector<GroupRule>& rules) {
  const auto parameters = named_parameters(module);
  std::vector<std::vector<at::Tensor>> taken(rules.size());
  std::vector<std::string> left;
  for (const auto& named : parameters) {
    if (!named.parameter.requires_grad()) continue;
    const auto rule = std::find_if(rules.begin(), rules.end(), [&](const auto& each) { return fits(each, named); });
    if (rule == rules.end()) {
      left.push_back(named.names.front());
    } else {
      taken[static_cast<size_t>(rule - rules.begin())].push_back(named.parameter);
    }
  }
  // A misspelt pattern leaves parameters over as well: the pattern is the cause.
  for (size_t i = 0; i < rules.size(); ++i) {
    if (taken[i].empty()) refuse_idle_rule(rules[i], parameters);
  }
  if (!left.empty()) {
    raise<ValueError>(
        "parameter_groups", "no pattern fits ", listed(left),
        ", expected one for every parameter that requires grad; \"**\" as the last pattern takes the rest");
  }
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (size_t i = 0; i < rules.size(); ++i) {
    groups.emplace_back(std::move(taken[i]), rules[i].options());
  }
  return groups;
}

}  // namespace hsdp
