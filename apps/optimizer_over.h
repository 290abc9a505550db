#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <vector>

#include "hsdp/parameter_groups.h"

namespace apps {

/// An optimizer of class T over a group for each pattern without weight decay and one for the rest.
template <class T, class Model, class Options>
std::unique_ptr<torch::optim::Optimizer> optimizer_over(const Model& model, const std::vector<std::string>& no_decay,
                                                        const Options& options) {
  auto without_decay = options;
  without_decay.weight_decay(0.0);
  std::vector<hsdp::GroupRule> rules;
  for (const auto& pattern : no_decay) rules.emplace_back(pattern, without_decay);
  rules.emplace_back("**", options);
  return std::make_unique<T>(hsdp::parameter_groups(model, rules), options);
}

}  // namespace apps
