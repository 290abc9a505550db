#pragma once

#include <torch/nn/module.h>

#include <string>
#include <vector>

namespace hsdp {

/// One place where a module registers a tensor. Tied tensors have several.
struct ParameterSlot {
  torch::nn::Module* module;
  /// Name within the module.
  std::string name;
  /// Fully qualified name, "blocks.0.attention.weight".
  std::string path;
};

/// The parameter registry that torch::nn::Module keeps protected. Writing through it exchanges what is registered and
/// leaves the module's own member alone.
struct ModuleAccess : torch::nn::Module {
  static torch::OrderedDict<std::string, at::Tensor>& parameters(torch::nn::Module& module) {
    const auto member = &ModuleAccess::parameters_;
    return module.*member;
  }
};

}  // namespace hsdp
