#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/DeviceType.h>

/// The host: where modules are constructed and replayed, and where ranks train that have no accelerator. This file and
/// the ones in launch/ that are named after a device or a backend are all that knows one platform from another.
namespace hsdp {

inline constexpr c10::DeviceType kHost = c10::DeviceType::CPU;

/// The default generator that constructors draw from: what torch::manual_seed sets, whatever device trains.
at::Generator host_generator();

/// Under the generator's lock, of any device.
at::Tensor generator_state(at::Generator generator);
void set_generator_state(at::Generator generator, const at::Tensor& state);

}  // namespace hsdp
