#pragma once

#include <cstdint>
#include <exception>
#include <string>

#include "dtensor/error.h"

namespace apps {

/// What a program returns to the shell or the launcher.
enum class ExitCode { success = 0, failure = 1, user_mistake = 2 };

/// A loss or gradient norm that is no number; every rank throws it at the same step.
class NonFiniteError : public dtensor::Error {
 public:
  using Error::Error;
};

/// An exception as the user should see it.
struct Failure {
  ExitCode code = ExitCode::failure;
  /// Type for the launcher's report: "ValueError", "CommunicationError", ...
  std::string type;
  /// The message, without a C++ stack trace unless TORCH_SHOW_CPP_STACKTRACES is 1.
  std::string text;
};

/// ValueError, NotSupportedError, StateError, std::invalid_argument and NonFiniteError (settings under which training
/// diverges) are mistakes of the user, the rest failures.
Failure describe(const std::exception_ptr& exception);

/// Who tells the user about a failure, so that a mistake that every rank finds is told once.
enum class Teller {
  /// Every rank, with its number: what one rank alone may have met.
  each,
  /// Rank 0 for the mistakes of the user, which all ranks find at the same point; each rank for the rest. Right once the
  /// ranks are known to have the same inputs.
  first,
  /// Another rank.
  other,
};

/// Tells a failure on stderr where it is this rank's turn, reports it to the launcher, and returns the exit code.
ExitCode report(const std::exception_ptr& exception, int64_t rank, Teller teller);

}  // namespace apps
