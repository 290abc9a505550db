#include "hsdp/profiling/span.h"

#include <c10/util/StringUtil.h>

#include <string>
#include <utility>

#include "hsdp/profiling/observed_range.h"

namespace hsdp {
namespace {

/// As FSDP2 prints it: "FSDP::all_gather (blocks.3)", "FSDP::backward_prefetch for blocks.2". What the root module
/// itself holds has no name there.
std::string fsdp_label(std::string_view name, std::string_view subject) {
  if (name.ends_with(" for")) return c10::str("FSDP::", name, " ", subject);
  if (subject.empty() || subject == "root") return c10::str("FSDP::", name);
  return c10::str("FSDP::", name, " (", subject, ")");
}

}  // namespace

struct Span::State {
  explicit State(std::string label) : range(std::move(label)) {}
  ObservedRange range;
};

Span::Span(const char* name, std::string_view subject) {
  if (ObservedRange::is_wanted()) state_ = new State(fsdp_label(name, subject));
}

Span::~Span() { delete state_; }

}  // namespace hsdp
