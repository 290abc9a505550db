#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "dtensor/collective.h"

namespace dtensor {

/// What a rank is about to do, in a form that all ranks can exchange before they do it: a backend that pairs unlike
/// calls would wait for ever, mix up values, or end the process.
struct CollectiveCall {
  Collective kind = Collective::barrier;
  at::ScalarType dtype = at::kByte;
  /// Reduction or root, where the kind has one.
  int64_t detail = 0;
  int64_t bytes = 0;
  std::string subject;

  /// Bytes of an encoded call.
  static constexpr int64_t kEncodedBytes = 96;
  /// 1-D, uint8, kEncodedBytes long. Long subjects are cut, but count as a whole in comparisons.
  at::Tensor encode() const;
  /// `all_reduce "tokens" of 8 bytes of Long`
  std::string to_string() const;
  /// `table` holds the encoded calls of all ranks, one a row. Nothing when all are the same, else what another rank
  /// does: "rank 1 calls barrier \"shutdown\"". All ranks come to the same verdict.
  static std::optional<std::string> find_mismatch(const at::Tensor& table, int64_t rank);
};

}  // namespace dtensor
