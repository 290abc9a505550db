#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>

/// Construction wants the same random numbers on every rank, and dropout wants others on each. So the default
/// generators part once a module has its values: rank 0's goes on as after plain construction, every other rank's is
/// seeded from that state and its rank. What all ranks must draw alike afterwards (construction of a next module,
/// in-place initialisation of sharded tensors) goes on from the common state. torch::manual_seed ends this.
namespace hsdp {

/// Parts the default generators of the host and of `device`, as far as it has one.
void part_generators(int64_t rank, c10::Device device);
/// Whether they are parted now.
bool generators_are_parted();
/// `state` is one of the host's generator: the common one instead, if it was read while they were parted.
at::Tensor common_generator_state(const at::Tensor& state);

}  // namespace hsdp
