#include "dtensor/device_mesh.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "dtensor/error.h"

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
                       int64_t rank)
    : device_type_(device_type), sizes_(std::move(sizes)), names_(std::move(names)), rank_(rank) {
  check_axes(sizes_, names_, rank_);
  coordinate_ = coordinate_of(rank_);
  communicators_.resize(sizes_.size());
}

std::shared_ptr<const DeviceMesh> DeviceMesh::create(c10::DeviceType device_type, std::vector<int64_t> sizes,
                                                     std::vector<std::string> names, int64_t rank,
                                                     const GroupFactory& groups) {
  std::shared_ptr<DeviceMesh> mesh(new DeviceMesh(device_type, std::move(sizes), std::move(names), rank));
  // Axis after axis on every rank: groups along one axis are disjoint, so nobody waits for somebody who waits for him.
  int64_t stride = mesh->size();
  for (const auto axis : c10::irange(mesh->sizes_.size())) {
    const int64_t length = mesh->sizes_[axis];
    stride /= length;
    if (length == 1) {
      mesh->communicators_[axis] = make_self_communicator();
      continue;
    }
    if (!groups) continue;
    std::vector<int64_t> ranks;
    const int64_t first = rank - mesh->coordinate_[axis] * stride;
    for (const auto i : c10::irange(length)) ranks.push_back(first + i * stride);
    auto communicator = groups(ranks, mesh->names_[axis]);
    TORCH_INTERNAL_ASSERT(
        communicator && communicator->size() == length && communicator->rank() == mesh->coordinate_[axis],
        "the group of axis ", mesh->names_[axis], " does not fit the mesh");
    mesh->communicators_[axis] = std::move(communicator);
  }
  return mesh;
}

std::shared_ptr<const DeviceMesh> DeviceMesh::from_communicator(c10::DeviceType device_type,
                                                                std::shared_ptr<Communicator> communicator,
                                                                std::string name) {
  TORCH_INTERNAL_ASSERT(communicator, "a mesh needs a communicator");
  std::shared_ptr<DeviceMesh> mesh(
      new DeviceMesh(device_type, {communicator->size()}, {std::move(name)}, communicator->rank()));
  mesh->communicators_[0] = std::move(communicator);
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

std::string DeviceMesh::to_string() const {
  std::string text = "mesh(" + c10::DeviceTypeName(device_type_, /*lower_case=*/true);
  for (const auto i : c10::irange(sizes_.size())) text += c10::str(", ", names_[i], "=", sizes_[i]);
  return text + ")";
}

}  // namespace dtensor
