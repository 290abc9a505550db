#include "hsdp/unit.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "dtensor/dispatch.h"
#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "dtensor/hash_bytes.h"
#include "hsdp/host.h"
#include "hsdp/scheduler.h"
#include "hsdp/unit_backward.h"

namespace hsdp {
namespace {

using Below = c10::impl::ExcludeDispatchKeyGuard;

}  // namespace

Unit::Unit(std::string name, std::vector<const torch::nn::Module*> modules, std::vector<ShardedParameter> parameters,
           std::shared_ptr<const UnitContext> context, UnitSettings settings)
    : name_(std::move(name)),
      modules_(std::move(modules)),
      parameters_(std::move(parameters)),
      context_(std::move(context)),
      settings_(std::move(settings)),
      unsharded_(parameters_.size()) {
  set_reshard_after_forward(settings_.reshard_after_forward);
}

Unit::~Unit() {
  free_unsharded();  // a gather in flight writes there
  for (auto& unsharded : unsharded_) forget_unsharded(unsharded);
}

void Unit::adopt_parameters() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].impl().set_owner(weak_from_this(), i);
  }
  accumulators_.resize(parameters_.size());
  claim_accumulators();
}

void Unit::claim_accumulators() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& tensor = parameters_[i].tensor();
    auto& own = accumulators_[i];
    if (own &&
        (own->input_metadata(0).dtype() != tensor.dtype() || own->input_metadata(0).device() != tensor.device())) {
      own.reset();
    }
    if (own && own.use_count() == 1 && tensor.device().type() != kHost && !tensor.is_meta() &&
        own->input_metadata(0).stream() != current_stream(tensor.device())) {
      own.reset();
    }
    if (!own) own = std::make_shared<ParameterAccumulator>(weak_from_this(), i, tensor);
    if (torch::autograd::impl::try_get_grad_accumulator(tensor) != own) {
      torch::autograd::impl::set_grad_accumulator(tensor, own);
    }
  }
}

bool Unit::is_relative_of(const Unit& other) const {
  const auto contains = [](const std::vector<Unit*>& units, const Unit* unit) {
    return std::find(units.begin(), units.end(), unit) != units.end();
  };
  return this == &other || contains(ancestors_, &other) || contains(other.ancestors_, this);
}

// ---- reading ----

void Unit::connect(int64_t scope_token) {
  Below below(dtensor::kDTensorKey);
  c10::InferenceMode normal(false);
  claim_accumulators();
  std::vector<size_t> indices;
  torch::autograd::edge_list edges;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& tensor = parameters_[i].tensor();
    unsharded_[i].connected = at::Tensor();
    if (!tensor.requires_grad()) continue;
    indices.push_back(i);
    edges.push_back(torch::autograd::impl::gradient_edge(tensor));
  }
  auto node = std::shared_ptr<UnitBackward>(
      new UnitBackward(shared_from_this(), indices, scope_token, std::move(edges)), torch::autograd::deleteNode);
  for (auto i : indices) {
    at::Tensor connected;
    {
      at::NoGradGuard no_grad;
      connected = unsharded_[i].whole.detach();
    }
    torch::autograd::impl::set_gradient_edge(connected, {node, node->add_input_metadata(connected)});
    unsharded_[i].connected = std::move(connected);
  }
  scope_token_ = scope_token;
}

at::Tensor Unit::connected(size_t index, int64_t scope_token) {
  if (scope_token != scope_token_ || !unsharded_[index].connected.defined()) connect(scope_token);
  return unsharded_[index].connected;
}

void Unit::disconnect() {
  scope_token_ = kNoScope;
  for (auto& unsharded : unsharded_) unsharded.connected = at::Tensor();
}

// ---- what backward needs ----

Unit::Hold::Hold(std::shared_ptr<Unit> unit, int64_t scope_token)
    : unit_(std::move(unit)), scheduler_(unit_->scheduler()), scope_token_(scope_token) {
  std::lock_guard lock(unit_->holds_mutex_);
  ++unit_->holds_[scope_token_];
}

Unit::Hold::~Hold() {
  {
    std::lock_guard lock(unit_->holds_mutex_);
    auto found = unit_->holds_.find(scope_token_);
    if (--found->second > 0) return;
    unit_->holds_.erase(found);
  }
  if (scheduler_) scheduler_->last_hold_released(*unit_);
}

int64_t Unit::holds(int64_t scope_token) const {
  std::lock_guard lock(holds_mutex_);
  auto found = holds_.find(scope_token);
  return found == holds_.end() ? 0 : found->second;
}

int64_t Unit::holds() const {
  std::lock_guard lock(holds_mutex_);
  int64_t sum = 0;
  for (auto& [token, count] : holds_) sum += count;
  return sum;
}

Unit::Generation Unit::generation(size_t index) const {
  return {parameters_[index].impl().local_epoch(), unsharded_[index].alias_writes,
          parameters_[index].tensor()._version(), unsharded_[index].whole._version()};
}

// ---- dtensor::ParameterOwner ----

bool Unit::readable() const {
  auto scheduler = this->scheduler();
  return scheduler && scheduler->readable();
}

at::Tensor Unit::unsharded(size_t index, bool differentiable) {
  auto scheduler = this->scheduler();
  TORCH_INTERNAL_ASSERT(scheduler);
  scheduler->read(*this);
  if (!differentiable) return unsharded_[index].whole;
  return connected(index, scheduler->scope_token());
}

at::Tensor Unit::unsharded_for_raw_access(size_t index) {
  auto whole = unsharded(index, /*differentiable=*/false);
  raw_accessed_ = true;
  return whole;
}

void Unit::gather() {
  if (auto scheduler = this->scheduler()) scheduler->read(*this);
}

bool Unit::is_read_only() const {
  auto scheduler = this->scheduler();
  return scheduler && scheduler->is_summoned();
}

void Unit::check_write(size_t index) const {
  if (!is_read_only()) return;
  dtensor::raise<dtensor::StateError>("SummonFull", "parameter \"", parameters_[index].name(),
                                      "\" is changed inside hsdp::SummonFull, expected reads only, because other ranks "
                                      "need not do the same; change it after the scope");
}

// A parameter of another dtype than the one it is kept in would lose precision in every element.
void Unit::check_whole_write(size_t index) const {
  const auto dtype = gathered_dtype(index);
  if (dtype == parameters_[index].layout().dtype() && !parameters_[index].extension()) return;
  dtensor::raise<dtensor::StateError>("forward", "parameter \"", parameters_[index].name(), "\" is kept as ",
                                      parameters_[index].layout().dtype(), " and changed in a forward, where it is a ",
                                      dtype, " copy, expected reads only; change it outside, under NoGradGuard");
}

std::optional<at::ScalarType> Unit::input_dtype(size_t index) const {
  const auto dtype = gathered_dtype(index);
  if (!context_->mixed_precision.cast_forward_inputs || dtype == parameters_[index].layout().dtype()) {
    return std::nullopt;
  }
  return dtype;
}

std::optional<c10::Device> Unit::whole_device() const {
  if (!device_ || dtensor::ShardedRulesGuard::is_active() || !readable()) return std::nullopt;
  return device_;
}

void Unit::note_operand(uint64_t hash) {
  auto scheduler = this->scheduler();
  if (scheduler && data_parallel_size() > 1) scheduler->note_write("state made like a parameter", hash);
}

void Unit::written(size_t index) {
  write_back(index);
  auto scheduler = this->scheduler();
  if (!scheduler || data_parallel_size() == 1) return;
  // Each rank keeps its part of its own values, so that the next gather must find them equal.
  Below below(dtensor::kDTensorKey);
  at::NoGradGuard no_grad;
  const auto values = dtensor::raw_alias(unsharded_[index].whole).to(kHost);
  scheduler->note_write("\"" + parameters_[index].name() + "\"",
                        dtensor::hash_bytes(values.const_data_ptr(), values.nbytes()));
}

void Unit::write_back(size_t index) {
  Below below(dtensor::kDTensorKey);
  at::NoGradGuard no_grad;
  auto& parameter = parameters_[index];
  auto& unsharded = unsharded_[index];
  if (is_own_memory(index)) {
    // The same memory: only the counter of the identity has to learn of it.
    parameter.impl().bump_version();
  } else {
    auto local = parameter.impl().local();
    local.copy_(dtensor::narrow_to_box(dtensor::raw_alias(unsharded.whole), parameter.layout().local()));
  }
  parameter.impl().set_has_values(true);
  unsharded.version = parameter.tensor()._version();
}

}  // namespace hsdp
