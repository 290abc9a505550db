#include "hsdp/host.h"

#include <ATen/Context.h>

#include <mutex>

namespace hsdp {

at::Generator host_generator() { return at::globalContext().defaultGenerator(kHost); }

at::Tensor generator_state(at::Generator generator) {
  std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_generator_state(at::Generator generator, const at::Tensor& state) {
  std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace hsdp
