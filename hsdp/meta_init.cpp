#include "hsdp/meta_init.h"

#include <cstring>
#include <mutex>
#include <optional>

#include "dtensor/dispatch.h"
#include "dtensor/hash_bytes.h"
#include "hsdp/construction/recorder.h"
#include "hsdp/host.h"

namespace hsdp {
namespace {

thread_local bool constructing = false;

// The last construction that drew numbers, while somebody may still replay it.
std::mutex last_mutex;
std::weak_ptr<Tape> last_tape;

std::shared_ptr<Tape> construction_before(const at::Tensor& generator_state) {
  std::lock_guard lock(last_mutex);
  auto tape = last_tape.lock();
  return tape && tape->exit_marker().equal(generator_state) ? tape : nullptr;
}

// The numbers of this construction are drawn later, if at all. Until then the generator stands at a state of its own,
// derived from where it was: the next construction must not start from the same state and get the same weights.
void mark_generator(const std::shared_ptr<Tape>& tape) {
  const auto& entry = tape->generator_state();
  const auto seed = dtensor::hash_bytes(entry.const_data_ptr(), entry.nbytes());
  auto generator = host_generator();
  {
    std::lock_guard lock(generator.mutex());
    generator.set_current_seed(seed);
    tape->set_exit_marker(generator.get_state());
  }
  std::lock_guard lock(last_mutex);
  last_tape = tape;
}

}  // namespace

struct ConstructionScope::State {
  State() : scope(std::in_place, recorder) { constructing = true; }
  ~State() { constructing = false; }

  Recorder recorder;
  std::optional<dtensor::InterceptScope> scope;
};

ConstructionScope::ConstructionScope() {
  if (!constructing) state_ = std::make_unique<State>();
}

ConstructionScope::~ConstructionScope() = default;

void ConstructionScope::finish() {
  if (!state_) return;
  state_->scope.reset();
  state_->recorder.finish();
  const auto tape = state_->recorder.tape();
  tape->set_predecessor(construction_before(tape->generator_state()));
  state_.reset();
  if (tape->draws()) mark_generator(tape);
}

}  // namespace hsdp
