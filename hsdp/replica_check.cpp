#include "hsdp/replica_check.h"

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <limits>

#include "dtensor/collective.h"
#include "dtensor/dtensor_impl.h"
#include "dtensor/error.h"
#include "dtensor/mesh_collectives.h"
#include "hsdp/host.h"
#include "hsdp/registered_tensors.h"

namespace hsdp {
namespace {

using dtensor::raise;
using dtensor::StateError;

at::ScalarType bits_of_size(size_t element_size) {
  switch (element_size) {
    case 1:
      return at::kByte;
    case 2:
      return at::kShort;
    case 4:
      return at::kInt;
    default:
      return at::kLong;
  }
}

// A number that unlike values will hardly share, without memory of the size of the tensor. Not a xor, in which equal
// values cancel.
at::Tensor fingerprint(const at::Tensor& local) {
  const auto real = local.is_complex() ? at::view_as_real(local.resolve_conj()) : local;
  return at::sum(real.view(bits_of_size(real.element_size())), at::kLong);
}

// Rank of the mesh that stands elsewhere along one axis.
int64_t rank_at(const dtensor::DeviceMesh& mesh, std::vector<int64_t> coordinate, int64_t axis, int64_t position) {
  coordinate[static_cast<size_t>(axis)] = position;
  int64_t rank = 0;
  for (int64_t i = 0; i < mesh.ndim(); ++i) rank = rank * mesh.size(i) + coordinate[static_cast<size_t>(i)];
  return rank;
}

}  // namespace

void check_replicas_equal(const NamedLocals& locals, const dtensor::DeviceMesh& mesh, int64_t replicate_axis) {
  const auto replicas = mesh.size(replicate_axis);
  if (replicas == 1 || locals.empty()) return;
  c10::impl::ExcludeDispatchKeyGuard below(dtensor::kDTensorKey);
  dtensor::CollectiveGuard guard;
  std::vector<at::Tensor> sums;
  for (const auto& [name, local] : locals) sums.push_back(dtensor::on_mesh_device(mesh, fingerprint(local)));
  const auto mine = at::stack(sums);
  auto all = at::empty({replicas, mine.numel()}, mine.options());
  mesh.communicator(replicate_axis).all_gather(all.view({-1}), mine, {"all_gather", "replica check"})->wait();
  all = all.to(kHost);
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  int64_t first = kNone, other = 0;
  for (int64_t replica = 1; replica < replicas; ++replica) {
    const auto differs = all[replica].ne(all[0]);
    if (!differs.any().item<bool>()) continue;
    const auto index = differs.to(at::kByte).argmax().item<int64_t>();
    if (index < first) first = index, other = replica;
  }
  // What one part of the replicas has found, the others must hear of.
  const auto found = dtensor::all_gather_rows(mesh, at::tensor({first, other}, at::kLong).to(mine.device()),
                                              {"all_gather", "replica check"})
                         .to(kHost);
  const auto rank = found.select(1, 0).argmin().item<int64_t>();
  const auto index = found[rank][0].item<int64_t>();
  if (index == kNone) return;
  const auto coordinate = mesh.coordinate_of(rank);
  raise<StateError>("forward", "parameter \"", locals[static_cast<size_t>(index)].first, "\" differs between rank ",
                    rank_at(mesh, coordinate, replicate_axis, 0), " and rank ",
                    rank_at(mesh, coordinate, replicate_axis, found[rank][1].item<int64_t>()), " of ", mesh.to_string(),
                    ", expected equal replicas; use one seed and one file on all ranks, or call "
                    "hsdp::broadcast_replicas(model) before the first forward");
}

void broadcast_replicas(const NamedLocals& locals, const dtensor::DeviceMesh& mesh, int64_t replicate_axis) {
  if (mesh.size(replicate_axis) == 1) return;
  c10::impl::ExcludeDispatchKeyGuard below(dtensor::kDTensorKey);
  dtensor::CollectiveGuard guard;
  for (const auto& [name, local] : locals) {
    // Into a copy: what writes through the local itself is seen by those who watch its version.
    const auto values = dtensor::on_mesh_device(mesh, local).clone(at::MemoryFormat::Contiguous);
    mesh.communicator(replicate_axis).broadcast(values, 0, {"broadcast", name})->wait();
    auto target = local;
    target.copy_(values);
  }
}

void broadcast_replicas(const std::shared_ptr<ShardedModule>& sharded) {
  constexpr auto kWhere = "broadcast_replicas";
  const auto& mesh = mesh_of(*sharded, kWhere);
  sharded->scheduler()->check_not_summoned(kWhere);
  for (const auto& target : registered_tensors(*sharded)) {
    if (target.parameter == nullptr) continue;
    if (!target.parameter->impl().has_values()) {
      raise<StateError>(kWhere, "parameter \"", target.names.front(),
                        "\" has no values, expected all to be set; call materialize(device) or load(path) first");
    }
  }
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
    broadcast_replicas(sharded->locals_replicated_over(axis), mesh, axis);
  }
}

}  // namespace hsdp
