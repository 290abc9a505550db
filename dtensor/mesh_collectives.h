#pragma once

#include <ATen/core/Tensor.h>

#include "dtensor/communicator.h"
#include "dtensor/device_mesh.h"

/// Collectives over all ranks of a mesh, whatever its axes, by those of the axes one after another: one collective an
/// axis longer than 1. All return when they are done; every rank of the mesh must call them. Tensors are on the device
/// of the mesh.
namespace dtensor {

/// The tensor on the device of the mesh: itself, or a copy of one that is elsewhere, such as a shard kept on the host.
at::Tensor on_mesh_device(const DeviceMesh& mesh, const at::Tensor& tensor);

/// Reduces in place; op is sum, max or min.
void all_reduce(const DeviceMesh& mesh, const at::Tensor& tensor, ReduceOp op, OperationName name);

/// [mesh.size(), mine.numel()]: what each rank gave, by its rank in the mesh. On every rank.
at::Tensor all_gather_rows(const DeviceMesh& mesh, const at::Tensor& mine, OperationName name);

/// Gives `tensor` the values that it has on rank `root` of the mesh.
void broadcast(const DeviceMesh& mesh, const at::Tensor& tensor, int64_t root, OperationName name);

}  // namespace dtensor
