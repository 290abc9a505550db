#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace hsdp {

template <class M>
class FullySharded;

/// One group of an optimizer's parameters: those whose qualified names fit a pattern (name_pattern.h), and the options
/// that they are trained with. A plain value.
class GroupRule {
 public:
  /// Trained with the defaults of the optimizer that is given the group.
  GroupRule(std::string pattern) : pattern_(std::move(pattern)) {}  // NOLINT(google-explicit-constructor)
  /// `options` are those of the optimizer: torch::optim::AdamWOptions for AdamW, and so on.
  template <std::derived_from<torch::optim::OptimizerOptions> Options>
  GroupRule(std::string pattern, const Options& options)
      : pattern_(std::move(pattern)), options_(std::make_shared<Options>(options)) {}

  const std::string& pattern() const { return pattern_; }
  /// A copy, null where there are none.
  std::unique_ptr<torch::optim::OptimizerOptions> options() const { return options_ ? options_->clone() : nullptr; }

 private:
  std::string pattern_;
  std::shared_ptr<const torch::optim::OptimizerOptions> options_;
};

/// The trainable parameters of a module, a group for each rule, for the constructor of any optimizer. A parameter goes
/// to the first rule that fits one of its names; tied parameters have several names and are there once, frozen ones
/// are left out. Names are the module's own, sharded or not. Throws ValueError, listing names, for a rule that gets no
/// parameter and for parameters that no rule fits.
std::vector<torch::optim::OptimizerParamGroup> parameter_groups(const torch::nn::Module& module,
                                                                const std::vector<GroupRule>& rules);

template <class M>
std::vector<torch::optim::OptimizerParamGroup> parameter_groups(const torch::nn::ModuleHolder<M>& holder,
                                                                const std::vector<GroupRule>& rules) {
  return parameter_groups(*holder, rules);
}

/// The same for what fully_shard returned, outside of its forward scope.
template <class M>
std::vector<torch::optim::OptimizerParamGroup> parameter_groups(const FullySharded<M>& model,
                                                                const std::vector<GroupRule>& rules) {
  return parameter_groups(model.module(), rules);
}

}  // namespace hsdp
