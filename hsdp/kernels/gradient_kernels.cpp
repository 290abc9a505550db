#include "hsdp/kernels/gradient_kernels.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "hsdp/host.h"
#include "hsdp/kernels/gradient_kernel_ways.h"

namespace hsdp::kernels {
namespace {

void check_divisor(double divisor) {
  TORCH_INTERNAL_ASSERT(std::isfinite(divisor) && divisor != 0, "gradients divided by ", divisor);
}

// Of a pass, all first tensors are alike, and all second ones.
void check_alike(const at::Tensor& tensor, const at::Tensor& first, const at::Tensor& device_of) {
  TORCH_INTERNAL_ASSERT(tensor.defined() && tensor.layout() == at::kStrided);
  TORCH_INTERNAL_ASSERT(tensor.scalar_type() == first.scalar_type(), tensor.scalar_type(), " beside ",
                        first.scalar_type());
  TORCH_INTERNAL_ASSERT(tensor.device() == device_of.device(), tensor.device(), " beside ", device_of.device());
}

// From the first byte of a tensor to the last.
struct Stretch {
  uintptr_t begin;
  uintptr_t end;
  bool operator==(const Stretch&) const = default;
};

Stretch stretch_of(const at::Tensor& tensor) {
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  if (tensor.numel() == 0) return {begin, begin};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {begin, begin + static_cast<uintptr_t>(last + 1) * tensor.element_size()};
}

void check_no_overlap(const at::Tensor& written, const at::Tensor& read, bool may_be_same) {
  const auto to = stretch_of(written), from = stretch_of(read);
  if (may_be_same && to == from && written.scalar_type() == read.scalar_type()) return;
  TORCH_INTERNAL_ASSERT(to.end <= from.begin || from.end <= to.begin, "gradients overlap");
}

}  // namespace

bool has_kernel(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16;
}

Dtype dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return Dtype::kFloat;
    case at::kDouble:
      return Dtype::kDouble;
    case at::kHalf:
      return Dtype::kHalf;
    case at::kBFloat16:
      return Dtype::kBFloat16;
    default:
      TORCH_INTERNAL_ASSERT(false, "gradients of dtype ", tensor.scalar_type());
  }
}

void land_gradients(c10::ArrayRef<Landing> landings, double divisor) {
  if (landings.empty()) return;
  check_divisor(divisor);
  const auto& first = landings.front();
  for (const auto& landing : landings) {
    check_alike(landing.source, first.source, first.source);
    check_alike(landing.destination, first.destination, first.source);
    TORCH_INTERNAL_ASSERT(landing.source.is_contiguous() && landing.destination.is_contiguous());
    TORCH_INTERNAL_ASSERT(landing.source.numel() == landing.destination.numel(), landing.source.sizes(), " into ",
                          landing.destination.sizes());
    check_no_overlap(landing.destination, landing.source, true);
  }
  const auto type = first.source.device().type();
  if (type == kHost) return land_on_host(landings, divisor);
  const auto* kernels = device_kernels(type);
  return kernels != nullptr ? land_by_tables(*kernels, landings, divisor) : land_by_operators(landings, divisor);
}

void pack_gradients(c10::ArrayRef<Packing> packings, double divisor) {
  if (packings.empty()) return;
  check_divisor(divisor);
  const auto& first = packings.front();
  for (const auto& packing : packings) {
    const auto& [whole, rows] = packing;
    check_alike(whole, first.whole, first.whole);
    check_alike(rows, first.rows, first.whole);
    TORCH_INTERNAL_ASSERT(whole.is_contiguous() && rows.dim() == 2 && rows.numel() >= whole.numel(), whole.sizes(),
                          " into rows ", rows.sizes());
    TORCH_INTERNAL_ASSERT(rows.size(1) <= 1 || rows.stride(1) == 1);
    TORCH_INTERNAL_ASSERT(rows.size(0) <= 1 || rows.stride(0) >= rows.size(1), "rows overlap");
    check_no_overlap(rows, whole, false);
  }
  const auto type = first.whole.device().type();
  if (type == kHost) return pack_on_host(packings, divisor);
  const auto* kernels = device_kernels(type);
  return kernels != nullptr ? pack_by_tables(*kernels, packings, divisor) : pack_by_operators(packings, divisor);
}

void write_words(const at::Tensor& bytes, const std::array<int64_t, 4>& words) {
  Words copy;
  std::memcpy(&copy, words.data(), sizeof(copy));
  TORCH_INTERNAL_ASSERT(bytes.defined() && bytes.is_contiguous() && bytes.nbytes() == sizeof(copy), bytes.nbytes(),
                        " bytes for four words");
  const auto type = bytes.device().type();
  if (type == kHost) return write_words_on_host(bytes, copy);
  const auto* kernels = device_kernels(type);
  if (kernels == nullptr) return write_words_by_operators(bytes, copy);
  kernels->write_words(bytes.mutable_data_ptr(), copy, bytes.device());
}

}  // namespace hsdp::kernels
