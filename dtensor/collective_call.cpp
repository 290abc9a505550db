#include "dtensor/collective_call.h"

#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "dtensor/hash_bytes.h"

namespace dtensor {
namespace {

struct Encoded {
  int64_t kind, dtype, detail, bytes;
  uint64_t subject_hash;
  char subject[56];

  bool same_call(const Encoded& other) const {
    return kind == other.kind && dtype == other.dtype && detail == other.detail && bytes == other.bytes &&
           subject_hash == other.subject_hash;
  }
};
static_assert(sizeof(Encoded) == CollectiveCall::kEncodedBytes);

const char* name_of(int64_t kind) {
  switch (static_cast<Collective>(kind)) {
    case Collective::all_gather:
      return "all_gather";
    case Collective::reduce_scatter:
      return "reduce_scatter";
    case Collective::all_reduce:
      return "all_reduce";
    case Collective::broadcast:
      return "broadcast";
    case Collective::barrier:
      return "barrier";
  }
  return "another collective";
}

std::string describe(const Encoded& call) {
  const std::string_view subject(call.subject, strnlen(call.subject, sizeof(call.subject)));
  std::string text = name_of(call.kind);
  if (!subject.empty()) text += c10::str(" \"", subject, "\"");
  if (call.kind == static_cast<int64_t>(Collective::barrier)) return text;
  return text + c10::str(" of ", call.bytes, " bytes of ", static_cast<at::ScalarType>(call.dtype));
}

Encoded encoded_of(const CollectiveCall& call) {
  Encoded encoded{};
  encoded.kind = static_cast<int64_t>(call.kind);
  encoded.dtype = static_cast<int64_t>(call.dtype);
  encoded.detail = call.detail;
  encoded.bytes = call.bytes;
  encoded.subject_hash = hash_bytes(call.subject.data(), call.subject.size());
  std::memcpy(encoded.subject, call.subject.data(), std::min(call.subject.size(), sizeof(encoded.subject)));
  return encoded;
}

}  // namespace

std::string CollectiveCall::to_string() const { return describe(encoded_of(*this)); }

at::Tensor CollectiveCall::encode() const {
  const auto encoded = encoded_of(*this);
  auto tensor = at::zeros({kEncodedBytes}, at::kByte);
  std::memcpy(tensor.mutable_data_ptr(), &encoded, sizeof(encoded));
  return tensor;
}

std::optional<std::string> CollectiveCall::find_mismatch(const at::Tensor& table, int64_t rank) {
  const auto ranks = table.numel() / kEncodedBytes;
  const auto row = [&](int64_t index) {
    Encoded encoded;
    std::memcpy(&encoded, static_cast<const char*>(table.const_data_ptr()) + index * kEncodedBytes, sizeof(encoded));
    return encoded;
  };
  const auto own = row(rank);
  for (int64_t other = 0; other < ranks; ++other) {
    const auto call = row(other);
    if (own.same_call(call)) continue;
    const bool differs_in_detail = call.kind == own.kind && call.bytes == own.bytes && call.dtype == own.dtype &&
                                   call.subject_hash == own.subject_hash;
    return c10::str("rank ", other, " calls ", describe(call),
                    differs_in_detail ? " with another reduction or root" : "");
  }
  return std::nullopt;
}

}  // namespace dtensor
