// The landing half of Unit: reduced gradients -> divided, cast, offloaded -> DTensors in `.grad`.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "dtensor/dispatch.h"
#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "hsdp/comm_streams.h"
#include "hsdp/host.h"
#include "hsdp/kernels/gradient_kernels.h"
#include "hsdp/launch/device.h"
#include "hsdp/profiling/span.h"
#include "hsdp/unit.h"
#include "hsdp/wait_on_host.h"

namespace hsdp {
namespace {

using Below = c10::impl::ExcludeDispatchKeyGuard;

// Hooks are the user's code: they see DTensors, by the rules for sharded tensors.
class UserCode {
 public:
  UserCode()
      : keys_(c10::impl::tls_local_dispatch_key_set().included_,
              c10::impl::tls_local_dispatch_key_set().excluded_.remove(dtensor::kDTensorKey)) {}

 private:
  c10::impl::ForceDispatchKeyGuard keys_;
  dtensor::ShardedRulesGuard sharded_;
};

bool has_hooks(const at::Tensor& parameter) {
  return !torch::autograd::impl::hooks(parameter).empty() ||
         torch::autograd::impl::post_acc_grad_hooks(parameter) != nullptr;
}

void run_post_accumulate_hook(const at::Tensor& parameter) {
  auto& hook = torch::autograd::impl::post_acc_grad_hooks(parameter);
  if (!hook) return;
  const UserCode user;
  (*hook)(parameter);
}

// Divides reduced gradients and puts them where they belong, those of one kind at once.
class GradientLanding {
 public:
  void add(const at::Tensor& target, const at::Tensor& local, double divisor, bool accumulate) {
    const bool stays = target.is_same(local);
    if (stays && divisor == 1) return;
    if (!kernels::has_kernel(local.scalar_type()) || !kernels::has_kernel(target.scalar_type()) ||
        !target.is_contiguous() || (!stays && target.is_alias_of(local))) {
      if (divisor != 1) local.div_(divisor);
      if (accumulate) {
        target.add_(local.to(target.scalar_type()));
      } else if (!stays) {
        target.copy_(local);
      }
      return;
    }
    const auto batch = std::find_if(batches_.begin(), batches_.end(), [&](const Batch& one) {
      const auto& first = one.landings.front();
      return one.divisor == divisor && first.source.scalar_type() == local.scalar_type() &&
             first.destination.scalar_type() == target.scalar_type();
    });
    auto& landings = (batch == batches_.end() ? batches_.insert(batch, Batch{divisor, {}}) : batch)->landings;
    landings.push_back({target, local, accumulate});
  }

  void run() {
    for (const auto& batch : batches_) kernels::land_gradients(batch.landings, batch.divisor);
    batches_.clear();
  }

 private:
  struct Batch {
    double divisor;
    std::vector<kernels::Landing> landings;
  };
  std::vector<Batch> batches_;
};

}  // namespace

std::vector<size_t> Unit::finish_reduction(Reduction reduction) {
  Below below(dtensor::kDTensorKey);
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  const Span span("post_backward_accumulate", name_);
  for (auto& work : reduction.works) work->wait();
  if (reduction.home) order_after(*reduction.home, current_stream(device()));
  if (settings_.all_reduce_hook) {
    for (auto& buffer : reduction.buffers) {
      const auto line = buffer.view({-1});
      const UserCode user;
      settings_.all_reduce_hook(line);
    }
  }
  const bool moves_to_host = context_->offload.to_host && device().type() != kHost;
  std::vector<Landed> landed;
  GradientLanding landing;
  for (auto& part : reduction.parts) {
    const auto index = part.index;
    auto& parameter = parameters_[index];
    if (!parameter.tensor().requires_grad()) continue;  // Switched off since the forward: torch drops it as well.
    const auto local = local_of(part, reduction.buffers[part.buffer]);
    const auto dtype = context_->mixed_precision.grad_dtype.value_or(parameter.layout().dtype());
    const bool waits = has_hooks(parameter.tensor()) || moves_to_host;
    const auto sum = waits ? at::Tensor() : accumulated_local(index);
    auto target = sum;
    if (!target.defined()) target = local.scalar_type() == dtype ? local : at::empty_like(local, dtype);
    landing.add(target, local, reduction.divisors[part.buffer], sum.defined());
    landed.push_back({index, reduction.task, std::move(target), sum.defined()});
  }
  landing.run();
  if (!moves_to_host) return land(landed);
  offload(std::move(landed));
  return {};
}

// Starts the copies; on a device that works beside the host they are waited for at the end of the backward.
void Unit::offload(std::vector<Landed> landed) {
  const auto* streams = this->streams();
  const bool pins = context_->offload.pin_memory && can_pin_memory_for(device().type());
  Offloaded offloaded;
  const OnStream on_reduce(streams != nullptr ? streams->reduce_scatter() : nullptr);
  for (auto& one : landed) {
    auto host = at::empty(one.local.sizes(), one.local.options().device(kHost).pinned_memory(pins));
    host.copy_(one.local, /*non_blocking=*/streams != nullptr);
    offloaded.device_side.push_back(std::exchange(one.local, std::move(host)));
  }
  offloaded.landed = std::move(landed);
  if (streams != nullptr) offloaded.copied = std::make_shared<StreamMark>(*streams->reduce_scatter());
  offloaded_.push_back(std::move(offloaded));
}

std::vector<size_t> Unit::settle_offloaded() {
  Below below(dtensor::kDTensorKey);
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  std::vector<size_t> there;
  for (auto& offloaded : std::exchange(offloaded_, {})) {
    if (offloaded.copied) wait_on_host(*offloaded.copied, *context_->mesh);
    const auto more = land(offloaded.landed);
    there.insert(there.end(), more.begin(), more.end());
  }
  return there;
}

void Unit::release_offloaded() {
  for (auto& offloaded : offloaded_) {
    if (offloaded.device_side.empty()) continue;
    if (offloaded.copied) offloaded.copied->wait();
    offloaded.device_side.clear();
  }
}

void Unit::drop_gradients_in_flight() {
  direct_gradients_.clear();
  awaiting_hooks_.clear();
  release_offloaded();
  offloaded_.clear();
}

// This rank's part of a parameter's gradient, where it lies in a buffer of reduced ones; contiguous.
at::Tensor Unit::local_of(const Reduction::Part& part, const at::Tensor& buffer) const {
  const auto& parameter = parameters_[part.index];
  const auto& box = parameter.layout().local();
  if (buffer.sizes().equals(box.sizes)) return buffer;
  // Padding lies behind the elements, but for dims other than 0, where it lies between them.
  const bool between = parameter.shard_dim().value_or(0) != 0;
  const auto strides = dtensor::row_major_strides(between ? parameter.layout().padded_local_sizes() : box.sizes);
  return buffer.as_strided(box.sizes, strides, buffer.storage_offset() + part.offset).contiguous();
}

// What is in `.grad` already, to be added to; undefined where nothing is.
at::Tensor Unit::accumulated_local(size_t index) const {
  const auto& parameter = parameters_[index];
  const auto& accumulated = parameter.tensor().grad();
  if (!accumulated.defined()) return {};
  auto* existing = dtensor::distributed_impl(accumulated);
  if (existing == nullptr || !existing->layout() || !existing->layout()->same_distribution(parameter.layout())) {
    dtensor::raise<dtensor::StateError>("backward", "parameter \"", parameter.name(), "\" has a gradient that is ",
                                        dtensor::describe(accumulated), ", expected a DTensor ",
                                        parameter.layout().to_string(), "; reset it with zero_grad()");
  }
  return existing->local();
}

// Those without hooks are in place then; what has hooks waits for the end of the backward.
std::vector<size_t> Unit::land(const std::vector<Landed>& landed) {
  std::vector<size_t> there;
  for (const auto& one : landed) {
    if (!has_hooks(parameters_[one.index].tensor())) {
      if (!one.accumulated) accumulate(one.index, one.local);
      there.push_back(one.index);
      continue;
    }
    // Other forwards of this backward, or functions that were given the parameter itself, may have more to come.
    const auto awaiting = std::find_if(awaiting_hooks_.begin(), awaiting_hooks_.end(), [&](const auto& each) {
      return each.index == one.index && each.task == one.task;
    });
    if (awaiting != awaiting_hooks_.end()) {
      awaiting->local.add_(one.local);
    } else {
      awaiting_hooks_.push_back({one.index, one.task, one.local});
    }
  }
  return there;
}

void Unit::run_hooks(const AwaitingHooks& awaiting) {
  Below below(dtensor::kDTensorKey);
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  accumulate(awaiting.index, awaiting.local);
}

// Adds one reduced, averaged gradient to `.grad`, after the parameter's hooks have seen it.
void Unit::accumulate(size_t index, const at::Tensor& local) {
  auto& parameter = parameters_[index];
  const auto& layout = parameter.layout();
  auto gradient = dtensor::wrap_local(dtensor::raw_alias(local), parameter.impl());
  dtensor::dtensor_impl(gradient)->set_name(parameter.name() + ".grad");
  auto& hooks = torch::autograd::impl::hooks(parameter.tensor());
  if (!hooks.empty()) {
    const UserCode user;
    for (auto& hook : hooks) {
      gradient = (*hook)({gradient})[0];
      if (!dtensor::DTensor::is_dtensor(gradient) || !gradient.sizes().equals(layout.sizes())) {
        dtensor::raise<dtensor::ValueError>("register_hook", "the hook of parameter \"", parameter.name(),
                                            "\" returned ", dtensor::describe(gradient), ", expected a DTensor ",
                                            layout.to_string());
      }
    }
  }
  auto& accumulated = parameter.tensor().mutable_grad();
  if (!accumulated.defined()) {
    accumulated = std::move(gradient);
    return run_post_accumulate_hook(parameter.tensor());
  }
  accumulated_local(index).add_(dtensor::distributed_impl(gradient)->local());
  run_post_accumulate_hook(parameter.tensor());
}

}  // namespace hsdp
