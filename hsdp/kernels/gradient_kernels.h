#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <array>
#include <cstdint>

/// Passes over gradients that ATen takes several kernels for, each as one launch for all tensors of a unit. They run on
/// the device of their tensors, in order behind the current stream's work, without waiting for it. Autograd sees
/// nothing and version counters do not move. Results are the same bits on the host, on devices with kernels of their
/// own, and by the ATen operators that serve all other devices.
namespace hsdp::kernels {

/// Whether these functions take tensors of this dtype: float, double, half or bfloat16.
bool has_kernel(at::ScalarType dtype);

/// A reduced gradient on its way into place. Both tensors are contiguous, on one device, of as many elements and of
/// dtypes with a kernel. They do not overlap, unless they are the same elements in the same dtype.
struct Landing {
  at::Tensor destination;
  at::Tensor source;
  bool accumulate = false;  // adds to what is in the destination, in place of overwriting it
};

/// destination = source / divisor, or destination += source / divisor: the quotient is rounded to the source's dtype,
/// then to the destination's, then added; NaN stays NaN, of any bits. All sources have one dtype, all destinations one,
/// and no landing shares memory with another.
void land_gradients(c10::ArrayRef<Landing> landings, double divisor);

/// A full gradient and where a reduce-scatter takes it from.
struct Packing {
  at::Tensor whole;  // contiguous
  at::Tensor rows;   // [ranks, length] of any row stride, unit stride within a row; ranks * length >= whole.numel()
};

/// Copies each `whole`, read as one line, row after row into its `rows`, divided by `divisor` after rounding to the
/// rows' dtype; what is left of the rows becomes zero. All wholes have one dtype, all rows one.
void pack_gradients(c10::ArrayRef<Packing> packings, double divisor);

/// Writes four numbers into the 32 bytes of a contiguous tensor of any dtype; nothing is read from the host later on.
void write_words(const at::Tensor& bytes, const std::array<int64_t, 4>& words);

}  // namespace hsdp::kernels
