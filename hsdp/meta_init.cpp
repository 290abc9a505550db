#include "hsdp/meta_init.h"

#include <optional>

#include "dtensor/dispatch.h"
#include "hsdp/recorder.h"

namespace hsdp {
namespace {

thread_local bool constructing = false;

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
  state_.reset();
}

}  // namespace hsdp
