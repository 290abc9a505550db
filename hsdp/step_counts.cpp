#include "hsdp/step_counts.h"

#include <ATen/ATen.h>
#include <torch/optim/adamw.h>

#include <cmath>
#include <unordered_set>
#include <utility>

namespace hsdp {
namespace {

torch::optim::AdamWParamState* adamw_state(const torch::optim::Optimizer& optimizer, const void* parameter) {
  const auto found = optimizer.state().find(const_cast<void*>(parameter));
  if (found == optimizer.state().end()) return nullptr;
  return dynamic_cast<torch::optim::AdamWParamState*>(found->second.get());
}

}  // namespace

std::vector<at::Tensor> StepCounts::values(at::Device device, const std::vector<at::Tensor>& parameters,
                                           const std::vector<int64_t>& steps) {
  std::vector<Count*> counts, fresh;
  std::unordered_set<const Count*> seen;
  int64_t first = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    auto& count = counts_[parameters[i].unsafeGetTensorImpl()];
    counts.push_back(&count);
    if (count.row.defined() && count.row.device() == device) continue;
    if (fresh.empty()) first = steps[i];
    if (seen.insert(&count).second) fresh.push_back(&count);
  }
  if (!fresh.empty()) {
    const auto row = at::full({static_cast<int64_t>(fresh.size())}, static_cast<double>(first),
                              at::dtype(at::kFloat).device(device));
    const auto values = row.unbind();
    for (size_t i = 0; i < fresh.size(); ++i) {
      const auto former = std::exchange(*fresh[i], {row, values[i], first});
      if (!former.row.defined()) continue;
      values[i].copy_(former.value);
      fresh[i]->known = former.known;
    }
  }
  std::vector<at::Tensor> values;
  for (size_t i = 0; i < counts.size(); ++i) {
    auto& count = *counts[i];
    if (count.known != steps[i]) {
      count.value.fill_(static_cast<double>(steps[i]));
      count.known = steps[i];
    }
    values.push_back(count.value);
  }
  return values;
}

bool StepCounts::is_current(at::Device device, const at::Tensor& parameter, int64_t steps) const {
  const auto found = counts_.find(parameter.unsafeGetTensorImpl());
  if (found == counts_.end() || !found->second.row.defined()) return false;
  return found->second.row.device() == device && found->second.known == steps;
}

std::vector<StepCounts::Count*> StepCounts::add_on_device(const std::vector<FusedBatch>& batches, int64_t by) {
  std::vector<Count*> counts;
  std::unordered_set<const Count*> seen;
  std::unordered_map<const void*, std::vector<Count*>> rows;
  for (const auto& batch : batches) {
    for (const auto& parameter : batch.parameters()) {
      auto& count = counts_.at(parameter.unsafeGetTensorImpl());
      if (!seen.insert(&count).second) continue;
      counts.push_back(&count);
      rows[count.row.unsafeGetTensorImpl()].push_back(&count);
    }
  }
  for (const auto& [key, members] : rows) {
    auto row = members.front()->row;
    if (static_cast<int64_t>(members.size()) == row.numel()) {
      row.add_(by);
      continue;
    }
    std::vector<at::Tensor> values;
    for (const auto* count : members) values.push_back(count->value);
    at::_foreach_add_(values, by);
  }
  return counts;
}

void StepCounts::add(const std::vector<FusedBatch>& batches, int64_t by) {
  for (auto* count : add_on_device(batches, by)) count->known += by;
}

void StepCounts::record_step(const std::vector<FusedBatch>& batches) {
  recorded_ = true;
  add_on_device(batches, 1);
}

void StepCounts::read(const torch::optim::Optimizer& optimizer) {
  std::unordered_map<const void*, at::Tensor> read;
  for (auto& [parameter, count] : counts_) {
    auto* state = adamw_state(optimizer, parameter);
    if (state == nullptr || state->step() != count.known || !count.row.defined()) continue;
    auto& row = read[count.row.unsafeGetTensorImpl()];
    if (!row.defined()) row = count.row.to(kHost);
    const auto place = count.value.storage_offset() - count.row.storage_offset();
    count.known = std::lround(row.const_data_ptr<float>()[place]);
    state->step(count.known);
  }
}

void StepCounts::write(const torch::optim::Optimizer& optimizer) {
  for (auto& [parameter, count] : counts_) {
    const auto* state = adamw_state(optimizer, parameter);
    if (state == nullptr || state->step() == count.known || !count.row.defined()) continue;
    count.value.fill_(static_cast<double>(state->step()));
    count.known = state->step();
  }
}

}  // namespace hsdp
