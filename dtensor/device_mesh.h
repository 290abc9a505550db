#pragma once

#include <c10/core/DeviceType.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dtensor/communicator.h"

namespace dtensor {

/// Makes the communicator of the given global ranks; called on every rank that belongs to them, in the same order.
using GroupFactory =
    std::function<std::shared_ptr<Communicator>(const std::vector<int64_t>& ranks, const std::string& axis)>;

/// An n-D arrangement of ranks with named axes, for example {replicate: 2, shard: 4}. Ranks fill it in row-major order.
///
/// Immutable and shared. Axes of size 1 use the group of one rank, so nobody needs to ask for the size. A mesh made
/// without a GroupFactory knows shapes and coordinates but refuses collectives on axes longer than 1: enough for
/// layouts, planning and tests. Not thread-safe while it is being built; afterwards it only reads.
class DeviceMesh {
 public:
  /// `rank` is this process's position, 0 <= rank < product(sizes). Throws ValueError for empty or non-positive sizes,
  /// names that are empty, repeated or of another count, or a rank outside.
  static std::shared_ptr<const DeviceMesh> create(c10::DeviceType device_type, std::vector<int64_t> sizes,
                                                  std::vector<std::string> names, int64_t rank,
                                                  const GroupFactory& groups = nullptr);
  /// A 1-D mesh over an existing communicator.
  static std::shared_ptr<const DeviceMesh> from_communicator(c10::DeviceType device_type,
                                                             std::shared_ptr<Communicator> communicator,
                                                             std::string name);

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

  /// `mesh(DEVICE, replicate=2, shard=4)`.
  std::string to_string() const;

 private:
  DeviceMesh(c10::DeviceType device_type, std::vector<int64_t> sizes, std::vector<std::string> names, int64_t rank);

  c10::DeviceType device_type_;
  std::vector<int64_t> sizes_;
  std::vector<std::string> names_;
  int64_t rank_;
  std::vector<int64_t> coordinate_;
  std::vector<std::shared_ptr<Communicator>> communicators_;
};

}  // namespace dtensor
