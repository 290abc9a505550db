#include "dtensor/mesh_collectives.h"

#include <ATen/ops/empty.h>

#include "dtensor/collective.h"

namespace dtensor {

at::Tensor on_mesh_device(const DeviceMesh& mesh, const at::Tensor& tensor) {
  return tensor.device().type() == mesh.device_type() ? tensor : tensor.to(at::Device(mesh.device_type()));
}

void all_reduce(const DeviceMesh& mesh, const at::Tensor& tensor, ReduceOp op, OperationName name) {
  CollectiveGuard guard;
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
    if (mesh.size(axis) > 1) mesh.communicator(axis).all_reduce(tensor, op, name)->wait();
  }
}

at::Tensor all_gather_rows(const DeviceMesh& mesh, const at::Tensor& mine, OperationName name) {
  CollectiveGuard guard;
  auto rows = mine.contiguous().view({1, mine.numel()});
  // The last axis first: its ranks are neighbours, so that blocks come to lie in the order of the ranks.
  for (int64_t axis = mesh.ndim() - 1; axis >= 0; --axis) {
    if (mesh.size(axis) == 1) continue;
    auto gathered = at::empty({mesh.size(axis) * rows.size(0), rows.size(1)}, rows.options());
    mesh.communicator(axis).all_gather(gathered.view({-1}), rows.view({-1}), name)->wait();
    rows = std::move(gathered);
  }
  return rows;
}

void broadcast(const DeviceMesh& mesh, const at::Tensor& tensor, int64_t root, OperationName name) {
  CollectiveGuard guard;
  const auto source = mesh.coordinate_of(root);
  // Along the first axis among those that share the root's other positions, and so on: whoever takes part has the
  // values along all axes before. Nobody else sends.
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
    bool takes_part = mesh.size(axis) > 1;
    for (int64_t inner = axis + 1; inner < mesh.ndim(); ++inner) {
      takes_part &= mesh.coordinate()[static_cast<size_t>(inner)] == source[static_cast<size_t>(inner)];
    }
    if (takes_part) mesh.communicator(axis).broadcast(tensor, source[static_cast<size_t>(axis)], name)->wait();
  }
}

}  // namespace dtensor
