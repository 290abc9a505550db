#pragma once

#include <memory>

#include "dtensor/communicator.h"
#include "dtensor/device_mesh.h"
#include "hsdp/fully_shard_options.h"
#include "hsdp/transport.h"

namespace hsdp {

/// What the units of one fully_shard call share: the mesh, who moves their bytes over its axes, and the policies.
/// Immutable once the call has returned.
struct UnitContext {
  std::shared_ptr<const dtensor::DeviceMesh> mesh;
  /// Over the shard axis; null where it has one rank, or the mesh no groups.
  std::shared_ptr<Transport> transport;
  MixedPrecisionPolicy mixed_precision;
  OffloadPolicy offload;
  /// Whether the unit after this one is gathered ahead.
  bool prefetch = true;
  std::function<std::shared_ptr<Transport>(std::shared_ptr<dtensor::Communicator>)> make_transport;

  /// The last axis shards, the one before it replicates.
  int64_t shard_axis() const { return mesh->ndim() - 1; }
  int64_t shard_size() const { return mesh->sizes().back(); }
  int64_t replicate_size() const { return mesh->ndim() == 2 ? mesh->sizes().front() : 1; }
};

}  // namespace hsdp
