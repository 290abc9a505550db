#include "hsdp/unit_backward.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "dtensor/error.h"
#include "hsdp/scheduler.h"
#include "hsdp/unit.h"

namespace hsdp {

using torch::autograd::variable_list;

namespace {

void refuse_second_order(const Unit& unit, const variable_list& gradients) {
  if (!at::GradMode::is_enabled()) return;
  for (auto& gradient : gradients) {
    if (!gradient.defined() || !gradient.requires_grad()) continue;
    dtensor::raise<dtensor::NotSupportedError>(
        "backward", "create_graph=true for the parameters of unit \"", unit.name(),
        "\", whose reduced gradients have no graph, expected gradients of inputs only; take them with "
        "torch::autograd::grad({y}, {x}, ..., create_graph=true)");
  }
}

}  // namespace

UnitBackward::UnitBackward(std::shared_ptr<Unit> unit, std::vector<size_t> indices, int64_t scope_token,
                           torch::autograd::edge_list edges)
    : Node(std::move(edges)),
      unit_(std::move(unit)),
      scheduler_(unit_->scheduler()),
      indices_(std::move(indices)),
      scope_token_(scope_token) {}

variable_list UnitBackward::apply(variable_list&& gradients) {
  refuse_second_order(*unit_, gradients);
  scheduler_->reduce(*unit_, scope_token_, indices_, std::move(gradients));
  return variable_list(num_outputs());
}

ParameterAccumulator::ParameterAccumulator(std::weak_ptr<Unit> unit, size_t index, const at::Tensor& parameter)
    : unit_(std::move(unit)), index_(index) {
  add_input_metadata(parameter);
}

variable_list ParameterAccumulator::apply(variable_list&& gradients) {
  if (!gradients[0].defined()) return {};
  auto unit = unit_.lock();
  auto scheduler = unit ? unit->scheduler() : nullptr;
  if (!scheduler) {
    dtensor::raise<dtensor::StateError>("backward",
                                        "a gradient arrives at a sharded parameter whose module is gone, expected "
                                        "the result of fully_shard to live until backward has run");
  }
  refuse_second_order(*unit, gradients);
  scheduler->reduce_direct(*unit, index_, gradients[0]);
  return {};
}

}  // namespace hsdp
