#include "hsdp/unit_backward.h"

#include <utility>

#include "hsdp/scheduler.h"
#include "hsdp/unit.h"

namespace hsdp {

using torch::autograd::variable_list;

UnitBackward::UnitBackward(std::shared_ptr<Unit> unit, std::vector<size_t> indices, torch::autograd::edge_list edges)
    : Node(std::move(edges)), unit_(std::move(unit)), indices_(std::move(indices)) {}

variable_list UnitBackward::apply(variable_list&& gradients) {
  if (auto scheduler = unit_->scheduler()) scheduler->reduce(*unit_, indices_, std::move(gradients));
  return variable_list(num_outputs());
}

ParameterAccumulator::ParameterAccumulator(std::weak_ptr<Unit> unit, size_t index, const at::Tensor& parameter)
    : unit_(std::move(unit)), index_(index) {
  add_input_metadata(parameter);
}

variable_list ParameterAccumulator::apply(variable_list&& gradients) {
  if (!gradients[0].defined()) return {};
  if (auto unit = unit_.lock()) {
    if (auto scheduler = unit->scheduler()) scheduler->reduce_direct(*unit, index_, gradients[0]);
  }
  return {};
}

}  // namespace hsdp
