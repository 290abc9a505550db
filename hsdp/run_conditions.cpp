#include "hsdp/run_conditions.h"

#include <ATen/autocast_mode.h>

#include <algorithm>
#include <cstring>

#include "hsdp/host.h"
#include "hsdp/rank_generators.h"

namespace hsdp {
namespace {

// States are kept on the host, whatever device draws.
bool same_bytes(const at::Tensor& one, const at::Tensor& other) {
  return one.nbytes() == other.nbytes() && std::memcmp(one.const_data_ptr(), other.const_data_ptr(), one.nbytes()) == 0;
}

}  // namespace

AutocastState AutocastState::now() {
  AutocastState state;
  for (const auto type : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    if (at::autocast::is_autocast_enabled(type)) state.on_.emplace_back(type, at::autocast::get_autocast_dtype(type));
  }
  return state;
}

void AutocastState::set() const {
  for (const auto type : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    const auto found = std::find_if(on_.begin(), on_.end(), [&](const auto& one) { return one.first == type; });
    const bool on = found != on_.end();
    if (on != at::autocast::is_autocast_enabled(type)) at::autocast::set_autocast_enabled(type, on);
    if (on) at::autocast::set_autocast_dtype(type, found->second);
  }
}

RandomState RandomState::now(c10::ArrayRef<c10::Device> devices) {
  // Forwards that draw nothing share one copy of what is 5 KB on the host.
  thread_local RandomState last;
  RandomState state;
  for (auto& generator : default_generators(devices)) {
    auto now = generator_state(generator);
    for (auto& [known, then] : last.states_) {
      if (known == generator && same_bytes(then, now)) now = then;
    }
    state.states_.emplace_back(generator, std::move(now));
  }
  last = state;
  return state;
}

bool RandomState::holds(const at::Generator& generator) const {
  return std::any_of(states_.begin(), states_.end(), [&](const auto& one) { return one.first == generator; });
}

RandomState RandomState::same_generators_now() const {
  RandomState state;
  for (auto& [generator, then] : states_) state.states_.emplace_back(generator, generator_state(generator));
  return state;
}

void RandomState::set() const {
  for (auto& [generator, state] : states_) set_generator_state(generator, state);
}

RunConditionsScope::RunConditionsScope(const RandomState& random, const AutocastState& autocast)
    : random_(random.same_generators_now()),
      autocast_(AutocastState::now()),
      keeps_casts_(at::autocast::is_autocast_cache_enabled()) {
  random.set();
  autocast.set();
  at::autocast::set_autocast_cache_enabled(false);
}

RunConditionsScope::~RunConditionsScope() {
  random_.set();
  autocast_.set();
  at::autocast::set_autocast_cache_enabled(keeps_casts_);
}

}  // namespace hsdp
