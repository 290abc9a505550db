#pragma once

#include <ATen/record_function.h>

#include <string>

namespace hsdp {

/// A named stretch of host time while somebody observes: a user scope of libtorch's observers (Kineto, the autograd
/// profiler, emitters) and, where those are switched on, an NVTX range. On one thread's stack, or owned by what is.
class ObservedRange {
 public:
  /// Whether the calling thread is observed now. Nanoseconds where it is not.
  static bool is_wanted();

  explicit ObservedRange(std::string name);
  ~ObservedRange();
  ObservedRange(const ObservedRange&) = delete;
  ObservedRange& operator=(const ObservedRange&) = delete;

 private:
  at::RecordFunction record_;
  // NVTX may be switched in between: what was pushed is popped, and nothing else.
  bool is_pushed_ = false;
};

}  // namespace hsdp
