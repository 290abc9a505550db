#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dtensor/communicator.h"

namespace c10d {
class Work;
}

/// The collectives of a c10d communicator on their way, and what is said of those that fail.
namespace dtensor {

/// Which group, for texts.
struct Group {
  std::string backend, label;
  int64_t rank = 0, size = 0;
  std::chrono::milliseconds timeout{0};
  /// That the backend is bound to; unset on the host.
  std::optional<c10::Device> device;
};

/// Which operation, for texts.
struct Operation {
  const char* name = "";
  std::string subject;
  int64_t bytes = 0;
  int64_t collectives = 0;
};

/// "blocks.3, 1,024 bytes over staged group "shard" (rank 1 of 4) failed after 3.01 s (timeout 3 s): cause"
std::string failure_text(const Group& group, const Operation& operation, std::chrono::steady_clock::time_point start,
                         const std::string& cause);
/// Throws CommunicationError with that text, the place of the call in the program, and the same advice whatever the
/// cause: after a failure the state of the group is unknown.
[[noreturn]] void raise_failure(const Operation& operation, const std::string& text);
[[noreturn]] void raise_mismatch(const Group& group, const Operation& operation, const std::string& other);

/// A collective that failed before it started; whoever waits is told.
class FailedWork final : public Work {
 public:
  explicit FailedWork(std::string failure) : failure_(std::move(failure)) {}
  void wait() override;
  bool is_completed() override { return true; }

 private:
  std::string failure_;
};

/// Stands for a collective that was started inside a group.
class GroupMemberWork final : public Work {
 public:
  void wait() override;
  bool is_completed() override { return false; }
};

/// A started operation before it becomes a Work.
struct PendingWork {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  /// Recorded behind the operation, where the backend ran it on the current stream and gave no work for it.
  std::shared_ptr<const c10::Event> done;
  std::vector<at::Tensor> tensors;
  std::vector<std::function<void()>> finishers;
};

class C10dWork final : public Work {
 public:
  C10dWork(std::shared_ptr<const Group> group, Operation operation, PendingWork pending);
  // The backend may still be writing, and its own references end with the operation, not with the caller's interest.
  ~C10dWork() override;

  void wait() override;
  bool is_completed() override;
  bool is_on_stream() const override { return pending_.done && pending_.works.empty(); }

 private:
  bool wait_for(c10d::Work& work);
  void wait_for_done();
  void wait_for_all();

  std::shared_ptr<const Group> group_;
  Operation operation_;
  PendingWork pending_;
  bool is_released_ = false;
  std::string failure_;
};

}  // namespace dtensor
