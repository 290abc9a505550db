#include "hsdp/captured_state.h"

#include <algorithm>
#include <memory>

#include "dtensor/error.h"
#include "dtensor/graph_capture.h"
#include "hsdp/fused_batches.h"

namespace hsdp {
namespace {

bool lie_like(const at::Tensor& parameter, const std::vector<at::Tensor>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [&](const auto& each) { return !each.defined() || lies_like(parameter, each); });
}

}  // namespace

bool CapturedState::takes(const at::Tensor& parameter, const std::vector<at::Tensor>& tensors) const {
  const auto found = parameters_.find(parameter.unsafeGetTensorImpl());
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined() || !lies_like(parameter, tensors[i])) return false;
    if (found == parameters_.end() || !found->second.tensors.at(i).defined()) continue;
    if (!found->second.tensors[i].is_same(tensors[i])) return false;
  }
  return true;
}

void CapturedState::add(const at::Tensor& parameter, const std::vector<at::Tensor>& tensors) {
  auto& recorded = parameters_.try_emplace(parameter.unsafeGetTensorImpl(), Recorded{parameter, tensors}).first->second;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!recorded.tensors[i].defined()) recorded.tensors[i] = tensors[i];
  }
}

template <class State>
void CapturedState::put_back(torch::optim::Optimizer& optimizer) {
  std::erase_if(parameters_, [](const auto& each) { return !lie_like(each.second.parameter, each.second.tensors); });
  for (const auto& [parameter, recorded] : parameters_) {
    auto& slot = optimizer.state()[parameter];
    if (!slot) slot = std::make_unique<State>();
    auto* state = dynamic_cast<State*>(slot.get());
    if (state == nullptr) continue;
    const auto tensors = tensors_of(*state);
    for (size_t i = 0; i < tensors.size(); ++i) {
      auto tensor = recorded.tensors[i];
      if (!tensor.defined() || tensor.is_same(*tensors[i])) continue;
      if (tensors[i]->defined()) {
        tensor.copy_(*tensors[i]);
      } else {
        tensor.zero_();
      }
      *tensors[i] = tensor;
    }
  }
}

template void CapturedState::put_back<torch::optim::AdamWParamState>(torch::optim::Optimizer& optimizer);
template void CapturedState::put_back<torch::optim::SGDParamState>(torch::optim::Optimizer& optimizer);

void CapturedState::check_not_capturing(const char* where, const char* call) const {
  for (const auto& [parameter, recorded] : parameters_) {
    if (!dtensor::is_capturing(held_part(recorded.parameter).device())) continue;
    dtensor::raise<dtensor::NotSupportedError>(where, call,
                                               " while a graph is captured, expected outside, because the "
                                               "host waits for what replays have counted");
  }
}

}  // namespace hsdp
