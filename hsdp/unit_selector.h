#pragma once

#include <c10/util/Type.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

namespace hsdp {

/// Picks the submodules that become units: by type, by name pattern, or several of these joined with `|`; each match is
/// a unit, or all are one with together(). A plain value. A selector that matches nothing is refused by fully_shard,
/// which lists the types and names that are there.
class UnitSelector {
 public:
  struct Rule {
    std::string description;
    std::function<bool(const std::string& path, const torch::nn::Module& module)> matches;
    /// Rules that share one of these form one unit; null: a unit for each match.
    std::shared_ptr<const int> together = nullptr;
  };

  UnitSelector() = default;
  explicit UnitSelector(Rule rule) : rules_{std::move(rule)} {}

  const std::vector<Rule>& rules() const { return rules_; }
  UnitSelector operator|(const UnitSelector& other) const;

 private:
  std::vector<Rule> rules_;
};

/// Every module of type T: the module's class or its holder (`Linear` and `LinearImpl` mean the same).
template <class T>
UnitSelector each() {
  if constexpr (torch::detail::is_module_holder<T>::value) {
    return each<typename T::ContainedType>();
  } else {
    static_assert(std::is_base_of_v<torch::nn::Module, T>, "each<T>() needs a module class or holder");
    return UnitSelector({std::string("each<") + c10::demangle_type<T>() + ">()",
                         [](const std::string&, const torch::nn::Module& module) {
                           return dynamic_cast<const T*>(&module) != nullptr;
                         }});
  }
}

/// Every module whose qualified name matches: `*` stands for any characters but a dot, `**` for any characters.
/// `each("layers.*")` matches "layers.0" and not "layers.0.mlp".
UnitSelector each(const std::string& pattern);

/// One unit of everything that `selector` picks: together(each("norm") | each("head")).
UnitSelector together(const UnitSelector& selector);

}  // namespace hsdp
