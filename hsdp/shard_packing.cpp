#include "hsdp/shard_packing.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace hsdp {
namespace {

// The part of row `rank` that holds elements, in the shape of that rank's shard.
at::Tensor shard_in_row(const at::Tensor& row, const dtensor::Layout& layout, int64_t dim, int64_t length) {
  return row.view(layout.padded_local_sizes()).narrow(dim, 0, length);
}

}  // namespace

void pack_rows(const at::Tensor& rows, const at::Tensor& whole, const dtensor::Layout& layout, int64_t dim) {
  const auto ranks = rows.size(0);
  const auto length = rows.size(1);
  if (dim == 0 && whole.is_contiguous()) {
    // Rows are consecutive pieces of one line: whole ones at once, then the broken one.
    const auto line = whole.view({-1});
    const auto full = length == 0 ? 0 : line.numel() / length;
    const auto rest = line.numel() - full * length;
    if (full > 0) rows.narrow(0, 0, full).copy_(line.narrow(0, 0, full * length).view({full, length}));
    if (rest > 0) rows.select(0, full).narrow(0, 0, rest).copy_(line.narrow(0, full * length, rest));
    if (full < ranks) {
      rows.select(0, full).narrow(0, rest, length - rest).zero_();
      rows.narrow(0, full + 1, ranks - full - 1).zero_();
    }
    return;
  }
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const auto range = dtensor::chunk_range(layout.sizes()[dim], ranks, rank);
    const auto row = rows.select(0, rank);
    const auto count = range.end - range.begin;
    if (count < layout.padded_local_sizes()[dim]) row.zero_();
    if (count > 0) shard_in_row(row, layout, dim, count).copy_(whole.narrow(dim, range.begin, count));
  }
}

void unpack_rows(const at::Tensor& whole, const at::Tensor& rows, const dtensor::Layout& layout, int64_t dim) {
  const auto ranks = rows.size(0);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const auto range = dtensor::chunk_range(layout.sizes()[dim], ranks, rank);
    const auto count = range.end - range.begin;
    if (count == 0) continue;
    whole.narrow(dim, range.begin, count).copy_(shard_in_row(rows.select(0, rank), layout, dim, count));
  }
}

}  // namespace hsdp
