#pragma once

#include <string_view>

namespace hsdp {

/// A named stretch of host time: what profilers of libtorch show as "FSDP::all_gather (blocks.3)", the names of
/// PyTorch's FSDP2, and an NVTX range of that name where those are switched on (profiling.h). Costs a flag's test
/// otherwise. Lives on one thread's stack; spans nest.
class Span {
 public:
  /// `name` without the prefix, for example "all_gather"; `subject` is the unit, or empty.
  explicit Span(const char* name, std::string_view subject = {});
  ~Span();
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  struct State;
  State* state_ = nullptr;
};

}  // namespace hsdp
