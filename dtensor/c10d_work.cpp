#include "dtensor/c10d_work.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdio>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "dtensor/call_site.h"
#include "dtensor/collective.h"
#include "dtensor/error.h"

namespace dtensor {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// 12345678 -> "12,345,678"
std::string grouped_digits(int64_t value) {
  std::string text = std::to_string(value);
  for (int64_t at = static_cast<int64_t>(text.size()) - 3; at > 0; at -= 3) text.insert(at, ",");
  return text;
}

std::string seconds_text(milliseconds duration) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g s", static_cast<double>(duration.count()) / 1000.0);
  return text;
}

/// "blocks.3, 1,024 bytes over staged group "shard" (rank 1 of 4)"
std::string describe(const Group& group, const Operation& operation) {
  return c10::str(operation.subject, operation.subject.empty() ? "" : ", ",
                  operation.collectives > 1 ? c10::str(operation.collectives, " collectives, ") : std::string(),
                  grouped_digits(operation.bytes), " bytes over ", group.backend, " group \"", group.label, "\" (rank ",
                  group.rank, " of ", group.size, ")");
}

}  // namespace

std::string failure_text(const Group& group, const Operation& operation, steady_clock::time_point start,
                         const std::string& cause) {
  const auto elapsed = std::chrono::duration_cast<milliseconds>(steady_clock::now() - start);
  return c10::str(describe(group, operation), " failed after ", seconds_text(elapsed), " (timeout ",
                  seconds_text(group.timeout), "): ", cause);
}

void raise_failure(const Operation& operation, const std::string& text) {
  raise<CommunicationError>(operation.name, text, call_site(),
                            "; a rank failed, left, or did not make the same call: every rank must call it");
}

void raise_mismatch(const Group& group, const Operation& operation, const std::string& other) {
  raise<CommunicationError>(operation.name, describe(group, operation), ": ", other,
                            ", expected the same call on all ranks", call_site(), "; every rank must call it");
}

void FailedWork::wait() { throw CommunicationError(failure_); }

void GroupMemberWork::wait() {
  raise<StateError>("wait", "this collective belongs to a group; wait for the work that end_group() returns");
}

C10dWork::C10dWork(std::shared_ptr<const Group> group, Operation operation, PendingWork pending)
    : group_(std::move(group)), operation_(std::move(operation)), pending_(std::move(pending)) {}

C10dWork::~C10dWork() {
  try {
    wait_for_done();
  } catch (...) {
    // Nobody is left to be told; a later call on this group reports the failure.
  }
  for (const auto& work : pending_.works) {
    try {
      wait_for(*work);
    } catch (...) {
      // As above; the others have to be waited for all the same.
    }
  }
}

void C10dWork::wait() {
  if (!failure_.empty()) throw CommunicationError(failure_);
  if (is_released_) return;
  try {
    wait_for_all();
    CollectiveGuard guard;
    for (const auto& finish : pending_.finishers) finish();
  } catch (const CommunicationError& error) {
    failure_ = error.what();
    pending_ = {};
    throw;
  }
  is_released_ = true;
  pending_ = {};
}

bool C10dWork::is_completed() {
  for (const auto& work : pending_.works) {
    if (!work->isCompleted()) return false;
  }
  return !pending_.done || pending_.done->query();
}

bool C10dWork::wait_for(c10d::Work& work) {
  // The backend's own time-out comes first and says more; this one covers a backend that waits behind a lost operation.
  constexpr milliseconds grace{1000};
  // With a time-out, a backend of an accelerator would block the host instead of making the current stream wait; it
  // watches the time itself.
  return work.wait(group_->device ? kNoTimeout : group_->timeout + grace);
}

void C10dWork::wait_for_done() {
  if (!pending_.done) return;
  const c10::Device device = pending_.done->device();
  pending_.done->block(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

void C10dWork::wait_for_all() {
  const auto start = steady_clock::now();
  wait_for_done();
  for (const auto& work : pending_.works) {
    bool finished = false;
    try {
      finished = wait_for(*work);
    } catch (const std::exception& error) {
      raise_failure(operation_, failure_text(*group_, operation_, start, backend_message(error)));
    }
    if (!finished) raise_failure(operation_, failure_text(*group_, operation_, start, "the operation was aborted"));
  }
}

}  // namespace dtensor
