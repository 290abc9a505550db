#pragma once

#include <exception>
#include <functional>
#include <vector>

#include "apps/config.h"
#include "apps/failure.h"

namespace hsdp {
class Environment;
}

namespace apps {

/// Thrown by agree() on every rank when the work of one or more ranks threw.
class SetupFailure : public std::exception {
 public:
  SetupFailure(ExitCode code, std::exception_ptr cause, bool told_here)
      : code_(code), cause_(std::move(cause)), told_here_(told_here) {}

  const char* what() const noexcept override { return "set-up failed on a rank"; }
  /// That of the rank that tells the user: all ranks end with the same code.
  ExitCode code() const { return code_; }
  /// What this rank's own work threw; empty when only others failed.
  const std::exception_ptr& cause() const { return cause_; }
  /// True on the lowest rank that failed.
  bool told_here() const { return told_here_; }

 private:
  ExitCode code_;
  std::exception_ptr cause_;
  bool told_here_;
};

/// Does work that may fail on some ranks alone, such as opening files, and leaves no rank waiting for one that failed:
/// when it threw anywhere, every rank throws SetupFailure. Every rank must call it (one all-reduce).
void agree(const hsdp::Environment& environment, const std::function<void()>& work);

/// Throws dtensor::ValueError, on every rank, naming the values that are not the same on all of them. Every rank must
/// call it with the same names (two all-reduces).
void check_same(const hsdp::Environment& environment, const std::vector<ConfigValue>& values);

}  // namespace apps
