#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

#include <array>
#include <unordered_map>
#include <vector>

namespace hsdp {

/// The tensors of a parameter's state; undefined where it has none.
inline std::array<at::Tensor*, 3> tensors_of(torch::optim::AdamWParamState& state) {
  return {&state.exp_avg(), &state.exp_avg_sq(), &state.max_exp_avg_sq()};
}
inline std::array<at::Tensor*, 1> tensors_of(torch::optim::SGDParamState& state) { return {&state.momentum_buffer()}; }

/// The tensors that replays of an optimizer's recorded steps read and write, whatever has become of state() since. They
/// are held here, so that there is memory behind what a graph writes.
class CapturedState {
 public:
  bool is_empty() const { return parameters_.empty(); }
  bool has(const at::Tensor& parameter) const { return parameters_.contains(parameter.unsafeGetTensorImpl()); }
  /// Whether a graph may go on from `tensors`: they are the recorded ones, or none are and they lie as the parameter.
  bool takes(const at::Tensor& parameter, const std::vector<at::Tensor>& tensors) const;
  /// A graph has recorded `tensors`; undefined ones are not in it.
  void add(const at::Tensor& parameter, const std::vector<at::Tensor>& tensors);
  /// Recorded tensors take the values of those that stand in their place in the optimizer's state, zeros where there
  /// are none, and stand there again. Forgets those that no longer lie as their parameter does: their graph is void.
  template <class State>
  void put_back(torch::optim::Optimizer& optimizer);
  /// Throws NotSupportedError while a graph is recorded: `call` waits for the device.
  void check_not_capturing(const char* where, const char* call) const;

 private:
  struct Recorded {
    /// Held, so that no other parameter gets its address.
    at::Tensor parameter;
    std::vector<at::Tensor> tensors;
  };

  std::unordered_map<void*, Recorded> parameters_;
};

}  // namespace hsdp
