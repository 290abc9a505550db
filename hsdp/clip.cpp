#include "hsdp/clip.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>

#include "dtensor/dispatch.h"
#include "dtensor/dtensor.h"
#include "dtensor/error.h"

namespace hsdp {

double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type) {
  if (!(norm_type > 0)) {
    dtensor::raise<dtensor::ValueError>("clip_grad_norm_", "norm type ", norm_type, ", expected > 0 or infinity");
  }
  if (!(max_norm >= 0)) {
    dtensor::raise<dtensor::ValueError>("clip_grad_norm_", "max_norm ", max_norm, ", expected >= 0");
  }
  at::NoGradGuard no_grad;
  dtensor::ShardedRulesGuard sharded;
  std::vector<at::Tensor> gradients, distributed, plain;
  for (auto& parameter : parameters) {
    if (!parameter.grad().defined()) continue;
    gradients.push_back(parameter.grad());
    (dtensor::DTensor::is_dtensor(gradients.back()) ? distributed : plain).push_back(gradients.back());
  }
  if (gradients.empty()) return 0;
  std::vector<at::Tensor> norms;
  for (auto* group : {&distributed, &plain}) {
    if (group->empty()) continue;
    auto values = at::_foreach_norm(*group, norm_type);
    norms.push_back(at::stack(values));  // reduces partial norms, all of them at once
  }
  auto all = at::cat(norms);
  const double total = (std::isinf(norm_type) ? all.max() : at::linalg_vector_norm(all, norm_type)).item<double>();
  const double coefficient = max_norm / (total + 1e-6);
  // As the stock function does, a non-finite norm is multiplied in rather than skipped.
  if (!(coefficient >= 1)) {
    for (auto* group : {&distributed, &plain}) {
      if (!group->empty()) at::_foreach_mul_(*group, coefficient);
    }
  }
  return total;
}

}  // namespace hsdp
