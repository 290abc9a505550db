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

double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type) {
  if (!(norm_type > 0)) {
    dtensor::raise<dtensor::ValueError>("clip_grad_norm_", "norm type ", norm_type, ", expected > 0 or infinity");
  }
  if (!(max_norm >= 0)) {
    dtensor::raise<dtensor::ValueError>("clip_grad_norm_", "max_norm ", max_norm, ", expected >= 0");
  }
  at::NoGradGuard no_grad;
  dtensor::ShardedRulesGuard sharded;
  // Shards may be kept on the host beside whole gradients on the device.
  std::map<std::pair<bool, std::string>, std::vector<at::Tensor>> groups;
  for (auto& parameter : parameters) {
    const auto gradient = parameter.grad();
    if (!gradient.defined()) continue;
    groups[{!dtensor::DTensor::is_dtensor(gradient), gradient.device().str()}].push_back(gradient);
  }
  if (groups.empty()) return 0;
  std::vector<at::Tensor> norms;
  for (auto& [kind, group] : groups) {
    auto values = at::_foreach_norm(group, norm_type);
    const auto stacked = at::stack(values);  // reduces partial norms, all of them at once
    norms.push_back(norms.empty() ? stacked : stacked.to(norms.front().device()));
  }
  auto all = at::cat(norms);
  const double total = (std::isinf(norm_type) ? all.max() : at::linalg_vector_norm(all, norm_type)).item<double>();
  const double coefficient = max_norm / (total + 1e-6);
  // As the stock function does, a non-finite norm is multiplied in rather than skipped.
  if (!(coefficient >= 1)) {
    for (auto& [kind, group] : groups) at::_foreach_mul_(group, coefficient);
  }
  return total;
}

}  // namespace hsdp
