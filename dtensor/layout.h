#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <memory>
#include <string>
#include <vector>

#include "dtensor/device_mesh.h"
#include "dtensor/placement.h"

namespace dtensor {

/// The part of a tensor that one rank holds: a box in global coordinates.
struct Box {
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;
};

/// Half-open range [begin, end) of chunk `index` out of `chunks` of `length`, by the rule of torch.chunk: ceil-sized
/// chunks, the last ones short or empty.
struct ChunkRange {
  int64_t begin, end;
};
ChunkRange chunk_range(int64_t length, int64_t chunks, int64_t index);

/// Where a distributed tensor lies: mesh, one placement per mesh axis, and global shape, strides and dtype. The one
/// place that computes local shapes and offsets, for DTensor, fully_shard and checkpoints.
///
/// Immutable and shared: equal requests return one object while somebody holds it. Thread-safe.
class Layout {
 public:
  /// Throws ValueError when the number of placements differs from the mesh's axes, a Shard names a dim that the shape
  /// lacks, or strides differ in number from sizes. Empty `strides` means contiguous.
  static std::shared_ptr<const Layout> create(std::shared_ptr<const DeviceMesh> mesh, Placements placements,
                                              c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype);
  /// The same layout for another dtype.
  std::shared_ptr<const Layout> with_dtype(c10::ScalarType dtype) const;

  const std::shared_ptr<const DeviceMesh>& mesh() const { return mesh_; }
  const Placements& placements() const { return placements_; }
  /// The placements as a user may hand them back to from_local. Same as placements(): kept apart so that a layout with
  /// an ordering of its own on one tensor dim can spell it.
  const Placements& alias_placements() const { return placements_; }
  c10::IntArrayRef sizes() const { return sizes_; }
  c10::IntArrayRef strides() const { return strides_; }
  c10::ScalarType dtype() const { return dtype_; }
  int64_t numel() const { return numel_; }
  bool is_partial() const;

  /// What this rank, or the rank at a coordinate, holds.
  const Box& local() const { return local_; }
  Box local_at(const std::vector<int64_t>& coordinate) const;
  /// Shape of rank 0's local tensor: every rank pads to it so that collectives see equal sizes.
  c10::IntArrayRef padded_local_sizes() const { return padded_local_sizes_; }

  /// Same mesh object, placements, sizes: elementwise work on locals is then meaningful. The dtype may differ.
  bool same_distribution(const Layout& other) const;

  /// `(5, 3) float [Shard(0)] on mesh(DEVICE, shard=2)`.
  std::string to_string() const;

 private:
  Layout(std::shared_ptr<const DeviceMesh> mesh, Placements placements, std::vector<int64_t> sizes,
         std::vector<int64_t> strides, c10::ScalarType dtype);

  std::shared_ptr<const DeviceMesh> mesh_;
  Placements placements_;
  std::vector<int64_t> sizes_, strides_;
  c10::ScalarType dtype_;
  int64_t numel_;
  Box local_;
  std::vector<int64_t> padded_local_sizes_;
};

/// Row-major strides of a shape, as a contiguous tensor has them.
std::vector<int64_t> row_major_strides(c10::IntArrayRef sizes);

}  // namespace dtensor
