// The gradient half of Unit: full gradients -> reduce-scatter -> DTensors in `.grad`.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "dtensor/dispatch.h"
#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "hsdp/host.h"
#include "hsdp/shard_packing.h"
#include "hsdp/storage_memory.h"
#include "hsdp/unit.h"

namespace hsdp {
namespace {

using Below = c10::impl::ExcludeDispatchKeyGuard;

// What to divide by before a reduction and after it, so that neither the gradients nor their sum leave the range of
// fp16: powers of two up to about the square root of the whole.
std::pair<double, double> split_divisor(double divisor, at::ScalarType dtype) {
  if (dtype != at::kHalf) return {1, divisor};
  double before = 1;
  while (std::fmod(divisor, before) == 0 && divisor / before > before) before *= 2;
  return {before, divisor / before};
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

// Whether nobody else can see this tensor or its memory. Many gradients are views, such as the transpose of a product,
// whose base nobody but they themselves knows.
bool is_sole(const at::Tensor& tensor) {
  const bool is_view = tensor.is_view();
  if (is_view && tensor._base().use_count() > 1) return false;
  return tensor.use_count() == 1 && tensor.storage().use_count() == (is_view ? 2 : 1);
}

// Adds full gradients, by parameter, to a list that is about to be reduced.
void merge(std::vector<at::Tensor> more, std::vector<size_t>& indices, std::vector<at::Tensor>& gradients) {
  Below below(dtensor::kDTensorKey);
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < more.size(); ++i) {
    if (!more[i].defined()) continue;
    const auto k = static_cast<size_t>(std::find(indices.begin(), indices.end(), i) - indices.begin());
    if (k == indices.size()) {
      indices.push_back(i);
      gradients.push_back(std::move(more[i]));
    } else {
      gradients[k] = gradients[k].defined() ? gradients[k] + more[i] : std::move(more[i]);
    }
  }
}

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

double Unit::divide_factor() const {
  return settings_.gradient_divide_factor.value_or(static_cast<double>(data_parallel_size()));
}

std::optional<Reduction> Unit::start_reduction(const std::vector<size_t>& indices, std::vector<at::Tensor> gradients) {
  Below below(dtensor::kDTensorKey);
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  Reduction reduction;
  // Gradients of one dtype, which are all sharded or all whole, share a buffer.
  struct Bucket {
    at::ScalarType dtype;
    bool sharded;
    std::vector<size_t> members;  // positions in `indices`
    int64_t length = 0;           // elements of the buffer
  };
  std::vector<Bucket> buckets;
  const auto& policy = context_->mixed_precision;
  for (size_t k = 0; k < indices.size(); ++k) {
    auto& gradient = gradients[k];
    if (!gradient.defined()) continue;
    const auto& parameter = parameters_[indices[k]];
    if (!gradient.sizes().equals(parameter.layout().sizes()) || gradient.layout() != at::kStrided) {
      dtensor::raise<dtensor::NotSupportedError>("reduce_scatter", "parameter \"", parameter.name(), "\" received a ",
                                                 gradient.layout(), " gradient of shape ", gradient.sizes(),
                                                 ", expected a dense one of shape ", parameter.layout().sizes());
    }
    if (gradient.requires_grad()) gradient = gradient.detach();
    const auto dtype = policy.reduce_dtype.value_or(gradient.scalar_type());
    const auto sharded = is_sharded(indices[k]);
    auto bucket = std::find_if(buckets.begin(), buckets.end(),
                               [&](const Bucket& one) { return one.dtype == dtype && one.sharded == sharded; });
    if (bucket == buckets.end()) bucket = buckets.insert(bucket, {dtype, sharded, {}, 0});
    bucket->members.push_back(k);
    bucket->length += c10::multiply_integers(parameter.layout().padded_local_sizes());
  }
  if (buckets.empty()) return std::nullopt;
  std::vector<TensorPair> pairs;
  for (auto& bucket : buckets) {
    const auto [before, after] = split_divisor(divide_factor(), bucket.dtype);
    const auto place = [&](size_t k, int64_t offset) {
      reduction.parts.push_back({indices[k], reduction.buffers.size(), offset});
      return offset + c10::multiply_integers(parameters_[indices[k]].layout().padded_local_sizes());
    };
    if (data_parallel_size() == 1) {
      // Nothing to reduce: each gradient becomes the shard itself, if nobody else can see it.
      for (auto k : bucket.members) {
        auto gradient = std::move(gradients[k]);
        const bool sole = is_sole(gradient) && gradient.is_contiguous() && gradient.scalar_type() == bucket.dtype;
        place(k, 0);
        reduction.divisors.push_back(before * after);
        reduction.buffers.push_back(sole ? std::move(gradient)
                                         : gradient.to(bucket.dtype, false, true, at::MemoryFormat::Contiguous));
      }
      continue;
    }
    const auto options = gradients[bucket.members.front()].options().dtype(bucket.dtype).memory_format(std::nullopt);
    auto buffer = at::empty({bucket.length}, options);
    if (!bucket.sharded) {
      int64_t offset = 0;
      for (auto k : bucket.members) {
        auto gradient = std::move(gradients[k]);
        buffer.narrow(0, offset, gradient.numel()).view(gradient.sizes()).copy_(gradient);
        offset = place(k, offset);
      }
      if (before != 1) buffer.div_(before);
      if (shard_size() > 1) {
        auto& group = context_->mesh->communicator(context_->shard_axis());
        reduction.works.push_back(group.all_reduce(buffer, dtensor::ReduceOp::sum, {"all_reduce", name_}));
      }
      reduction.buffers.push_back(std::move(buffer));
      reduction.divisors.push_back(after);
      continue;
    }
    const bool packs = context_->transport->packs();
    at::Tensor rows;
    if (packs) rows = empty_buffer({shard_size(), bucket.length}, options);
    int64_t offset = 0;
    for (auto k : bucket.members) {
      auto gradient = std::move(gradients[k]);
      const auto& layout = parameters_[indices[k]].layout();
      const auto dim = *parameters_[indices[k]].shard_dim();
      const auto begin = offset;
      offset = place(k, offset);
      const auto length = offset - begin;
      if (packs) {
        pack_rows(rows.narrow(1, begin, length), gradient, layout, dim);
        continue;
      }
      const bool fits = dim == 0 && before == 1 && gradient.is_contiguous() && gradient.scalar_type() == bucket.dtype &&
                        gradient.numel() == shard_size() * length;
      auto full = fits ? gradient.view({-1}) : at::empty({shard_size() * length}, options);
      if (!fits) pack_rows(full.view({shard_size(), length}), gradient, layout, dim);
      if (before != 1) full.div_(before);
      pairs.push_back({std::move(full), buffer.narrow(0, begin, length)});
    }
    if (packs) {
      if (before != 1) rows.div_(before);
      pairs.push_back({rows.view({-1}), buffer});
    }
    reduction.buffers.push_back(std::move(buffer));
    reduction.divisors.push_back(after);
  }
  if (!pairs.empty()) reduction.works.push_back(context_->transport->reduce_scatter(pairs, {"reduce_scatter", name_}));
  if (reduction.works.empty() && advance_reduction(reduction) == Next::kept) return std::nullopt;
  return reduction;
}

Unit::Next Unit::advance_reduction(Reduction& reduction) {
  Below below(dtensor::kDTensorKey);
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  if (reduction.all_reducing || context_->replicate_size() == 1) return Next::finish;
  for (auto& work : std::exchange(reduction.works, {})) work->wait();
  if (!settings_.all_reduce) {
    kept_shards_.resize(parameters_.size());
    for (auto& part : reduction.parts) {
      auto& kept = kept_shards_[part.index];
      const auto shard = shard_of(reduction, part);
      kept = kept.defined() ? kept.add_(shard) : shard;
    }
    return Next::kept;
  }
  for (auto& part : reduction.parts) {
    if (kept_shards_.empty() || !kept_shards_[part.index].defined()) continue;
    shard_of(reduction, part).add_(std::exchange(kept_shards_[part.index], {}));
  }
  auto& group = context_->mesh->communicator(0);
  for (auto& buffer : reduction.buffers) {
    reduction.works.push_back(group.all_reduce(buffer, dtensor::ReduceOp::sum, {"all_reduce", name_}));
  }
  reduction.all_reducing = true;
  return Next::all_reduce;
}

std::optional<Reduction> Unit::start_kept_reduction() {
  if (!settings_.all_reduce || kept_shards_.empty()) return std::nullopt;
  Below below(dtensor::kDTensorKey);
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  Reduction reduction;
  for (size_t i = 0; i < kept_shards_.size(); ++i) {
    if (!kept_shards_[i].defined()) continue;
    reduction.parts.push_back({i, reduction.buffers.size(), 0});
    reduction.buffers.push_back(std::move(kept_shards_[i]));
    reduction.divisors.push_back(split_divisor(divide_factor(), reduction.buffers.back().scalar_type()).second);
  }
  kept_shards_.clear();
  if (reduction.parts.empty()) return std::nullopt;
  advance_reduction(reduction);
  return reduction;
}

at::Tensor Unit::shard_of(const Reduction& reduction, const Reduction::Part& part) const {
  const auto length = c10::multiply_integers(parameters_[part.index].layout().padded_local_sizes());
  return reduction.buffers[part.buffer].narrow(0, part.offset, length);
}

std::vector<size_t> Unit::finish_reduction(Reduction reduction) {
  Below below(dtensor::kDTensorKey);
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  for (auto& work : reduction.works) work->wait();
  for (size_t i = 0; i < reduction.buffers.size(); ++i) {
    auto& buffer = reduction.buffers[i];
    if (settings_.all_reduce_hook) {
      const auto line = buffer.view({-1});
      const UserCode user;
      settings_.all_reduce_hook(line);
    }
    if (reduction.divisors[i] != 1) buffer.div_(reduction.divisors[i]);
    if (context_->offload.to_host) buffer = buffer.to(kHost);
  }
  std::vector<size_t> landed;
  for (auto& part : reduction.parts) {
    if (land(part, reduction.buffers[part.buffer], reduction.task)) landed.push_back(part.index);
  }
  return landed;
}

// Whether the gradient is in place; what has hooks waits for the end of the backward.
bool Unit::land(const Reduction::Part& part, const at::Tensor& buffer, int64_t task) {
  const auto index = part.index;
  auto& parameter = parameters_[index];
  if (!parameter.tensor().requires_grad()) return false;  // Switched off since the forward: torch drops it as well.
  const auto& layout = parameter.layout();
  const auto& box = layout.local();
  const auto padded = layout.padded_local_sizes();
  auto local = buffer;
  if (!buffer.sizes().equals(box.sizes)) {
    // Padding lies behind the elements, but for dims other than 0, where it lies between them.
    const bool between = parameter.shard_dim().value_or(0) != 0;
    local = buffer.as_strided(box.sizes, dtensor::row_major_strides(between ? padded : box.sizes),
                              buffer.storage_offset() + part.offset);
    if (between) local = local.contiguous();
  }
  const auto dtype = context_->mixed_precision.grad_dtype.value_or(layout.dtype());
  if (local.scalar_type() != dtype) local = local.to(dtype);
  if (!has_hooks(parameter.tensor())) {
    accumulate(index, local);
    return true;
  }
  // Other forwards of this backward, or functions that were given the parameter itself, may have more to come.
  for (auto& awaiting : awaiting_hooks_) {
    if (awaiting.index != index || awaiting.task != task) continue;
    awaiting.local.add_(local);
    return false;
  }
  awaiting_hooks_.push_back({index, task, local});
  return false;
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

void Unit::merge_direct_gradients(std::vector<size_t>& indices, std::vector<at::Tensor>& gradients) {
  merge(std::exchange(direct_gradients_, {}), indices, gradients);
}

void Unit::keep_unsynced(const std::vector<size_t>& indices, std::vector<at::Tensor> gradients) {
  Below below(dtensor::kDTensorKey);
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  unsynced_gradients_.resize(parameters_.size());
  for (size_t k = 0; k < indices.size(); ++k) {
    auto gradient = std::move(gradients[k]);
    if (!gradient.defined()) continue;
    const auto dtype = context_->mixed_precision.reduce_dtype.value_or(gradient.scalar_type());
    auto& sum = unsynced_gradients_[indices[k]];
    if (sum.defined()) {
      sum.add_(gradient.detach());
    } else if (is_sole(gradient) && gradient.is_non_overlapping_and_dense() && gradient.scalar_type() == dtype) {
      sum = std::move(gradient);
    } else {
      // What somebody else can see must not be added to.
      sum = gradient.detach().to(dtype, /*non_blocking=*/false, /*copy=*/true);
    }
  }
}

void Unit::merge_unsynced(std::vector<size_t>& indices, std::vector<at::Tensor>& gradients) {
  merge(std::exchange(unsynced_gradients_, {}), indices, gradients);
}

}  // namespace hsdp
