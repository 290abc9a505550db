#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <map>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

namespace hsdp {

using OptionValue = std::variant<bool, int64_t, double>;

/// What an optimizer keeps for one parameter, and how it trains it.
struct ParameterOptimizerState {
  /// "AdamW" for torch::optim::AdamW and FusedAdamW, and so on: optimizers of one kind have the same state.
  std::string kind;
  /// Those of the parameter's group: "lr", "beta1", "weight_decay", "amsgrad", ...
  std::map<std::string, OptionValue> options;
  /// Numbers of steps: "step". Empty, as `tensors`, for a parameter that was never stepped.
  std::map<std::string, int64_t> counts;
  /// "exp_avg", ...: sharded as the parameter is. Undefined ones are not there.
  std::map<std::string, at::Tensor> tensors;
};

/// By parameter name.
using OptimizerStates = std::map<std::string, ParameterOptimizerState>;

/// The name of each parameter, for messages and as key: never its position.
using ParameterNames = std::unordered_map<const c10::TensorImpl*, std::string>;

/// State and options of all parameters of the optimizers; tensors are shared with them. Supported: torch::optim::Adam,
/// AdamW, SGD, RMSprop, Adagrad, FusedAdamW, FusedSGD and classes derived from these. Throws NotSupportedError for
/// other optimizers (LBFGS keeps vectors over all parameters), ValueError for a parameter without a name or in two
/// groups.
OptimizerStates optimizer_states(const std::vector<torch::optim::Optimizer*>& optimizers, const ParameterNames& names);

struct RestoreOptions {
  /// Whether groups take over options, learning rates among them.
  bool options = true;
  /// Parameters without an entry keep their state, instead of being refused.
  bool allow_missing = false;
};

/// Each parameter's state becomes that of its entry (none where the entry has none), and the tensors are the entries'
/// own; in CapturableStep::sync_state's manner where a graph has recorded steps. `prepare` checks all of it and changes
/// nothing; what it returns does it while optimizers and states live, and throws only while a graph is captured;
/// `restore` is both. Throws ValueError for a parameter without entry, an entry of another kind, counts and tensors of
/// other names than the kind has, and a group whose parameters come with different options.
std::function<void()> prepare_optimizer_states(const std::vector<torch::optim::Optimizer*>& optimizers,
                                               const ParameterNames& names, const OptimizerStates& states,
                                               const RestoreOptions& options);
void restore_optimizer_states(const std::vector<torch::optim::Optimizer*>& optimizers, const ParameterNames& names,
                              const OptimizerStates& states, const RestoreOptions& options);

}  // namespace hsdp
