#include "hsdp/construction/parked_generator.h"

#include <ATen/ATen.h>

#include <cstring>
#include <mutex>
#include <random>

#include "dtensor/error.h"
#include "hsdp/host.h"

namespace hsdp {

ParkedGenerator::ParkedGenerator() : generator_(host_generator()) {
  std::random_device entropy;
  base_ = (static_cast<uint64_t>(entropy()) << 32 | entropy()) | uint64_t{1} << 63;
  {
    std::lock_guard lock(generator_.mutex());
    entry_ = generator_.get_state();
  }
  park();
}

ParkedGenerator::~ParkedGenerator() {
  std::lock_guard lock(generator_.mutex());
  generator_.set_state(entry_);
}

std::optional<ParkedGenerator::Change> ParkedGenerator::poll() const {
  std::lock_guard lock(generator_.mutex());
  const auto seed = generator_.current_seed();
  // A state that the constructor read while the generator was parked carries the position it was read at.
  if (seed - base_ < position_) return Change{at::Tensor(), seed - base_};
  const auto state = generator_.get_state();
  if (seed != base_ + position_) return Change{state, 0};
  if (std::memcmp(state.const_data_ptr(), parked_.const_data_ptr(), state.nbytes()) != 0) {
    dtensor::raise<dtensor::NotSupportedError>(
        "meta_init",
        "the default generator was used directly while the module was constructed, expected random numbers "
        "to come from operators, which can be replayed; draw them with torch::rand and the like");
  }
  return std::nullopt;
}

void ParkedGenerator::advance() {
  ++position_;
  park();
}

void ParkedGenerator::park() {
  std::lock_guard lock(generator_.mutex());
  generator_.set_current_seed(base_ + position_);
  parked_ = generator_.get_state();
}

}  // namespace hsdp
