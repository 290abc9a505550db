#include "hsdp/checkpoint/checkpointed_tensors.h"

#include <algorithm>

#include "dtensor/dtensor.h"
#include "dtensor/error.h"

namespace hsdp {

void check_model(const char* where, const TrainingState& state) {
  if (!state.model) {
    dtensor::raise<dtensor::ValueError>(where, "the training state has no model, expected model.core() of one");
  }
  mesh_of(*state.model, where);
}

CheckpointedTensor checkpointed(const char* where, std::string name, const at::Tensor& tensor) {
  const auto* impl = dtensor::distributed_impl(tensor);
  if (impl == nullptr) {
    std::vector<int64_t> origin(static_cast<size_t>(tensor.dim()), 0);
    return {std::move(name), tensor.detach(), tensor.sizes().vec(), {origin, tensor.sizes().vec()}, nullptr};
  }
  if (impl->layout() == nullptr || impl->layout()->is_partial()) {
    dtensor::raise<dtensor::NotSupportedError>(where, "tensor \"", name, "\" is ", dtensor::describe(tensor),
                                               ", expected one that is sharded or replicated, with a layout");
  }
  const auto& layout = impl->layout();
  return {std::move(name), impl->local(), layout->sizes().vec(), layout->local(), layout};
}

std::string optimizer_key(const std::string& parameter, const std::string& name) {
  return "state." + parameter + "." + name;
}

ParameterNames parameter_names(const std::vector<RegisteredTensor>& registered) {
  ParameterNames names;
  for (const auto& entry : registered) names.emplace(entry.tensor.unsafeGetTensorImpl(), entry.names.front());
  return names;
}

ReplicaChoice::ReplicaChoice(const dtensor::DeviceMesh& mesh) : mesh_(mesh), bytes_(static_cast<size_t>(mesh.size())) {}

std::vector<int64_t> ReplicaChoice::choose(const CheckpointedTensor& tensor) {
  const auto ndim = static_cast<size_t>(mesh_.ndim());
  const auto replicated = [&](size_t axis) {
    return tensor.layout == nullptr || tensor.layout->placements()[axis].is_replicate();
  };
  int64_t replicas = 1;
  for (size_t axis = 0; axis < ndim; ++axis) replicas *= replicated(axis) ? mesh_.size(static_cast<int64_t>(axis)) : 1;
  if (replicas == 1) return mesh_.coordinate();
  const auto replica_of = [&](int64_t rank) {
    const auto coordinate = mesh_.coordinate_of(rank);
    int64_t replica = 0;
    for (size_t axis = 0; axis < ndim; ++axis) {
      if (replicated(axis)) replica = replica * mesh_.size(static_cast<int64_t>(axis)) + coordinate[axis];
    }
    return static_cast<size_t>(replica);
  };
  // A replica has as much to do as the busiest of its ranks.
  std::vector<int64_t> loads(static_cast<size_t>(replicas), 0);
  for (int64_t rank = 0; rank < mesh_.size(); ++rank) {
    auto& load = loads[replica_of(rank)];
    load = std::max(load, bytes_[static_cast<size_t>(rank)]);
  }
  const auto best = static_cast<size_t>(std::min_element(loads.begin(), loads.end()) - loads.begin());
  const auto elements = tensor.layout ? c10::multiply_integers(tensor.layout->padded_local_sizes())
                                      : c10::multiply_integers(tensor.sizes);
  auto chosen = mesh_.coordinate();
  for (int64_t rank = 0; rank < mesh_.size(); ++rank) {
    if (replica_of(rank) != best) continue;
    bytes_[static_cast<size_t>(rank)] += elements * static_cast<int64_t>(tensor.local.element_size());
    for (size_t axis = 0; axis < ndim; ++axis) {
      if (replicated(axis)) chosen[axis] = mesh_.coordinate_of(rank)[axis];
    }
  }
  return chosen;
}

}  // namespace hsdp
