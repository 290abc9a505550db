#include "hsdp/launch/job_seed.h"

#include <mutex>

#include "hsdp/host.h"

namespace hsdp {
namespace {

// Read when the library is loaded: what the generator was born with.
const uint64_t born_with = host_generator().current_seed();

}  // namespace

uint64_t offered_seed() { return host_generator().current_seed(); }

void adopt_seed_if_never_seeded(uint64_t seed) {
  auto generator = host_generator();
  if (generator.current_seed() != born_with) return;
  std::lock_guard lock(generator.mutex());
  generator.set_current_seed(seed);
}

}  // namespace hsdp
