#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "hsdp/module_access.h"
#include "hsdp/unit.h"
#include "hsdp/unit_selector.h"

namespace hsdp {

/// Which parameters of a module would form which unit, found out before anything changes. A tied parameter is listed
/// once, with all places that register it. A plain value for the length of fully_shard.
class UnitGroups {
 public:
  struct Parameter {
    at::Tensor tensor;
    std::vector<ParameterSlot> slots;
  };
  struct Group {
    std::string path;  // of several modules joined by ", "
    std::vector<const torch::nn::Module*> modules;
    std::vector<Parameter> parameters;
    const void* together = nullptr;
  };

  /// `ignored` are patterns of parameters that no unit gets. Throws ValueError when a rule of `selector` or a pattern
  /// matches nothing, listing what is there.
  UnitGroups(torch::nn::Module& root, const UnitSelector& selector, const std::vector<std::string>& ignored);

  std::vector<Group> groups;                  // root first, then in the order of named_modules
  std::vector<std::shared_ptr<Unit>> nested;  // of submodules that were sharded before
  std::unordered_map<const c10::TensorImpl*, std::vector<ParameterSlot>> nested_slots;
  std::unordered_set<const c10::TensorImpl*> parameters;  // of units, nested ones included
  std::vector<Parameter> ignored;
  /// A line for each parameter that its module seems to have lost by an assignment to the member (`head->weight =
  /// embedding->weight`): members cannot be enumerated, but nothing beside the registry holds the one, and something
  /// beside registry and member the other.
  std::vector<std::string> orphans;

 private:
  struct Names {
    std::set<std::string> types, paths;
  };
  struct Position {
    size_t group, index;
  };

  void visit(torch::nn::Module& module, const std::string& path, size_t group, const UnitSelector& selector,
             std::vector<bool>& used, Names& names);
  void add(ParameterSlot slot, const at::Tensor& tensor, size_t group);
  size_t group_of_match(const UnitSelector::Rule& rule, const std::string& path, const torch::nn::Module& module);
  void take_ignored();
  void find_orphans();
  const Parameter* shared_parameter_like(const at::Tensor& tensor) const;

  std::vector<std::string> ignored_patterns_;
  std::unordered_set<const torch::nn::Module*> seen_modules_;
  std::unordered_map<const c10::TensorImpl*, Position> positions_;
};

/// Throws ValueError, listing what is there, for a pattern of `option` that matches none of the names.
void check_patterns_match(const char* option, const std::vector<std::string>& patterns,
                          const std::vector<std::string>& names);
bool matches_any(const std::vector<std::string>& patterns, const std::vector<ParameterSlot>& slots);

}  // namespace hsdp
