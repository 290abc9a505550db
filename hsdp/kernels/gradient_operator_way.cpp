// The gradient kernels by operators of libtorch.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "hsdp/kernels/gradient_kernel_ways.h"

namespace hsdp::kernels {
namespace {

// Rounded as the other ways do: to divide by a number, devices are free to multiply with its reciprocal, or to round it
// to half first; not so by a tensor of float.
at::Tensor divided(const at::Tensor& tensor, double divisor) {
  if (divisor == 1) return tensor;
  const auto dtype = tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto wide = tensor.to(dtype);
  return wide.div(at::full({}, divisor, wide.options())).to(tensor.scalar_type());
}

at::Tensor as_line(const at::Tensor& tensor) { return tensor.view({tensor.numel()}); }

}  // namespace

void land_by_operators(c10::ArrayRef<Landing> landings, double divisor) {
  const at::AutoDispatchBelowADInplaceOrView below;
  for (const auto& landing : landings) {
    if (landing.source.numel() == 0) continue;
    const auto destination = as_line(landing.destination);
    const auto quotient = divided(as_line(landing.source), divisor);
    if (landing.accumulate) {
      destination.add_(quotient.to(destination.scalar_type()));
    } else {
      destination.copy_(quotient);
    }
  }
}

void pack_by_operators(c10::ArrayRef<Packing> packings, double divisor) {
  const at::AutoDispatchBelowADInplaceOrView below;
  for (const auto& [whole, rows] : packings) {
    const auto length = rows.size(1);
    if (rows.numel() == 0) continue;
    auto from = as_line(whole);
    if (divisor != 1) from = divided(from.to(rows.scalar_type()), divisor);
    const auto full = whole.numel() / length;  // rows
    const auto rest = whole.numel() % length;
    if (full > 0) rows.narrow(0, 0, full).copy_(from.narrow(0, 0, full * length).view({full, length}));
    if (full == rows.size(0)) continue;
    const auto last = rows.select(0, full);
    if (rest > 0) last.narrow(0, 0, rest).copy_(from.narrow(0, full * length, rest));
    last.narrow(0, rest, length - rest).zero_();
    rows.narrow(0, full + 1, rows.size(0) - full - 1).zero_();
  }
}

void write_words_by_operators(const at::Tensor& bytes, const Words& words) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto raw = as_line(bytes);
  // The numbers go with the operators: a copy from the host would be waited for, or read later.
  if (bytes.storage_offset() * static_cast<int64_t>(bytes.element_size()) % static_cast<int64_t>(sizeof(int64_t)) ==
      0) {
    const auto longs = raw.view(at::kLong);
    for (int64_t i = 0; i < longs.numel(); ++i) longs.select(0, i).fill_(words.word[i]);
    return;
  }
  const auto octets = raw.view(at::kByte);
  for (int64_t i = 0; i < octets.numel(); ++i) {
    octets.select(0, i).fill_(static_cast<int64_t>(static_cast<uint64_t>(words.word[i / 8]) >> i % 8 * 8 & 0xff));
  }
}

}  // namespace hsdp::kernels
