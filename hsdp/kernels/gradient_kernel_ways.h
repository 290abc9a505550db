#pragma once

#include <c10/core/Device.h>

#include "hsdp/kernels/gradient_kernels.h"
#include "hsdp/kernels/gradient_tables.h"

/// The ways in which the gradient kernels are carried out, one per kind of device. All give the same bits; NaNs are
/// NaNs. Arguments have been checked.
namespace hsdp::kernels {

/// On the host's memory, by as many threads as operators take.
void land_on_host(c10::ArrayRef<Landing> landings, double divisor);
void pack_on_host(c10::ArrayRef<Packing> packings, double divisor);
void write_words_on_host(const at::Tensor& bytes, const Words& words);

/// By operators of libtorch, which every device has. Allocates what is between one operator and the next.
void land_by_operators(c10::ArrayRef<Landing> landings, double divisor);
void pack_by_operators(c10::ArrayRef<Packing> packings, double divisor);
void write_words_by_operators(const at::Tensor& bytes, const Words& words);

/// Launches of a kind of device that has kernels of its own, behind what the current stream of `device` holds.
struct DeviceKernels {
  void (*land)(const LandTable& table, Dtype source, Dtype destination, double divisor, c10::Device device);
  void (*pack)(const PackTable& table, Dtype whole, Dtype rows, double divisor, c10::Device device);
  void (*write_words)(void* bytes, const Words& words, c10::Device device);
};

/// Null where there are none.
const DeviceKernels* device_kernels(c10::DeviceType type);

void land_by_tables(const DeviceKernels& kernels, c10::ArrayRef<Landing> landings, double divisor);
void pack_by_tables(const DeviceKernels& kernels, c10::ArrayRef<Packing> packings, double divisor);

Dtype dtype_of(const at::Tensor& tensor);

}  // namespace hsdp::kernels
