#include "hsdp/clip.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>

#include "dtensor/dispatch.h"
#include "dtensor/dtensor.h"
#include "dtensor/error.h"

namespace hsdp {

namespace {

// By kind and device: shards may be kept on the host beside whole gradients on the device.
using Groups = std::map<std::pair<bool, std::string>, std::vector<at::Tensor>>;

struct Norm {
  at::Tensor total;  // 0-dim; undefined where nothing has a gradient
  Groups groups;
};

Norm norm_of(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type) {
  if (!(norm_type > 0)) {
    dtensor::raise<dtensor::ValueError>("clip_grad_norm_", "norm type ", norm_type, ", expected > 0 or infinity");
  }
  if (!(max_norm >= 0)) {
    dtensor::raise<dtensor::ValueError>("clip_grad_norm_", "max_norm ", max_norm, ", expected >= 0");
  }
  Norm norm;
  for (auto& parameter : parameters) {
    const auto gradient = parameter.grad();
    if (!gradient.defined()) continue;
    norm.groups[{!dtensor::DTensor::is_dtensor(gradient), gradient.device().str()}].push_back(gradient);
  }
  if (norm.groups.empty()) return norm;
  std::vector<at::Tensor> norms;
  for (auto& [kind, group] : norm.groups) {
    auto values = at::_foreach_norm(group, norm_type);
    const auto stacked = at::stack(values);  // reduces partial norms, all of them at once
    norms.push_back(norms.empty() ? stacked : stacked.to(norms.front().device()));
  }
  const auto all = at::cat(norms);
  norm.total = std::isinf(norm_type) ? all.max() : at::linalg_vector_norm(all, norm_type);
  return norm;
}

// As the stock function does, a non-finite norm is multiplied in rather than skipped.
template <class Number>
Number coefficient_of(const Number& total, double max_norm) {
  return max_norm / (total + 1e-6);
}

}  // namespace

double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type) {
  at::NoGradGuard no_grad;
  dtensor::ShardedRulesGuard sharded;
  const auto norm = norm_of(parameters, max_norm, norm_type);
  if (!norm.total.defined()) return 0;
  const double total = norm.total.item<double>();
  const double coefficient = coefficient_of(total, max_norm);
  if (!(coefficient >= 1)) {
    for (const auto& [kind, group] : norm.groups) at::_foreach_mul_(group, coefficient);
  }
  return total;
}

at::Tensor clip_grad_norm_on_device_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type) {
  at::NoGradGuard no_grad;
  dtensor::ShardedRulesGuard sharded;
  const auto norm = norm_of(parameters, max_norm, norm_type);
  if (!norm.total.defined()) return at::zeros({}, at::kDouble);
  const auto total = norm.total.to(at::kDouble);
  const auto coefficient = coefficient_of(total, max_norm).clamp_max(1);
  for (const auto& [kind, group] : norm.groups) {
    const auto here = coefficient.to(group.front().device());
    for (const auto& gradient : group) gradient.mul_(here);
  }
  return total;
}

}  // namespace hsdp
