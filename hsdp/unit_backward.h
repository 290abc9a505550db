#pragma once

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <vector>

namespace hsdp {

class Scheduler;
class Unit;

/// The autograd node of one unit in one forward scope. Its outputs are the unsharded parameters that require grad; what
/// it receives in backward are their full gradients, which it hands to the reduction. Its next edges lead to the
/// parameters' accumulators and carry nothing.
class UnitBackward : public torch::autograd::Node {
 public:
  UnitBackward(std::shared_ptr<Unit> unit, std::vector<size_t> indices, int64_t scope_token,
               torch::autograd::edge_list edges);
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "hsdp::UnitBackward"; }

 private:
  std::shared_ptr<Unit> unit_;
  std::shared_ptr<Scheduler> scheduler_;  // backward works on after the sharded module is gone
  std::vector<size_t> indices_;
  int64_t scope_token_;
};

/// The gradient accumulator of a managed parameter. A full gradient that reaches the parameter itself (a custom
/// autograd::Function that was given the parameter sees it without the dispatcher) joins the unit's reduction.
class ParameterAccumulator : public torch::autograd::Node {
 public:
  ParameterAccumulator(std::weak_ptr<Unit> unit, size_t index, const at::Tensor& parameter);
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "hsdp::ParameterAccumulator"; }

 private:
  std::weak_ptr<Unit> unit_;
  size_t index_;
};

}  // namespace hsdp
