#include "apps/failure.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <cstdlib>
#include <iostream>
#include <stdexcept>

#include "apps/agreement.h"
#include "hsdp/launch/error_file.h"

namespace apps {
namespace {

bool wants_stack_traces() {
  const char* value = std::getenv("TORCH_SHOW_CPP_STACKTRACES");
  return value != nullptr && std::string(value) == "1";
}

}  // namespace

Failure describe(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const dtensor::ValueError& error) {
    return {ExitCode::user_mistake, "ValueError", error.what()};
  } catch (const dtensor::NotSupportedError& error) {
    return {ExitCode::user_mistake, "NotSupportedError", error.what()};
  } catch (const dtensor::StateError& error) {
    return {ExitCode::user_mistake, "StateError", error.what()};
  } catch (const std::invalid_argument& error) {
    return {ExitCode::user_mistake, "ValueError", error.what()};
  } catch (const dtensor::CommunicationError& error) {
    return {ExitCode::failure, "CommunicationError", error.what()};
  } catch (const NonFiniteError& error) {
    return {ExitCode::user_mistake, "NonFiniteError", error.what()};
  } catch (const c10::Error& error) {
    return {ExitCode::failure, "RuntimeError", wants_stack_traces() ? error.what() : error.what_without_backtrace()};
  } catch (const std::exception& error) {
    return {ExitCode::failure, "RuntimeError", error.what()};
  } catch (...) {
    return {ExitCode::failure, "RuntimeError", "an exception that is no std::exception"};
  }
}

ExitCode report(const std::exception_ptr& exception, int64_t rank, Teller teller) {
  try {
    std::rethrow_exception(exception);
  } catch (const SetupFailure& failed) {
    if (failed.cause()) report(failed.cause(), rank, failed.told_here() ? Teller::each : Teller::other);
    return failed.code();
  } catch (...) {
    // Not a set-up that failed on some ranks: told below.
  }
  const Failure failure = describe(exception);
  hsdp::report_failure(failure.type, failure.text);
  const bool everywhere = failure.code == ExitCode::user_mistake;
  const bool told_here = teller == Teller::each || (teller == Teller::first && (rank == 0 || !everywhere));
  // One write, so that the lines of several ranks do not mix.
  if (told_here) std::cerr << (rank == 0 ? "" : c10::str("[rank ", rank, "] ")) + failure.text + "\n" << std::flush;
  return failure.code;
}

}  // namespace apps
