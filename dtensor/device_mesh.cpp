#include "dtensor/device_mesh.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "dtensor/collective.h"
#include "dtensor/error.h"
#include "dtensor/mesh_collectives.h"

namespace dtensor {
namespace {

std::string name_list(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

void check_axes(const std::vector<int64_t>& sizes, const std::vector<std::string>& names, int64_t rank) {
  if (sizes.empty()) raise<ValueError>("DeviceMesh", "no axes, expected at least one size");
  if (names.size() != sizes.size()) {
    raise<ValueError>("DeviceMesh", names.size(), " names for ", sizes.size(), " axes, expected one name an axis");
  }
  int64_t ranks = 1;
  for (const auto i : c10::irange(sizes.size())) {
    if (names[i].empty()) raise<ValueError>("DeviceMesh", "axis ", i, " has an empty name, expected a name");
    if (std::count(names.begin(), names.end(), names[i]) > 1) {
      raise<ValueError>("DeviceMesh", "axis name '", names[i], "' occurs twice, expected distinct names");
    }
    if (sizes[i] <= 0) {
      raise<ValueError>("DeviceMesh", "axis '", names[i], "' has size ", sizes[i], ", expected a positive size");
    }
    if (sizes[i] > std::numeric_limits<int64_t>::max() / ranks) {
      raise<ValueError>("DeviceMesh", "the sizes ", c10::IntArrayRef(sizes),
                        " multiply to more ranks than can be counted");
    }
    ranks *= sizes[i];
  }
  if (rank < 0 || rank >= ranks) {
    raise<ValueError>("DeviceMesh", "rank ", rank, " is outside a mesh of ", ranks, " ranks, expected 0 to ",
                      ranks - 1);
  }
}

}  // namespace

DeviceMesh::DeviceMesh(c10::DeviceType device_type, std::vector<int64_t> sizes, std::vector<std::string> names,
                       int64_t rank, GroupFactory groups)
    : device_type_(device_type),
      sizes_(std::move(sizes)),
      names_(std::move(names)),
      rank_(rank),
      groups_(std::move(groups)) {
  check_axes(sizes_, names_, rank_);
  coordinate_ = coordinate_of(rank_);
  communicators_.resize(sizes_.size());
}

std::vector<int64_t> DeviceMesh::ranks_along(int64_t axis, int64_t begin, int64_t count) const {
  int64_t stride = 1;
  for (int64_t inner = axis + 1; inner < ndim(); ++inner) stride *= sizes_[inner];
  const int64_t first = rank_ - coordinate_[axis] * stride;
  std::vector<int64_t> ranks;
  for (int64_t i = begin; i < begin + count; ++i) ranks.push_back(first + i * stride);
  return ranks;
}

std::shared_ptr<const DeviceMesh> DeviceMesh::create(c10::DeviceType device_type, std::vector<int64_t> sizes,
                                                     std::vector<std::string> names, int64_t rank,
                                                     GroupFactory groups) {
  std::shared_ptr<DeviceMesh> mesh(
      new DeviceMesh(device_type, std::move(sizes), std::move(names), rank, std::move(groups)));
  // Axis after axis on every rank: groups along one axis are disjoint, so nobody waits for somebody who waits for him.
  for (const auto axis : c10::irange(mesh->ndim())) {
    const int64_t length = mesh->sizes_[axis];
    if (length == 1) {
      mesh->communicators_[axis] = make_self_communicator();
      continue;
    }
    if (!mesh->groups_) continue;
    auto communicator = mesh->groups_(mesh->ranks_along(axis, 0, length), mesh->names_[axis]);
    TORCH_INTERNAL_ASSERT(
        communicator && communicator->size() == length && communicator->rank() == mesh->coordinate_[axis],
        "the group of axis ", mesh->names_[axis], " does not fit the mesh");
    mesh->communicators_[axis] = std::move(communicator);
  }
  return mesh;
}

std::shared_ptr<const DeviceMesh> DeviceMesh::from_communicator(c10::DeviceType device_type,
                                                                std::shared_ptr<Communicator> communicator,
                                                                std::string name, GroupFactory groups) {
  TORCH_INTERNAL_ASSERT(communicator, "a mesh needs a communicator");
  std::shared_ptr<DeviceMesh> mesh(
      new DeviceMesh(device_type, {communicator->size()}, {std::move(name)}, communicator->rank(), std::move(groups)));
  mesh->communicators_[0] = std::move(communicator);
  return mesh;
}

std::shared_ptr<const DeviceMesh> DeviceMesh::from_communicators(
    c10::DeviceType device_type, std::vector<std::shared_ptr<Communicator>> communicators,
    std::vector<std::string> names) {
  constexpr auto kWhere = "DeviceMesh::from_communicators";
  std::vector<int64_t> sizes, coordinate;
  int64_t rank = 0;
  for (const auto i : c10::irange(communicators.size())) {
    if (!communicators[i]) raise<ValueError>(kWhere, "the communicator of axis ", i, " is null, expected one an axis");
    sizes.push_back(communicators[i]->size());
    coordinate.push_back(communicators[i]->rank());
    rank = rank * sizes.back() + coordinate.back();
  }
  std::shared_ptr<DeviceMesh> mesh(new DeviceMesh(device_type, std::move(sizes), std::move(names), rank, nullptr));
  mesh->communicators_ = std::move(communicators);
  // Groups that cross would add up parts of unlike tensors, without a word.
  CollectiveGuard guard;
  const at::TensorOptions options(device_type);
  const auto mine = at::tensor(coordinate, at::kLong).to(options);
  std::string problem;
  for (const auto axis : c10::irange(mesh->ndim())) {
    auto all = at::empty({mesh->size(axis), mesh->ndim()}, mine.options());
    mesh->communicator(axis).all_gather(all.view({-1}), mine, {"all_gather", kWhere})->wait();
    all = all.to(at::TensorOptions().device());  // the host
    for (const auto position : c10::irange(mesh->size(axis))) {
      auto expected = coordinate;
      expected[axis] = position;
      const auto* row = all.const_data_ptr<int64_t>() + position * mesh->ndim();
      const std::vector<int64_t> found(row, row + mesh->ndim());
      if (!problem.empty() || found == expected) continue;
      problem = c10::str("rank ", position, " of axis '", mesh->names_[axis], "' is at ", c10::IntArrayRef(found),
                         " and this one at ", c10::IntArrayRef(coordinate));
    }
  }
  const auto problems = at::full({1}, problem.empty() ? 0 : 1, options.dtype(at::kLong));
  all_reduce(*mesh, problems, ReduceOp::max, {"all_reduce", kWhere});
  if (problems.item<int64_t>() != 0) {
    raise<ValueError>(kWhere, "the groups of ", mesh->to_string(),
                      " are no grid: ", problem.empty() ? "other ranks do not meet along one axis" : problem,
                      ", expected ranks of one group to differ along its axis alone");
  }
  return mesh;
}

int64_t DeviceMesh::size() const {
  int64_t ranks = 1;
  for (const int64_t size : sizes_) ranks *= size;
  return ranks;
}

int64_t DeviceMesh::size(int64_t axis) const {
  if (axis < 0 || axis >= ndim()) {
    raise<ValueError>("DeviceMesh::size", "axis ", axis, " is outside ", to_string(), ", expected 0 to ", ndim() - 1);
  }
  return sizes_[axis];
}

std::vector<int64_t> DeviceMesh::coordinate_of(int64_t rank) const {
  if (rank < 0 || rank >= size()) {
    raise<ValueError>("DeviceMesh::coordinate_of", "rank ", rank, " is outside ", to_string(), ", expected 0 to ",
                      size() - 1);
  }
  std::vector<int64_t> coordinate(sizes_.size());
  for (int64_t axis = ndim() - 1; axis >= 0; --axis) {
    coordinate[axis] = rank % sizes_[axis];
    rank /= sizes_[axis];
  }
  return coordinate;
}

int64_t DeviceMesh::axis(const std::string& name) const {
  const auto found = std::find(names_.begin(), names_.end(), name);
  if (found == names_.end()) {
    raise<ValueError>("DeviceMesh::axis", "no axis '", name, "', expected one of: ", name_list(names_));
  }
  return found - names_.begin();
}

bool DeviceMesh::has_groups() const {
  return std::all_of(communicators_.begin(), communicators_.end(),
                     [](const auto& communicator) { return communicator != nullptr; });
}

Communicator& DeviceMesh::communicator(int64_t axis) const { return *shared_communicator(axis); }

std::shared_ptr<Communicator> DeviceMesh::shared_communicator(int64_t axis) const {
  size(axis);  // refuses axes that do not exist
  if (!communicators_[axis]) {
    raise<StateError>(
        "DeviceMesh::communicator", "axis '", names_[axis], "' of ", to_string(),
        " has no group of ranks, expected a mesh made with a GroupFactory; hsdp::init() makes such meshes");
  }
  return communicators_[axis];
}

std::shared_ptr<Communicator> DeviceMesh::sub_communicator(int64_t axis, int64_t size) const {
  constexpr auto kWhere = "DeviceMesh::sub_communicator";
  const int64_t length = this->size(axis);
  if (size < 1 || length % size != 0) {
    raise<ValueError>(kWhere, "blocks of ", size, " along axis '", names_[axis], "' of ", to_string(),
                      ", expected a size that divides ", length);
  }
  if (size == length) return shared_communicator(axis);
  std::lock_guard lock(mutex_);
  auto& communicator = sub_communicators_[{axis, size}];
  if (communicator) return communicator;
  if (size == 1) return communicator = make_self_communicator();
  if (!groups_) {
    raise<StateError>(kWhere, "blocks of ", size, " along axis '", names_[axis], "' of ", to_string(),
                      " need groups of their own, and this mesh was made from given ones, expected one that can make "
                      "groups; use env.make_mesh() or env.mesh()");
  }
  const int64_t begin = coordinate_[axis] / size * size;
  communicator = groups_(ranks_along(axis, begin, size), c10::str(names_[axis], "/", size));
  TORCH_INTERNAL_ASSERT(
      communicator && communicator->size() == size && communicator->rank() == coordinate_[axis] - begin,
      "the group of ", size, " ranks along axis ", names_[axis], " does not fit the mesh");
  return communicator;
}

std::string DeviceMesh::to_string() const {
  std::string text = "mesh(" + c10::DeviceTypeName(device_type_, /*lower_case=*/true);
  for (const auto i : c10::irange(sizes_.size())) text += c10::str(", ", names_[i], "=", sizes_[i]);
  return text + ")";
}

}  // namespace dtensor
