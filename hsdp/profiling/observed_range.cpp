#include "hsdp/profiling/observed_range.h"

#include <utility>

#include "hsdp/profiling/nvtx.h"

namespace hsdp {
namespace {

/// Kineto writes names into JSON as they are: a quote or a line's end in one would make the whole trace unreadable.
std::string fit_for_traces(std::string name) {
  for (auto& c : name) {
    if (c == '"') c = '\'';
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';
  }
  return name;
}

}  // namespace

bool ObservedRange::is_wanted() {
  return nvtx::is_on() || at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE).has_value();
}

ObservedRange::ObservedRange(std::string name) : record_(at::RecordScope::USER_SCOPE) {
  name = fit_for_traces(std::move(name));
  if (record_.isActive()) record_.before(name);
  if (nvtx::is_on()) {
    nvtx::push(name.c_str());
    is_pushed_ = true;
  }
}

ObservedRange::~ObservedRange() {
  if (is_pushed_) nvtx::pop();
  record_.end();
}

}  // namespace hsdp
