#include "hsdp/unit_set.h"

#include <cmath>
#include <utility>

#include "dtensor/error.h"
#include "hsdp/scheduler.h"

namespace hsdp {

void Unsharding::wait() {
  for (auto& unit : std::exchange(units_, {})) scheduler_->finish_unshard(*unit);
}

UnitSet::UnitSet(std::shared_ptr<Scheduler> scheduler, std::vector<std::shared_ptr<Unit>> units)
    : scheduler_(std::move(scheduler)), units_(std::move(units)) {}

void UnitSet::set_reshard_after_forward(ReshardAfterForward reshard) const {
  for (auto& unit : units_) reshard.group_of(unit->shard_size());
  for (auto& unit : units_) unit->set_reshard_after_forward(reshard);
}

void UnitSet::set_reshard_after_backward(bool reshard) const {
  for (auto& unit : units_) unit->mutable_settings().reshard_after_backward = reshard;
}

void UnitSet::set_requires_gradient_sync(bool required) const {
  for (auto& unit : units_) unit->mutable_settings().gradient_sync = required;
}

void UnitSet::set_requires_all_reduce(bool required) const {
  for (auto& unit : units_) unit->mutable_settings().all_reduce = required;
}

void UnitSet::set_gradient_divide_factor(double factor) const {
  if (!(factor > 0) || std::isinf(factor)) {
    dtensor::raise<dtensor::ValueError>("set_gradient_divide_factor", "factor ", factor,
                                        ", expected a finite number above 0; the number of ranks gives means, 1 gives "
                                        "sums");
  }
  for (auto& unit : units_) unit->mutable_settings().gradient_divide_factor = factor;
}

void UnitSet::set_all_reduce_hook(std::function<void(const at::Tensor& buffer)> hook) const {
  for (auto& unit : units_) unit->mutable_settings().all_reduce_hook = hook;
}

std::vector<Unit*> UnitSet::plain(const char* where, const std::vector<UnitSet>& sets) const {
  std::vector<Unit*> units;
  for (auto& set : sets) {
    if (set.scheduler_ != scheduler_) {
      dtensor::raise<dtensor::ValueError>(where, "unit \"", set.units_.front()->name(),
                                          "\" belongs to another sharded module, expected units of this one");
    }
    for (auto& unit : set.units_) units.push_back(unit.get());
  }
  return units;
}

void UnitSet::set_modules_to_forward_prefetch(const std::vector<UnitSet>& ahead) const {
  const auto units = plain("set_modules_to_forward_prefetch", ahead);
  for (auto& unit : units_) unit->set_forward_prefetch(units);
}

void UnitSet::set_modules_to_backward_prefetch(const std::vector<UnitSet>& ahead) const {
  const auto units = plain("set_modules_to_backward_prefetch", ahead);
  for (auto& unit : units_) unit->set_backward_prefetch(units);
}

Unsharding UnitSet::unshard(bool async) const {
  Unsharding unsharding;
  unsharding.scheduler_ = scheduler_;
  unsharding.units_ = units_;
  for (auto& unit : units_) scheduler_->unshard(*unit, /*async=*/true);
  if (!async) unsharding.wait();
  return unsharding;
}

void UnitSet::reshard() const {
  for (auto& unit : units_) scheduler_->reshard(*unit);
}

}  // namespace hsdp
