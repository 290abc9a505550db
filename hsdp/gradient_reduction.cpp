// The reducing half of Unit: full gradients -> packed, reduce-scattered, all-reduced. gradient_landing.cpp goes on.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "dtensor/collective.h"
#include "dtensor/dispatch.h"
#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "hsdp/comm_streams.h"
#include "hsdp/host.h"
#include "hsdp/kernels/gradient_kernels.h"
#include "hsdp/launch/device.h"
#include "hsdp/profiling/span.h"
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

// Copies full gradients into the rows that a reduce-scatter takes, divided beforehand.
class GradientPacking {
 public:
  explicit GradientPacking(double divisor) : divisor_(divisor) {}

  void add(const at::Tensor& rows, at::Tensor gradient, const dtensor::Layout& layout, int64_t dim) {
    if (dim != 0 || !gradient.is_contiguous() || !kernels::has_kernel(gradient.scalar_type()) ||
        !kernels::has_kernel(rows.scalar_type())) {
      pack_rows(rows, gradient, layout, dim);
      if (divisor_ != 1) rows.div_(divisor_);
      return;
    }
    // On the host one at a time: each gradient is freed before the next is packed.
    const bool fits = packings_.empty() || packings_.front().whole.scalar_type() == gradient.scalar_type();
    if (!fits || rows.device().type() == kHost) run();
    packings_.push_back({std::move(gradient), rows});
    if (rows.device().type() == kHost) run();
  }

  void run() {
    if (!packings_.empty()) kernels::pack_gradients(packings_, divisor_);
    packings_.clear();
  }

 private:
  double divisor_;
  std::vector<kernels::Packing> packings_;
};

/// Stands behind a reduction: what it was given is free when it is over, whoever still holds the tensors.
class InputRelease final : public dtensor::Work {
 public:
  explicit InputRelease(std::vector<at::Tensor> inputs) : inputs_(std::move(inputs)) {}
  void wait() override {
    for (const auto& input : std::exchange(inputs_, {})) dtensor::free_buffer(input);
  }
  bool is_completed() override { return true; }
  bool is_on_stream() const override { return true; }

 private:
  std::vector<at::Tensor> inputs_;
};

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
  const Span span("post_backward_reduce", name_);
  std::vector<TensorPair> pairs;
  std::vector<at::Tensor> whole_buffers, inputs;
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
      if (shard_size() > 1) whole_buffers.push_back(buffer);
      reduction.buffers.push_back(std::move(buffer));
      reduction.divisors.push_back(after);
      continue;
    }
    const bool packs = context_->transport->packs();
    at::Tensor rows;
    if (packs) rows = empty_buffer({shard_size(), bucket.length}, options);
    int64_t offset = 0;
    GradientPacking packing(before);
    for (auto k : bucket.members) {
      auto gradient = std::move(gradients[k]);
      const auto& layout = parameters_[indices[k]].layout();
      const auto dim = *parameters_[indices[k]].shard_dim();
      const auto begin = offset;
      offset = place(k, offset);
      const auto length = offset - begin;
      if (packs) {
        packing.add(rows.narrow(1, begin, length), std::move(gradient), layout, dim);
        continue;
      }
      const bool fits = dim == 0 && before == 1 && gradient.is_contiguous() && gradient.scalar_type() == bucket.dtype &&
                        gradient.numel() == shard_size() * length;
      auto full = fits ? gradient.view({-1}) : at::empty({shard_size() * length}, options);
      if (!fits) packing.add(full.view({shard_size(), length}), std::move(gradient), layout, dim);
      pairs.push_back({std::move(full), buffer.narrow(0, begin, length)});
    }
    packing.run();
    if (packs) {
      pairs.push_back({rows.view({-1}), buffer});
      inputs.push_back(std::move(rows));
    }
    reduction.buffers.push_back(std::move(buffer));
    reduction.divisors.push_back(after);
  }
  const auto* streams = this->streams();
  if (streams != nullptr) reduction.home = current_stream(device());
  if (!pairs.empty() || !whole_buffers.empty()) {
    try {
      const OnStream on_reduce(streams != nullptr ? streams->reduce_scatter() : nullptr);
      for (const auto& buffer : whole_buffers) {
        auto& group = context_->mesh->communicator(context_->shard_axis());
        reduction.works.push_back(group.all_reduce(buffer, dtensor::ReduceOp::sum, {"all_reduce", name_}));
      }
      if (!pairs.empty()) {
        reduction.works.push_back(context_->transport->reduce_scatter(pairs, {"reduce_scatter", name_}));
        if (!inputs.empty()) reduction.works.push_back(std::make_shared<InputRelease>(std::move(inputs)));
      }
    } catch (...) {
      // What has started may still be at work on memory that goes away now.
      if (streams != nullptr) order_after(*reduction.home, *streams->reduce_scatter());
      throw;
    }
  }
  if (reduction.works.empty() && advance_reduction(reduction) == Next::kept) return std::nullopt;
  return reduction;
}

Unit::Next Unit::advance_reduction(Reduction& reduction) {
  Below below(dtensor::kDTensorKey);
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  if (reduction.all_reducing || context_->replicate_size() == 1) return Next::finish;
  // Whether what is to be reduced further is ready where the reduce-scatter ran.
  const bool on_stream = !reduction.works.empty() && std::all_of(reduction.works.begin(), reduction.works.end(),
                                                                 [](const auto& work) { return work->is_on_stream(); });
  for (auto& work : std::exchange(reduction.works, {})) work->wait();
  if (reduction.home) order_after(*reduction.home, current_stream(device()));
  if (!settings_.all_reduce) {
    kept_shards_.resize(parameters_.size());
    for (auto& part : reduction.parts) {
      auto& kept = kept_shards_[part.index];
      const auto shard = shard_of(reduction, part);
      kept = kept.defined() ? kept.add_(shard) : shard;
    }
    return Next::kept;
  }
  bool changed = !on_stream;
  for (auto& part : reduction.parts) {
    if (kept_shards_.empty() || !kept_shards_[part.index].defined()) continue;
    shard_of(reduction, part).add_(std::exchange(kept_shards_[part.index], {}));
    changed = true;
  }
  const auto is_kept = [](const at::Tensor& shard) { return shard.defined(); };
  if (std::none_of(kept_shards_.begin(), kept_shards_.end(), is_kept)) kept_shards_.clear();
  auto& group = context_->mesh->communicator(0);
  const auto* streams = this->streams();
  // What the reduce-scatter left need not wait for what has been computed since.
  std::optional<c10::Stream> earlier;
  if (streams != nullptr && !changed) earlier = *streams->reduce_scatter();
  const OnStream on_all_reduce(streams != nullptr ? streams->all_reduce() : nullptr, earlier);
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
