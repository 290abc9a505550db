// The gradient half of Unit: full gradients -> reduce-scatter -> DTensors in `.grad`.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "dtensor/dispatch.h"
#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "hsdp/unit.h"

namespace hsdp {
namespace {

using Below = c10::impl::ExcludeDispatchKeyGuard;

// A full gradient as the collective reads it: 1-D, contiguous, padded with zeros to equal chunks.
at::Tensor padded_full(const at::Tensor& gradient, const ShardedParameter& parameter, int64_t ranks) {
  const auto padded_numel = c10::multiply_integers(parameter.layout().padded_local_sizes()) * ranks;
  if (gradient.numel() == padded_numel) return gradient.contiguous().view({-1});
  auto padded = at::empty({padded_numel}, gradient.options().memory_format(std::nullopt));
  padded.narrow(0, 0, gradient.numel()).view(gradient.sizes()).copy_(gradient);
  padded.narrow(0, gradient.numel(), padded_numel - gradient.numel()).zero_();
  return padded;
}

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

}  // namespace

std::optional<Reduction> Unit::start_reduction(const std::vector<size_t>& indices, std::vector<at::Tensor> gradients,
                                               double divisor) {
  Below below(dtensor::kDTensorKey);
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  Reduction reduction;
  reduction.divisor = divisor;
  std::vector<TensorPair> pairs;
  const auto ranks = shard_size();
  for (size_t k = 0; k < indices.size(); ++k) {
    auto gradient = std::move(gradients[k]);
    if (!gradient.defined()) continue;
    const auto& parameter = parameters_[indices[k]];
    if (!gradient.sizes().equals(parameter.layout().sizes()) || gradient.layout() != at::kStrided) {
      dtensor::raise<dtensor::NotSupportedError>("reduce_scatter", "parameter \"", parameter.name(), "\" received a ",
                                                 gradient.layout(), " gradient of shape ", gradient.sizes(),
                                                 ", expected a dense one of shape ", parameter.layout().sizes());
    }
    if (gradient.requires_grad()) gradient = gradient.detach();
    reduction.indices.push_back(indices[k]);
    if (ranks == 1) {
      // Nothing to reduce: the gradient itself becomes the shard, if nobody else can see it.
      const bool sole = gradient.use_count() == 1 && gradient.is_contiguous() && gradient.storage().use_count() == 1;
      reduction.shards.push_back((sole ? gradient : gradient.clone(at::MemoryFormat::Contiguous)).view({-1}));
      continue;
    }
    auto full = padded_full(gradient, parameter, ranks);
    auto shard = at::empty({full.numel() / ranks}, full.options());
    pairs.push_back({std::move(full), shard});
    reduction.shards.push_back(std::move(shard));
  }
  if (reduction.indices.empty()) return std::nullopt;
  if (!pairs.empty()) reduction.work = transport_->reduce_scatter(pairs, {"reduce_scatter", name_});
  return reduction;
}

void Unit::finish_reduction(Reduction reduction) {
  Below below(dtensor::kDTensorKey);
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  if (reduction.work) reduction.work->wait();
  for (size_t k = 0; k < reduction.indices.size(); ++k) {
    auto& shard = reduction.shards[k];
    if (reduction.divisor != 1) shard.div_(reduction.divisor);
    land(reduction.indices[k], shard, reduction.task);
  }
}

void Unit::land(size_t index, const at::Tensor& shard, int64_t task) {
  auto& parameter = parameters_[index];
  if (!parameter.tensor().requires_grad()) return;  // Switched off since the forward: torch drops it as well.
  const auto& layout = parameter.layout();
  const auto& box = layout.local();
  auto local = shard.narrow(0, 0, c10::multiply_integers(box.sizes)).view(box.sizes);
  if (local.scalar_type() != layout.dtype()) local = local.to(layout.dtype());
  if (!has_hooks(parameter.tensor())) return accumulate(index, local);
  // Other forwards of this backward, or functions that were given the parameter itself, may have more to come.
  for (auto& awaiting : awaiting_hooks_) {
    if (awaiting.index != index || awaiting.task != task) continue;
    awaiting.local.add_(local);
    return;
  }
  awaiting_hooks_.push_back({index, task, local});
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
  auto* existing = dtensor::distributed_impl(accumulated);
  if (existing == nullptr || !existing->layout() || !existing->layout()->same_distribution(layout)) {
    dtensor::raise<dtensor::StateError>("backward", "parameter \"", parameter.name(), "\" has a gradient that is ",
                                        dtensor::describe(accumulated), ", expected a DTensor ", layout.to_string(),
                                        "; reset it with zero_grad()");
  }
  auto target = existing->local();
  target.add_(dtensor::distributed_impl(gradient)->local());
  run_post_accumulate_hook(parameter.tensor());
}

void Unit::add_direct_gradient(size_t index, const at::Tensor& gradient) {
  Below below(dtensor::kDTensorKey);
  at::NoGradGuard no_grad;
  if (direct_gradients_.empty()) direct_gradients_.resize(parameters_.size());
  auto& sum = direct_gradients_[index];
  sum = sum.defined() ? sum + gradient.detach() : gradient.detach();
}

bool Unit::has_direct_gradients() const { return !direct_gradients_.empty(); }

void Unit::merge_direct_gradients(std::vector<size_t>& indices, std::vector<at::Tensor>& gradients) {
  Below below(dtensor::kDTensorKey);
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < direct_gradients_.size(); ++i) {
    auto& direct = direct_gradients_[i];
    if (!direct.defined()) continue;
    size_t k = 0;
    while (k < indices.size() && indices[k] != i) ++k;
    if (k == indices.size()) {
      indices.push_back(i);
      gradients.push_back(direct);
    } else {
      gradients[k] = gradients[k].defined() ? gradients[k] + direct : direct;
    }
  }
  direct_gradients_.clear();
}

}  // namespace hsdp
