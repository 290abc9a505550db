#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "dtensor/layout.h"
#include "hsdp/checkpoint/optimizer_state.h"
#include "hsdp/checkpoint/training_state.h"
#include "hsdp/registered_tensors.h"

namespace hsdp {

/// A tensor as a checkpoint sees it: a name, and the box of it that this rank holds.
struct CheckpointedTensor {
  std::string name;
  /// Below dispatch: row-major values of the box, or a meta tensor.
  at::Tensor local;
  std::vector<int64_t> sizes;
  dtensor::Box box;
  /// Null for a tensor that every rank of the mesh has whole.
  std::shared_ptr<const dtensor::Layout> layout;
};

/// Throws ValueError where there is no model, StateError where it lies on a mesh that cannot communicate.
void check_model(const char* where, const TrainingState& state);

/// What this rank has of a tensor. Throws NotSupportedError for a distributed tensor that is partial or was made
/// without a layout.
CheckpointedTensor checkpointed(const char* where, std::string name, const at::Tensor& tensor);

/// Keys of the optimizer's tensors: `state.<parameter>.<name>`.
std::string optimizer_key(const std::string& parameter, const std::string& name);

/// Names of a module's parameters, and of those of an optimizer's tensors: of tied ones the first.
ParameterNames parameter_names(const std::vector<RegisteredTensor>& registered);

/// Chooses a rank for each tensor of which several hold the same box, so that all of them have about as much to do.
/// Every rank makes the same calls and comes to the same choice.
class ReplicaChoice {
 public:
  explicit ReplicaChoice(const dtensor::DeviceMesh& mesh);
  /// The coordinate, along the axes over which the tensor is replicated, of the replica that does it; this rank's own
  /// along the others.
  std::vector<int64_t> choose(const CheckpointedTensor& tensor);

 private:
  const dtensor::DeviceMesh& mesh_;
  std::vector<int64_t> bytes_;  // by rank: what those chosen were given
};

}  // namespace hsdp
