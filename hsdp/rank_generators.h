#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string>
#include <utility>
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

/// What the random numbers to come depend on, as tensors on the host: the states of default_generators(devices),
/// "host", "device.<type>.0", ..., and for those that were parted "common.<name>", the common state, and "mark.<name>",
/// the seed by which a generator is known as parted.
using GeneratorStates = std::vector<std::pair<std::string, at::Tensor>>;
GeneratorStates capture_generators(c10::ArrayRef<c10::Device> devices = {});
/// Goes on where `states` were captured by the same rank, bit for bit. Generators of `devices` that have no states
/// there part from each other; states of devices that are not here are passed over. Throws ValueError for other names,
/// dtypes and sizes; then nothing has changed.
void restore_generators(const GeneratorStates& states, c10::ArrayRef<c10::Device> devices = {});
/// The same for another number of ranks, from states of rank 0, which all ranks have: rank 0 goes on, each other rank
/// begins a stream of its own, which depends on where rank 0 stands. All are parted then.
void reseed_generators(const GeneratorStates& rank_0_states, int64_t rank, c10::ArrayRef<c10::Device> devices = {});

}  // namespace hsdp
