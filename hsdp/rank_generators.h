#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

/// Construction wants the same random numbers on every rank, and dropout wants others on each. So the default
/// generators part once a module has its values: rank 0's goes on as after plain construction, every other rank's is
/// seeded from that state and its rank. What all ranks must draw alike afterwards (construction of a next module,
/// in-place initialisation of sharded tensors) goes on from the common state. torch::manual_seed ends this.
namespace hsdp {

/// Parts the default generators of the host and of `device`, as far as it has one.
void part_generators(int64_t rank, c10::Device device);
/// The default generators of the host, of `devices`, and of the device that generators were last parted for, each once.
std::vector<at::Generator> default_generators(c10::ArrayRef<c10::Device> devices);
/// Whether they are parted now.
bool generators_are_parted();
/// `state` is one of the host's generator: the common one instead, if it was read while they were parted.
at::Tensor common_generator_state(const at::Tensor& state);

}  // namespace hsdp
