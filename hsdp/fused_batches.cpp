#include "hsdp/fused_batches.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <string>
#include <utility>

#include "dtensor/dtensor.h"
#include "dtensor/error.h"

namespace hsdp {
namespace {

using dtensor::distributed_impl;
using dtensor::raise;

std::string named(const at::Tensor& parameter) {
  const auto* impl = distributed_impl(parameter);
  return impl != nullptr ? impl->describe() : c10::str("a parameter of shape ", parameter.sizes());
}

bool has_kernel(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf;
}

void check(const char* where, const at::Tensor& parameter, const at::Tensor& gradient) {
  constexpr auto hint = "; use the class of torch::optim";
  const auto& memory = held_part(parameter);
  if (!has_kernel(memory.scalar_type())) {
    raise<dtensor::NotSupportedError>(where, named(parameter), " is of dtype ", memory.scalar_type(),
                                      ", expected Float, Double, BFloat16 or Half", hint);
  }
  if (!memory.is_non_overlapping_and_dense()) {
    raise<dtensor::NotSupportedError>(where, named(parameter), " has strides ", memory.strides(),
                                      ", expected memory without gaps", hint);
  }
  if (gradient.layout() != at::kStrided) {
    raise<dtensor::NotSupportedError>(where, named(parameter), " has a ", gradient.layout(),
                                      " gradient, expected a dense one", hint);
  }
  const auto dtype = held_part(gradient).scalar_type();
  if (dtype != memory.scalar_type()) {
    raise<dtensor::NotSupportedError>(where, named(parameter), " of dtype ", memory.scalar_type(),
                                      " has a gradient of dtype ", dtype, ", expected the same", hint);
  }
  const auto *to = distributed_impl(parameter), *from = distributed_impl(gradient);
  const bool both = to != nullptr && from != nullptr && to->layout() && from->layout();
  if (both ? !to->layout()->same_distribution(*from->layout()) : to != from) {
    raise<dtensor::ValueError>(where, named(parameter), " has a gradient that is ", dtensor::describe(gradient),
                               ", expected one that lies as the parameter does; call zero_grad()");
  }
}

}  // namespace

const at::Tensor& held_part(const at::Tensor& tensor) {
  const auto* impl = distributed_impl(tensor);
  return impl != nullptr ? impl->local() : tensor;
}

void FusedBatch::finish_unscaling() const {
  for (const auto& [original, copy] : copied_) original.copy_(copy);
}

bool lies_like(const at::Tensor& parameter, const at::Tensor& other) {
  if (dtensor::DTensor::is_dtensor(parameter) != dtensor::DTensor::is_dtensor(other)) return false;
  const auto &a = held_part(parameter), &b = held_part(other);
  if (a.device() != b.device() || a.scalar_type() != b.scalar_type() || !a.sizes().equals(b.sizes())) return false;
  for (int64_t dim = 0; dim < a.dim(); ++dim) {
    if (a.size(dim) > 1 && a.stride(dim) != b.stride(dim)) return false;
  }
  return true;
}

at::Tensor state_like(const at::Tensor& parameter, const at::Tensor& state) {
  if (!state.defined()) return at::zeros_like(parameter, {}, at::MemoryFormat::Preserve);
  return lies_like(parameter, state) ? state : at::empty_like(parameter).copy_(state);
}

std::vector<FusedBatch> fused_batches(
    const char* where, const std::vector<torch::optim::OptimizerParamGroup>& groups,
    const std::function<bool(const torch::optim::OptimizerOptions&, const at::Tensor&)>& fresh) {
  std::vector<FusedBatch> batches;
  for (const auto& group : groups) {
    const size_t first = batches.size();
    for (const auto& parameter : group.params()) {
      const auto& gradient = parameter.grad();
      if (!gradient.defined()) continue;
      check(where, parameter, gradient);
      const auto& memory = held_part(parameter);
      const bool is_fresh = fresh(group.options(), parameter);
      auto batch = std::find_if(batches.begin() + static_cast<std::ptrdiff_t>(first), batches.end(), [&](auto& each) {
        return each.fresh_ == is_fresh && each.dtype_ == memory.scalar_type() && each.device_ == memory.device();
      });
      if (batch == batches.end()) {
        batch = batches.emplace(batches.end());
        batch->options_ = &group.options();
        batch->fresh_ = is_fresh;
        batch->dtype_ = memory.scalar_type();
        batch->device_ = memory.device();
      }
      batch->parameters_.push_back(parameter);
      batch->gradients_.push_back(gradient);
      if (lies_like(parameter, gradient)) continue;
      batch->gradients_.back() = at::empty_like(parameter).copy_(gradient);
      batch->copied_.push_back({gradient, batch->gradients_.back()});
    }
  }
  return batches;
}

}  // namespace hsdp
