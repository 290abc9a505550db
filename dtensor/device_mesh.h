#pragma once

#include <c10/core/DeviceType.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "dtensor/communicator.h"

namespace dtensor {

/// Makes the communicator of the given ranks of a mesh; called on every rank that belongs to them, in the same order. A
/// mesh keeps it for the groups that are needed later.
using GroupFactory =
    std::function<std::shared_ptr<Communicator>(const std::vector<int64_t>& ranks, const std::string& axis)>;

/// An n-D arrangement of ranks with named axes, for example {replicate: 2, shard: 4}. Ranks fill it in row-major order.
///
/// Immutable and shared. Axes of size 1 use the group of one rank, so nobody needs to ask for the size. A mesh made
/// without a GroupFactory knows shapes and coordinates but refuses collectives on axes longer than 1: enough for
/// layouts, planning and tests. Collectives over all ranks of a mesh: mesh_collectives.h. Thread-safe once it is built.
class DeviceMesh {
 public:
  /// `rank` is this process's position, 0 <= rank < product(sizes). Throws ValueError for empty or non-positive sizes,
  /// names that are empty, repeated or of another count, or a rank outside.
  static std::shared_ptr<const DeviceMesh> create(c10::DeviceType device_type, std::vector<int64_t> sizes,
                                                  std::vector<std::string> names, int64_t rank,
                                                  GroupFactory groups = nullptr);
  /// A 1-D mesh over an existing communicator. `groups` makes those of a part of its ranks, should they be asked for.
  static std::shared_ptr<const DeviceMesh> from_communicator(c10::DeviceType device_type,
                                                             std::shared_ptr<Communicator> communicator,
                                                             std::string name, GroupFactory groups = nullptr);
  /// A mesh over existing communicators, one an axis: their sizes are its sizes, and this rank's position in each is
  /// its coordinate. A collective, in which the ranks compare where they are. Throws ValueError when the groups are no
  /// grid (ranks of one group differ along its axis alone), for null, and for names that do not fit.
  static std::shared_ptr<const DeviceMesh> from_communicators(c10::DeviceType device_type,
                                                              std::vector<std::shared_ptr<Communicator>> communicators,
                                                              std::vector<std::string> names);

  c10::DeviceType device_type() const { return device_type_; }
  int64_t ndim() const { return static_cast<int64_t>(sizes_.size()); }
  const std::vector<int64_t>& sizes() const { return sizes_; }
  const std::vector<std::string>& names() const { return names_; }
  /// Number of ranks in the mesh, or along one axis.
  int64_t size() const;
  int64_t size(int64_t axis) const;
  int64_t rank() const { return rank_; }
  /// This rank's position along each axis.
  const std::vector<int64_t>& coordinate() const { return coordinate_; }
  /// Position of any rank. Throws ValueError outside the mesh.
  std::vector<int64_t> coordinate_of(int64_t rank) const;
  /// Index of a named axis. Throws ValueError that lists the names.
  int64_t axis(const std::string& name) const;
  /// False for a mesh made without a GroupFactory, unless all its axes have size 1.
  bool has_groups() const;
  /// The ranks that share this rank's coordinate on all other axes. Throws StateError on a mesh without groups.
  Communicator& communicator(int64_t axis) const;
  std::shared_ptr<Communicator> shared_communicator(int64_t axis) const;
  /// The ranks of this rank's block along an axis, when it is cut into blocks of `size` consecutive ones. Made when it
  /// is first asked for, a collective of all ranks of the mesh, and kept; all of an axis, and one rank, need none.
  /// Throws ValueError when `size` does not divide the axis, StateError on a mesh that cannot make groups.
  std::shared_ptr<Communicator> sub_communicator(int64_t axis, int64_t size) const;

  /// `mesh(DEVICE, replicate=2, shard=4)`.
  std::string to_string() const;

 private:
  DeviceMesh(c10::DeviceType device_type, std::vector<int64_t> sizes, std::vector<std::string> names, int64_t rank,
             GroupFactory groups);
  /// `count` ranks along an axis from position `begin` on, with this rank's coordinate on all others.
  std::vector<int64_t> ranks_along(int64_t axis, int64_t begin, int64_t count) const;

  c10::DeviceType device_type_;
  std::vector<int64_t> sizes_;
  std::vector<std::string> names_;
  int64_t rank_;
  std::vector<int64_t> coordinate_;
  // Before the communicators, which end first: the factory holds the store that they met in.
  GroupFactory groups_;
  std::vector<std::shared_ptr<Communicator>> communicators_;
  mutable std::mutex mutex_;
  mutable std::map<std::pair<int64_t, int64_t>, std::shared_ptr<Communicator>> sub_communicators_;
};

}  // namespace dtensor
