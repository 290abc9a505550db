#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dtensor/device_mesh.h"
#include "hsdp/fully_shard.h"

/// Replicas hold the same parameters from the first forward on: gradients are averaged over them, values never are, so
/// that replicas which begin unlike stay unlike, each with a share of a gradient that fits none.
namespace hsdp {

/// This rank's part of each parameter, under its name, in one order on all ranks.
using NamedLocals = std::vector<std::pair<std::string, at::Tensor>>;

/// Compares the bits of the parts over the replicas, by a sum a parameter. A collective of all ranks of the mesh: one
/// all-gather over the replicate axis, and one of a few bytes over the mesh, so that all ranks throw the same
/// StateError, which names the first parameter that differs and two ranks that do.
void check_replicas_equal(const NamedLocals& locals, const dtensor::DeviceMesh& mesh, int64_t replicate_axis);

/// Gives the parts of the first replica to all others. A collective of the replicate axis.
void broadcast_replicas(const NamedLocals& locals, const dtensor::DeviceMesh& mesh, int64_t replicate_axis);

/// The same for all parameters of a model, before the first forward or between steps: for programs whose replicas draw
/// or read unlike values. Buffers stay what they are. Nothing happens on a mesh without replicas. Throws StateError
/// while parameters have no values and inside SummonFull.
void broadcast_replicas(const std::shared_ptr<ShardedModule>& sharded);
template <class M>
void broadcast_replicas(const FullySharded<M>& model) {
  broadcast_replicas(model.core());
}

}  // namespace hsdp
