#include "hsdp/unit_groups.h"

#include <torch/nn/modules/container/parameterdict.h>
#include <torch/nn/modules/container/parameterlist.h>

#include <algorithm>
#include <utility>

#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "hsdp/name_pattern.h"

namespace hsdp {
namespace {

constexpr auto kWhere = "fully_shard";

std::string list(const std::set<std::string>& items, size_t limit) {
  std::string text;
  size_t count = 0;
  for (auto& item : items) {
    if (count++ == limit) return text + ", and " + std::to_string(items.size() - limit) + " more";
    text += (count > 1 ? ", " : "") + item;
  }
  return text;
}

// Beside the registry and the one handle that is ours.
int64_t holders(const UnitGroups::Parameter& parameter) {
  return static_cast<int64_t>(parameter.tensor.use_count()) - 1 - static_cast<int64_t>(parameter.slots.size());
}

// Modules whose parameters have no members in the first place.
bool is_registry_only(torch::nn::Module& module) {
  return module.as<torch::nn::ParameterListImpl>() != nullptr || module.as<torch::nn::ParameterDictImpl>() != nullptr;
}

std::string member_name(std::string path) {
  for (auto dot = path.find('.'); dot != std::string::npos; dot = path.find('.', dot)) path.replace(dot, 1, "->");
  return path;
}

}  // namespace

UnitGroups::UnitGroups(torch::nn::Module& root, const UnitSelector& selector, const std::vector<std::string>& patterns)
    : ignored_patterns_(patterns) {
  groups.push_back({"", {&root}, {}});
  std::vector<bool> used(selector.rules().size(), false);
  Names names;
  visit(root, "", 0, selector, used, names);
  for (size_t i = 0; i < used.size(); ++i) {
    if (used[i]) continue;
    dtensor::raise<dtensor::ValueError>(kWhere, "selector ", selector.rules()[i].description,
                                        " matches none of the submodules, expected at least one; the types here are ",
                                        names.types.empty() ? "none" : list(names.types, 12), ", the names ",
                                        names.paths.empty() ? "none" : list(names.paths, 12));
  }
  take_ignored();
  find_orphans();
}

// Only once all slots are known: a tied parameter is ignored under any of its names.
void UnitGroups::take_ignored() {
  std::vector<std::string> names;
  for (auto& group : groups) {
    for (auto& parameter : group.parameters) {
      for (auto& slot : parameter.slots) names.push_back(slot.path);
    }
  }
  check_patterns_match("ignored", ignored_patterns_, names);
  for (auto& group : groups) {
    auto kept = std::move(group.parameters);
    group.parameters.clear();
    for (auto& parameter : kept) {
      const bool is_ignored = matches_any(ignored_patterns_, parameter.slots);
      if (is_ignored) parameters.erase(parameter.tensor.unsafeGetTensorImpl());
      (is_ignored ? ignored : group.parameters).push_back(std::move(parameter));
    }
  }
}

size_t UnitGroups::group_of_match(const UnitSelector::Rule& rule, const std::string& path,
                                  const torch::nn::Module& module) {
  for (size_t i = 0; rule.together && i < groups.size(); ++i) {
    if (groups[i].together != rule.together.get()) continue;
    groups[i].path += ", " + path;
    groups[i].modules.push_back(&module);
    return i;
  }
  groups.push_back({path, {&module}, {}, rule.together.get()});
  return groups.size() - 1;
}

void UnitGroups::visit(torch::nn::Module& module, const std::string& path, size_t group, const UnitSelector& selector,
                       std::vector<bool>& used, Names& names) {
  if (!seen_modules_.insert(&module).second) return;
  for (auto& entry : ModuleAccess::parameters(module)) {
    if (!entry.value().defined()) continue;
    add({&module, entry.key(), path.empty() ? entry.key() : path + "." + entry.key()}, entry.value(), group);
  }
  for (auto& child : module.named_children()) {
    const auto child_path = path.empty() ? child.key() : path + "." + child.key();
    names.types.insert(child.value()->name());
    names.paths.insert(child_path);
    auto child_group = group;
    for (size_t i = 0; i < used.size(); ++i) {
      if (!selector.rules()[i].matches(child_path, *child.value())) continue;
      used[i] = true;
      if (child_group != group) continue;
      child_group = group_of_match(selector.rules()[i], child_path, *child.value());
    }
    visit(*child.value(), child_path, child_group, selector, used, names);
  }
}

void UnitGroups::add(ParameterSlot slot, const at::Tensor& tensor, size_t group) {
  const auto* identity = tensor.unsafeGetTensorImpl();
  if (auto found = positions_.find(identity); found != positions_.end()) {
    groups[found->second.group].parameters[found->second.index].slots.push_back(std::move(slot));
    return;
  }
  parameters.insert(identity);
  if (auto* impl = dtensor::distributed_impl(tensor)) {
    if (auto unit = std::dynamic_pointer_cast<Unit>(impl->owner())) {
      if (std::find(nested.begin(), nested.end(), unit) == nested.end()) nested.push_back(unit);
      nested_slots[identity].push_back(std::move(slot));
      return;
    }
  }
  positions_[identity] = {group, groups[group].parameters.size()};
  groups[group].parameters.push_back({tensor, {std::move(slot)}});
}

void UnitGroups::find_orphans() {
  for (auto& group : groups) {
    for (auto& orphan : group.parameters) {
      if (holders(orphan) != 0 || is_registry_only(*orphan.slots.front().module)) continue;
      const auto* shared = shared_parameter_like(orphan.tensor);
      if (shared == nullptr) continue;
      const auto& name = orphan.slots.front().path;
      const auto& other = shared->slots.front().path;
      orphans.push_back(c10::str("[", kWhere, "] warning: parameter \"", name, "\" of shape ", orphan.tensor.sizes(),
                                 " is registered and no member holds it, while more than one holds \"", other,
                                 "\"; if a member was assigned (", member_name(name), " = ", member_name(other),
                                 "), forward uses \"", other, "\" and \"", name,
                                 "\" never trains, as in plain libtorch; to tie both names register one tensor twice"));
    }
  }
}

const UnitGroups::Parameter* UnitGroups::shared_parameter_like(const at::Tensor& tensor) const {
  for (auto& group : groups) {
    for (auto& parameter : group.parameters) {
      if (parameter.tensor.sizes().equals(tensor.sizes()) && parameter.tensor.dtype() == tensor.dtype() &&
          holders(parameter) > static_cast<int64_t>(parameter.slots.size())) {
        return &parameter;
      }
    }
  }
  return nullptr;
}

void check_patterns_match(const char* option, const std::vector<std::string>& patterns,
                          const std::vector<std::string>& names) {
  for (auto& pattern : patterns) {
    const bool used = std::any_of(names.begin(), names.end(),
                                  [&](const std::string& name) { return matches_pattern(pattern, name); });
    if (used) continue;
    dtensor::raise<dtensor::ValueError>(kWhere, option, " pattern \"", pattern,
                                        "\" matches none of the parameters, expected at least one; they are ",
                                        names.empty() ? "none" : list({names.begin(), names.end()}, 12));
  }
}

bool matches_any(const std::vector<std::string>& patterns, const std::vector<ParameterSlot>& slots) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) {
    return std::any_of(slots.begin(), slots.end(),
                       [&](const ParameterSlot& slot) { return matches_pattern(pattern, slot.path); });
  });
}

}  // namespace hsdp
