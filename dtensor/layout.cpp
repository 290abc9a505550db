#include "dtensor/layout.h"

#include <c10/util/Exception.h>
#include <c10/util/hash.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <cctype>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "dtensor/error.h"

namespace dtensor {
namespace {

/// The layouts alive. Weak: an entry leaves with its layout. The table itself is never destroyed, so that layouts held
/// by static objects can still leave it.
struct InternTable {
  std::mutex mutex;
  struct Entry {
    const Layout* layout;
    std::weak_ptr<const Layout> weak;
  };
  std::unordered_multimap<size_t, Entry> entries;
};

InternTable& intern_table() {
  static auto* table = new InternTable;
  return *table;
}

size_t hash_of(const DeviceMesh* mesh, const Placements& placements, c10::IntArrayRef sizes, c10::IntArrayRef strides,
               c10::ScalarType dtype) {
  size_t seed = c10::hash_combine(std::hash<const void*>()(mesh), static_cast<size_t>(dtype));
  for (const auto& placement : placements) {
    seed = c10::hash_combine(seed, static_cast<size_t>(placement.kind()));
    if (placement.is_shard()) seed = c10::hash_combine(seed, static_cast<size_t>(placement.dim()));
  }
  for (const int64_t size : sizes) seed = c10::hash_combine(seed, static_cast<size_t>(size));
  for (const int64_t stride : strides) seed = c10::hash_combine(seed, static_cast<size_t>(stride));
  return seed;
}

std::string shape_text(c10::IntArrayRef sizes) {
  std::string text = "(";
  for (const auto i : c10::irange(sizes.size())) text += c10::str(i ? ", " : "", sizes[i]);
  return text + ")";
}

void check(const std::shared_ptr<const DeviceMesh>& mesh, const Placements& placements, c10::IntArrayRef sizes,
           c10::IntArrayRef strides) {
  if (!mesh) raise<ValueError>("Layout", "no mesh, expected a DeviceMesh; hsdp::init().mesh() is the default one");
  if (static_cast<int64_t>(placements.size()) != mesh->ndim()) {
    raise<ValueError>("Layout", placements.size(), " placements ", to_string(placements), " for ", mesh->to_string(),
                      ", expected one placement a mesh axis");
  }
  for (const int64_t size : sizes) {
    if (size < 0) raise<ValueError>("Layout", "shape ", shape_text(sizes), " has a negative size");
  }
  if (!strides.empty() && strides.size() != sizes.size()) {
    raise<ValueError>("Layout", strides.size(), " strides for the ", sizes.size(), " dims of shape ", shape_text(sizes),
                      ", expected one stride a dim, or none for a contiguous tensor");
  }
  for (const auto& placement : placements) {
    if (placement.is_shard() && placement.dim() >= static_cast<int64_t>(sizes.size())) {
      raise<ValueError>("Layout", placement.to_string(), " for shape ", shape_text(sizes), " of ", sizes.size(),
                        " dims, expected a tensor dim that exists");
    }
  }
}

}  // namespace

ChunkRange chunk_range(int64_t length, int64_t chunks, int64_t index) {
  TORCH_INTERNAL_ASSERT(length >= 0 && chunks > 0 && index >= 0 && index < chunks, "chunk ", index, " of ", chunks,
                        " of length ", length);
  const int64_t chunk = (length + chunks - 1) / chunks;
  return {std::min(length, index * chunk), std::min(length, (index + 1) * chunk)};
}

std::vector<int64_t> row_major_strides(c10::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (int64_t dim = static_cast<int64_t>(sizes.size()) - 1; dim >= 0; --dim) {
    strides[dim] = stride;
    // As in ATen, an empty dim counts as 1, so that strides stay positive.
    stride *= std::max<int64_t>(sizes[dim], 1);
  }
  return strides;
}

Layout::Layout(std::shared_ptr<const DeviceMesh> mesh, Placements placements, std::vector<int64_t> sizes,
               std::vector<int64_t> strides, c10::ScalarType dtype)
    : mesh_(std::move(mesh)),
      placements_(std::move(placements)),
      sizes_(std::move(sizes)),
      strides_(std::move(strides)),
      dtype_(dtype),
      numel_(1) {
  for (const int64_t size : sizes_) numel_ *= size;
  local_ = local_at(mesh_->coordinate());
  padded_local_sizes_ = local_at(std::vector<int64_t>(placements_.size(), 0)).sizes;
}

std::shared_ptr<const Layout> Layout::create(std::shared_ptr<const DeviceMesh> mesh, Placements placements,
                                             c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype) {
  check(mesh, placements, sizes, strides);
  std::vector<int64_t> own_strides = strides.empty() ? row_major_strides(sizes) : strides.vec();
  const size_t hash = hash_of(mesh.get(), placements, sizes, own_strides, dtype);
  const auto forget = [hash](const Layout* layout) {
    {
      InternTable& table = intern_table();
      std::lock_guard lock(table.mutex);
      const auto [begin, end] = table.entries.equal_range(hash);
      const auto found = std::find_if(begin, end, [&](const auto& entry) { return entry.second.layout == layout; });
      if (found != end) table.entries.erase(found);
    }
    delete layout;
  };
  // Both outlive the lock, which the deleter of a layout takes.
  std::shared_ptr<const Layout> fresh(
      new Layout(std::move(mesh), std::move(placements), sizes.vec(), std::move(own_strides), dtype), forget);
  std::vector<std::shared_ptr<const Layout>> held;
  InternTable& table = intern_table();
  std::lock_guard lock(table.mutex);
  const auto [begin, end] = table.entries.equal_range(hash);
  for (auto entry = begin; entry != end; ++entry) {
    auto known = entry->second.weak.lock();
    if (!known) continue;
    held.push_back(known);
    if (known->dtype_ == fresh->dtype_ && known->strides_ == fresh->strides_ && known->same_distribution(*fresh)) {
      return known;
    }
  }
  table.entries.emplace(hash, InternTable::Entry{fresh.get(), fresh});
  return fresh;
}

std::shared_ptr<const Layout> Layout::with_dtype(c10::ScalarType dtype) const {
  return create(mesh_, placements_, sizes_, strides_, dtype);
}

bool Layout::is_partial() const {
  return std::any_of(placements_.begin(), placements_.end(), [](const Placement& p) { return p.is_partial(); });
}

Box Layout::local_at(const std::vector<int64_t>& coordinate) const {
  if (coordinate.size() != placements_.size()) {
    raise<ValueError>("Layout::local_at", "a coordinate of ", coordinate.size(), " axes on ", mesh_->to_string(),
                      ", expected one position a mesh axis");
  }
  Box box{std::vector<int64_t>(sizes_.size(), 0), sizes_};
  // Several axes may shard one dim: the earlier axis cuts first, the later one cuts its pieces.
  for (const auto axis : c10::irange(placements_.size())) {
    const int64_t chunks = mesh_->size(static_cast<int64_t>(axis));
    if (coordinate[axis] < 0 || coordinate[axis] >= chunks) {
      raise<ValueError>("Layout::local_at", "position ", coordinate[axis], " on axis '", mesh_->names()[axis], "' of ",
                        mesh_->to_string(), ", expected 0 to ", chunks - 1);
    }
    if (!placements_[axis].is_shard()) continue;
    const int64_t dim = placements_[axis].dim();
    const ChunkRange range = chunk_range(box.sizes[dim], chunks, coordinate[axis]);
    box.offsets[dim] += range.begin;
    box.sizes[dim] = range.end - range.begin;
  }
  return box;
}

bool Layout::same_distribution(const Layout& other) const {
  return mesh_ == other.mesh_ && placements_ == other.placements_ && sizes_ == other.sizes_;
}

std::string Layout::to_string() const {
  std::string dtype = c10::toString(dtype_);
  std::transform(dtype.begin(), dtype.end(), dtype.begin(), [](unsigned char c) { return std::tolower(c); });
  std::string text = shape_text(sizes_) + " " + dtype + " [";
  for (const auto i : c10::irange(placements_.size())) text += (i ? ", " : "") + placements_[i].to_string();
  return text + "] on " + mesh_->to_string();
}

}  // namespace dtensor
