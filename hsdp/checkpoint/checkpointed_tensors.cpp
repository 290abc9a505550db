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

// The load of a replica is that of its ranks at position 0 of the other axes: what lies there is the largest box.
std::vector<int64_t> ReplicaChoice::choose(const CheckpointedTensor& tensor) {
  const auto ndim = static_cast<size_t>(mesh_.ndim());
  const auto replicated = [&](size_t axis) {
    return tensor.layout == nullptr || tensor.layout->placements()[axis].is_replicate();
  };
  bool several = false;
  for (size_t axis = 0; axis < ndim; ++axis) several |= replicated(axis);
  if (!several) return mesh_.coordinate();
  const auto elements = tensor.layout ? c10::multiply_integers(tensor.layout->padded_local_sizes())
                                      : c10::multiply_integers(tensor.sizes);
  const auto bytes = elements * static_cast<int64_t>(tensor.local.element_size());
  int64_t best = -1;
  for (int64_t rank = 0; rank < mesh_.size(); ++rank) {
    const auto coordinate = mesh_.coordinate_of(rank);
    bool candidate = true;
    for (size_t axis = 0; axis < ndim; ++axis) candidate &= replicated(axis) || coordinate[axis] == 0;
    if (!candidate) continue;
    if (best < 0 || bytes_[static_cast<size_t>(rank)] < bytes_[static_cast<size_t>(best)]) best = rank;
  }
  auto coordinate = mesh_.coordinate_of(best);
  bytes_[static_cast<size_t>(best)] += bytes;
  for (size_t axis = 0; axis < ndim; ++axis) {
    if (!replicated(axis)) coordinate[axis] = mesh_.coordinate()[axis];
  }
  return coordinate;
}

}  // namespace hsdp
