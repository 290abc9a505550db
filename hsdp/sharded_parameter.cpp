#include "hsdp/sharded_parameter.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <utility>

#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "dtensor/inspect.h"
#include "hsdp/host.h"
#include "hsdp/launch/device.h"

namespace hsdp {
namespace {

using dtensor::raise;
using dtensor::StateError;
using dtensor::ValueError;

constexpr auto kReset = "reset_sharded_param";

// The tensor that all slots register now, and how many handles that makes.
at::Tensor registered_tensor(const std::vector<ParameterSlot>& slots) {
  at::Tensor registered;
  for (auto& slot : slots) {
    auto* entry = ModuleAccess::parameters(*slot.module).find(slot.name);
    if (entry == nullptr || !entry->defined()) {
      raise<StateError>(kReset, "parameter \"", slot.path,
                        "\" is no longer registered, expected a tensor; modules must "
                        "keep their parameters after fully_shard");
    }
    if (!registered.defined()) {
      registered = *entry;
    } else if (!registered.is_same(*entry)) {
      raise<ValueError>(kReset, "tied parameter: \"", slots.front().path, "\" holds ", dtensor::describe(registered),
                        ", \"", slot.path, "\" holds another ", dtensor::describe(*entry),
                        ", expected one tensor in both; assign both");
    }
  }
  return registered;
}

// Neither the tensor nor its memory may be somebody else's as well. A DTensor holds its memory twice, as body and
// local.
void check_sole_owner(const at::Tensor& registered, const std::vector<ParameterSlot>& slots, const std::string& name) {
  // One handle a slot, one here.
  const auto expected = slots.size() + 1;
  auto* other = dtensor::distributed_impl(registered);
  const auto& memory = other != nullptr ? other->local() : registered;
  if (memory.has_storage() && memory.storage().use_count() > (other != nullptr ? 2u : 1u)) {
    raise<ValueError>(kReset, "parameter \"", name,
                      "\": the memory of the tensor to adopt has other holders, expected none, "
                      "because it would be shared; register a clone()");
  }
  if (registered.use_count() <= expected) return;
  raise<ValueError>(kReset, "parameter \"", name, "\": the tensor to adopt has ", registered.use_count() - expected,
                    " other holders, expected none, because its memory would be shared; register a clone()");
}

}  // namespace

ShardedParameter::ShardedParameter(at::Tensor identity, std::vector<ParameterSlot> slots,
                                   std::shared_ptr<const dtensor::Layout> layout)
    : tensor_(std::move(identity)),
      impl_(dtensor::dtensor_impl(tensor_)),
      slots_(std::move(slots)),
      initial_layout_(std::move(layout)),
      tape_(tape_of(tensor_)),
      value_(value_id_of(tensor_)) {
  TORCH_INTERNAL_ASSERT(impl_ != nullptr && !slots_.empty());
}

void ShardedParameter::set_slots(std::vector<ParameterSlot> slots) {
  slots_ = std::move(slots);
  impl_->set_name(name());
}

std::optional<int64_t> ShardedParameter::shard_dim() const {
  const auto& placement = initial_layout_->placements().back();
  return placement.is_shard() ? std::optional(placement.dim()) : std::nullopt;
}

void ShardedParameter::offload(bool pin_memory) {
  is_offloaded_ = true;
  pins_memory_ = pin_memory && can_pin_memory_for(initial_layout_->mesh()->device_type());
}

void ShardedParameter::shard_on_meta() {
  c10::impl::ExcludeDispatchKeyGuard below(dtensor::kDTensorKey);
  c10::InferenceMode normal(false);
  auto local = at::empty(initial_layout_->local().sizes, at::TensorOptions(at::kMeta).dtype(initial_layout_->dtype()));
  impl_->distribute(std::move(local), initial_layout_);
  impl_->mark_parameter();
  impl_->set_name(name());
  impl_->set_has_values(false);
}

void ShardedParameter::replace_by_empty(at::Device device) {
  c10::impl::ExcludeDispatchKeyGuard below(dtensor::kDTensorKey);
  c10::InferenceMode normal(false);
  auto options = at::TensorOptions(is_offloaded_ ? c10::Device(kHost) : device).dtype(layout().dtype());
  if (pins_memory_) options = options.pinned_memory(true);
  auto empty = at::empty(layout().local().sizes, options);
  for (auto& slot : slots_) ModuleAccess::parameters(*slot.module)[slot.name] = empty;
}

bool ShardedParameter::is_healthy() const {
  return is_materialized() && healthy_epoch_ == impl_->local_epoch() &&
         dtensor::same_memory(impl_->body(), impl_->local());
}

ShardedParameter::Reset ShardedParameter::plan_reset() const {
  c10::impl::ExcludeDispatchKeyGuard below(dtensor::kDTensorKey);
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  Reset reset;
  const auto registered = registered_tensor(slots_);
  at::Tensor source;
  if (registered.is_same(tensor_)) {
    if (is_healthy()) return reset;
    source = impl_->local();
  } else {
    reset.adopted = true;
    if (!registered.is_meta()) check_sole_owner(registered, slots_, name());
    if (auto* other = dtensor::dtensor_impl(registered)) {
      if (other->state() != dtensor::DTensorImpl::State::distributed || !other->layout() ||
          !other->layout()->same_distribution(layout())) {
        raise<ValueError>(kReset, "parameter \"", name(), "\" given ", dtensor::describe(registered), ", expected ",
                          layout().to_string(), "; redistribute it first");
      }
      source = other->local();
    } else {
      source = registered;
    }
    if (source.is_meta()) return {};
    if (source.scalar_type() != layout().dtype()) {
      raise<ValueError>(kReset, "parameter \"", name(), "\" given dtype ", source.scalar_type(), ", expected ",
                        layout().dtype(), "; convert it with to()");
    }
  }
  if (source.is_meta()) return {};
  const auto& box = layout().local();
  if (!source.sizes().equals(box.sizes)) {
    raise<ValueError>(kReset, "parameter \"", name(), "\" given a local of sizes ", source.sizes(), ", expected ",
                      c10::IntArrayRef(box.sizes), " as this rank's part of ", layout().to_string());
  }
  if (source.layout() != at::kStrided) {
    raise<ValueError>(kReset, "parameter \"", name(), "\" given a ", source.layout(), " tensor, expected a dense one");
  }
  const auto home = is_offloaded_ ? kHost : layout().mesh()->device_type();
  if (source.device().type() != home) {
    raise<ValueError>(kReset, "parameter \"", name(), "\" given a tensor on ", source.device(), ", expected ",
                      c10::DeviceTypeName(home, true),
                      is_offloaded_ ? ", where offloaded shards live" : " as its mesh has");
  }
  const auto padded_sizes = layout().padded_local_sizes();
  if (healthy_epoch_ == impl_->local_epoch() && !reset.adopted) {
    reset.local = source;  // Only the body is stale.
  } else if (source.is_contiguous() && source.sizes().equals(padded_sizes) && !source.is_inference() &&
             (!pins_memory_ || source.is_pinned())) {
    reset.local = dtensor::raw_alias(source);
  } else {
    // Old padding is never read: only the actual elements are copied in front of zeros.
    auto options = source.options().requires_grad(false);
    if (pins_memory_) options = options.pinned_memory(true);
    auto padded = at::zeros({c10::multiply_integers(padded_sizes)}, options);
    auto local = padded.narrow(0, 0, c10::multiply_integers(box.sizes)).view(box.sizes);
    local.copy_(source);
    reset.local = dtensor::raw_alias(local);
  }
  reset.needed = true;
  return reset;
}

void ShardedParameter::commit_reset(Reset reset) {
  if (!reset.needed) return;
  const bool had_values = reset.adopted || impl_->has_values();
  auto donor = dtensor::raw_alias(reset.local);
  if (at::isFloatingType(donor.scalar_type()) || at::isComplexType(donor.scalar_type())) {
    donor.set_requires_grad(tensor_.requires_grad());
  }
  if (!dtensor::same_memory(reset.local, impl_->local())) impl_->install_local(std::move(reset.local));
  impl_->exchange_body(donor);
  impl_->refresh_identity();
  impl_->set_has_values(had_values);
  for (auto& slot : slots_) ModuleAccess::parameters(*slot.module)[slot.name] = tensor_;
  healthy_epoch_ = impl_->local_epoch();
}

at::Tensor ShardedParameter::padded_shard() const {
  c10::impl::ExcludeDispatchKeyGuard below(dtensor::kDTensorKey);
  at::NoGradGuard no_grad;
  const auto local = dtensor::raw_alias(impl_->local());
  const auto padded_sizes = layout().padded_local_sizes();
  if (shard_dim().value_or(0) != 0 && !local.sizes().equals(padded_sizes)) {
    auto padded = at::zeros(padded_sizes, local.options());
    dtensor::narrow_to_box(padded, {std::vector<int64_t>(padded_sizes.size(), 0), local.sizes().vec()}).copy_(local);
    return padded.view({-1});
  }
  return local.as_strided({c10::multiply_integers(padded_sizes)}, {1}, local.storage_offset());
}

}  // namespace hsdp
