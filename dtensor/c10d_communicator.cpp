#include <ATen/ops/empty_like.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <functional>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "dtensor/call_board.h"
#include "dtensor/call_site.h"
#include "dtensor/collective.h"
#include "dtensor/collective_call.h"
#include "dtensor/communicator.h"
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

/// Which group, for texts.
struct Group {
  std::string backend, label;
  int64_t rank = 0, size = 0;
  milliseconds timeout{0};
  bool on_device = false;
};

/// Which operation, for texts.
struct Operation {
  const char* name = "";
  std::string subject;
  int64_t bytes = 0;
  int64_t collectives = 0;
};

/// "blocks.3, 1,024 bytes over gloo group "shard" (rank 1 of 4)"
std::string describe(const Group& group, const Operation& operation) {
  return c10::str(operation.subject, operation.subject.empty() ? "" : ", ",
                  operation.collectives > 1 ? c10::str(operation.collectives, " collectives, ") : std::string(),
                  grouped_digits(operation.bytes), " bytes over ", group.backend, " group \"", group.label, "\" (rank ",
                  group.rank, " of ", group.size, ")");
}

/// The text is built only on failure. After a failure the state of the group is unknown, so the advice is the same
/// whatever the cause.
[[noreturn]] void raise_failure(const Group& group, const Operation& operation, steady_clock::time_point start,
                                const std::string& cause) {
  const auto elapsed = std::chrono::duration_cast<milliseconds>(steady_clock::now() - start);
  raise<CommunicationError>(operation.name, describe(group, operation), " failed after ", seconds_text(elapsed),
                            " (timeout ", seconds_text(group.timeout), "): ", cause, call_site(),
                            "; a rank failed, left, or did not make the same call: every rank must call it");
}

[[noreturn]] void raise_mismatch(const Group& group, const Operation& operation, const std::string& other) {
  raise<CommunicationError>(operation.name, describe(group, operation), ": ", other,
                            ", expected the same call on all ranks", call_site(), "; every rank must call it");
}

/// A collective that failed before it started; whoever waits is told.
class FailedWork final : public Work {
 public:
  explicit FailedWork(std::string failure) : failure_(std::move(failure)) {}
  void wait() override { throw CommunicationError(failure_); }
  bool is_completed() override { return true; }

 private:
  std::string failure_;
};

class C10dWork final : public Work {
 public:
  C10dWork(std::shared_ptr<const Group> group, Operation operation, std::vector<c10::intrusive_ptr<c10d::Work>> works,
           std::vector<at::Tensor> tensors, std::vector<std::function<void()>> finishers)
      : group_(std::move(group)),
        operation_(std::move(operation)),
        works_(std::move(works)),
        tensors_(std::move(tensors)),
        finishers_(std::move(finishers)) {}

  // The backend may still be writing, and its own references end with the operation, not with the caller's interest.
  ~C10dWork() override {
    for (const auto& work : works_) {
      try {
        wait_for(*work);
      } catch (...) {
        // Nobody is left to be told; a later call on this group reports the failure.
      }
    }
  }

  void wait() override {
    if (!failure_.empty()) throw CommunicationError(failure_);
    if (works_.empty()) return;
    try {
      wait_for_all();
      CollectiveGuard guard;
      for (const auto& finish : finishers_) finish();
    } catch (const CommunicationError& error) {
      failure_ = error.what();
      release();
      throw;
    }
    release();
  }

  bool is_completed() override {
    for (const auto& work : works_) {
      if (!work->isCompleted()) return false;
    }
    return true;
  }

 private:
  // The backend's own time-out comes first and says more; this one covers a backend that waits behind a lost operation.
  static constexpr milliseconds grace_{1000};

  bool wait_for(c10d::Work& work) {
    // With a time-out, a backend of an accelerator would block the host instead of making the current stream wait; it
    // watches the time itself.
    return work.wait(group_->on_device ? kNoTimeout : group_->timeout + grace_);
  }

  void wait_for_all() {
    const auto start = steady_clock::now();
    for (const auto& work : works_) {
      bool finished = false;
      try {
        finished = wait_for(*work);
      } catch (const std::exception& error) {
        raise_failure(*group_, operation_, start, backend_message(error));
      }
      if (!finished) raise_failure(*group_, operation_, start, "the operation was aborted");
    }
  }

  void release() {
    works_.clear();
    tensors_.clear();
    finishers_.clear();
  }

  std::shared_ptr<const Group> group_;
  Operation operation_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  std::vector<at::Tensor> tensors_;
  std::vector<std::function<void()>> finishers_;
  std::string failure_;
};

/// Stands for a collective that was started inside a group.
class GroupMemberWork final : public Work {
 public:
  void wait() override {
    raise<StateError>("wait", "this collective belongs to a group; wait for the work that end_group() returns");
  }
  bool is_completed() override { return false; }
};

class C10dCommunicator final : public Communicator {
 public:
  C10dCommunicator(c10::intrusive_ptr<c10d::Backend> backend, std::string label, milliseconds timeout,
                   std::shared_ptr<CallBoard> board)
      : backend_(std::move(backend)), board_(std::move(board)) {
    auto group = std::make_shared<Group>();
    group->backend = backend_->getBackendName();
    group->label = std::move(label);
    group->rank = backend_->getRank();
    group->size = backend_->getSize();
    group->timeout = timeout;
    group->on_device = backend_->getBoundDeviceId().has_value();
    group_ = std::move(group);
    is_gloo_ = group_->backend == "gloo";
    announces_ = is_gloo_ || board_ != nullptr;
  }

  int64_t rank() const override { return group_->rank; }
  int64_t size() const override { return group_->size; }
  std::string describe() const override {
    return c10::str(group_->backend, ", axis ", group_->label, ", rank ", rank(), " of ", size());
  }
  bool prefers_groups() const override { return backend_->supportsCoalescing(); }

  std::shared_ptr<Work> all_gather(const at::Tensor& output, const at::Tensor& input, OperationName name) override {
    check_gather_arguments(name.operation, output, input, size());
    const auto start = [&](Pending& pending) {
      at::Tensor full = movable(untracked_alias(output)), shard = movable(untracked_alias(input));
      pending.tensors = {full, shard};
      if (is_gloo_) {
        gather_by_broadcasts(full, shard, pending);
      } else {
        pending.works.push_back(backend_->_allgather_base(full, shard));
      }
    };
    return run(Collective::all_gather, name, output, 0, start);
  }

  std::shared_ptr<Work> reduce_scatter(const at::Tensor& output, const at::Tensor& input, OperationName name) override {
    check_gather_arguments(name.operation, input, output, size());
    check_reducible(name.operation, input);
    const auto start = [&](Pending& pending) {
      at::Tensor full = untracked_alias(input), shard = untracked_alias(output);
      pending.tensors = {full, shard};
      if (is_gloo_) {
        reduce_by_exchange(full, shard, pending);
      } else {
        pending.works.push_back(backend_->_reduce_scatter_base(shard, full));
      }
    };
    return run(Collective::reduce_scatter, name, input, 0, start);
  }

  std::shared_ptr<Work> all_reduce(const at::Tensor& tensor, ReduceOp op, OperationName name) override {
    check_contiguous(name.operation, "the tensor", tensor);
    check_reducible(name.operation, tensor);
    c10d::AllreduceOptions options;
    options.reduceOp = c10d_op(op, name.operation);
    const auto start = [&](Pending& pending) {
      pending.tensors = {untracked_alias(tensor)};
      std::vector<at::Tensor> tensors = pending.tensors;
      pending.works.push_back(backend_->allreduce(tensors, options));
    };
    return run(Collective::all_reduce, name, tensor, static_cast<int64_t>(op), start);
  }

  std::shared_ptr<Work> broadcast(const at::Tensor& tensor, int64_t root, OperationName name) override {
    check_contiguous(name.operation, "the tensor", tensor);
    if (root < 0 || root >= size()) {
      raise<ValueError>(name.operation, "root ", root, " is outside the group, expected 0 to ", size() - 1);
    }
    const auto start = [&](Pending& pending) {
      pending.tensors = {movable(untracked_alias(tensor))};
      pending.works.push_back(start_broadcast(pending.tensors.front(), root));
    };
    return run(Collective::broadcast, name, tensor, root, start);
  }

  void start_group() override {
    if (pending_group_) raise<StateError>("start_group", "a group is open already; end it before starting another");
    if (prefers_groups()) backend_->startCoalescing();
    pending_group_.emplace();
  }

  std::shared_ptr<Work> end_group() override {
    if (!pending_group_) raise<StateError>("end_group", "no group is open; call start_group() first");
    PendingGroup group = std::move(*pending_group_);
    pending_group_.reset();
    if (prefers_groups()) {
      const auto start = steady_clock::now();
      try {
        CollectiveGuard guard;
        auto work = backend_->endCoalescing();
        group.pending.works.clear();
        if (work) group.pending.works.push_back(std::move(work));
      } catch (const std::exception& error) {
        raise_failure(*group_, group.operation, start, backend_message(error));
      }
    }
    if (!group.failure.empty()) {
      make_work(std::move(group.operation), std::move(group.pending)).reset();
      return std::make_shared<FailedWork>(std::move(group.failure));
    }
    if (group.operation.collectives == 0) return completed_work();
    // One launch for the backend, so one collective of each kind for whoever counts.
    for (size_t kind = 0; kind < group.bytes.size(); ++kind) {
      if (size() > 1 && group.bytes[kind] > 0) count_collective(static_cast<Collective>(kind), group.bytes[kind]);
    }
    return make_work(std::move(group.operation), std::move(group.pending));
  }

  void barrier(OperationName name) override {
    if (size() == 1) return;
    if (pending_group_) raise<StateError>(name.operation, "a group is open; call end_group() first");
    const CollectiveCall call{.kind = Collective::barrier, .subject = std::string(name.subject)};
    const Operation operation = describe_operation(name, is_gloo_ ? CollectiveCall::kEncodedBytes : 0);
    if (announces_) meet(operation, call);
    // Over Gloo, whoever has heard of every rank has met them all.
    if (!is_gloo_) {
      Pending pending;
      start_or_raise(operation, [&] {
        c10d::BarrierOptions options;
        options.device = backend_->getBoundDeviceId();
        pending.works.push_back(backend_->barrier(options));
      });
      make_work(operation, std::move(pending))->wait();
    }
    count_collective(Collective::barrier, 0);
  }

 private:
  /// A started operation before it becomes a Work.
  struct Pending {
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    std::vector<at::Tensor> tensors;
    std::vector<std::function<void()>> finishers;
  };
  struct PendingGroup {
    Pending pending;
    Operation operation;
    std::array<int64_t, 5> bytes{};
    std::string failure;  // of the first member that could not start
  };

  static c10d::ReduceOp c10d_op(ReduceOp op, const char* operation) {
    switch (op) {
      case ReduceOp::sum:
        return c10d::ReduceOp::SUM;
      case ReduceOp::max:
        return c10d::ReduceOp::MAX;
      case ReduceOp::min:
        return c10d::ReduceOp::MIN;
      case ReduceOp::norm:
        break;
    }
    raise<NotSupportedError>(operation, "cannot reduce by norm, expected sum, max or min; sum the powers instead");
  }

  static Operation describe_operation(const OperationName& name, int64_t bytes) {
    return {name.operation, std::string(name.subject), bytes, 1};
  }

  /// Backends know few of the floating dtypes of 8 bits; where nothing is added they are bytes.
  static at::Tensor movable(const at::Tensor& tensor) {
    const bool is_byte = at::isFloatingType(tensor.scalar_type()) && tensor.element_size() == 1;
    return is_byte ? tensor.view(at::kByte) : tensor;
  }

  /// Gloo's allgather copies everything once more through a buffer of its own. Broadcasting every rank's slice in place
  /// moves the same bytes over the wire, needs no buffer, and was measured 2 to 4 times as fast from 100 kB upwards.
  void gather_by_broadcasts(const at::Tensor& full, const at::Tensor& shard, Pending& pending) {
    const at::Tensor rows = full.view({size(), -1});
    const at::Tensor own = rows.select(0, rank());
    if (own.data_ptr() != shard.data_ptr()) own.copy_(shard.view({-1}));
    for (int64_t root = 0; root < size(); ++root) pending.works.push_back(start_broadcast(rows.select(0, root), root));
  }

  /// Gloo reduce-scatters by an all-reduce of everything. Exchanging the slices and adding them here halves the bytes
  /// on the wire, adds in the order of the ranks whatever the size, and accumulates half precision in float.
  void reduce_by_exchange(at::Tensor& full, const at::Tensor& shard, Pending& pending) {
    at::Tensor received = at::empty_like(full);
    std::vector<int64_t> equal_splits;
    pending.tensors.push_back(received);
    pending.works.push_back(backend_->alltoall_base(received, full, equal_splits, equal_splits));
    pending.finishers.emplace_back([received, shard, ranks = size()] {
      at::Tensor output = shard.view({-1});
      at::sum_out(output, received.view({ranks, -1}), 0, /*keepdim=*/false, shard.scalar_type());
    });
  }

  c10::intrusive_ptr<c10d::Work> start_broadcast(const at::Tensor& tensor, int64_t root) {
    std::vector<at::Tensor> tensors{tensor};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    return backend_->broadcast(tensors, options);
  }

  /// Calls the backend. A failed start leaves no group open, so that the communicator can still be used or torn down.
  template <class Start>
  void start_or_raise(const Operation& operation, const Start& start) {
    const auto begin = steady_clock::now();
    try {
      CollectiveGuard guard;
      start();
    } catch (const std::exception& error) {
      const std::string cause = backend_message(error);
      abandon_group();
      raise_failure(*group_, operation, begin, cause);
    }
  }

  /// Returns when all ranks are about to make this call. Gloo pairs whatever comes: unlike calls of equal size would
  /// mix values up, and one that is sent more than it asked for ends the process from Gloo's own thread. A few bytes
  /// first cost a fraction of what a collective of a unit does, and say at once what the other rank does instead. A
  /// board does the same beside any backend.
  void meet(const Operation& operation, const CollectiveCall& call) {
    if (size() == 1) return;
    const auto table = board_ ? read_board(operation, call) : exchange(operation, call);
    if (const auto other = CollectiveCall::find_mismatch(table, rank())) raise_mismatch(*group_, operation, *other);
  }

  at::Tensor read_board(const Operation& operation, const CollectiveCall& call) {
    const auto start = steady_clock::now();
    try {
      CollectiveGuard guard;
      return board_->exchange(call);
    } catch (const std::exception& error) {
      raise_failure(*group_, operation, start, error.what());
    }
  }

  at::Tensor exchange(const Operation& operation, const CollectiveCall& call) {
    at::Tensor own, table;
    Pending pending;
    start_or_raise(operation, [&] {
      own = call.encode();
      table = at::zeros({size() * CollectiveCall::kEncodedBytes}, own.options());
      pending.tensors = {own, table};
      pending.works.push_back(backend_->_allgather_base(table, own));
    });
    make_work(operation, std::move(pending))->wait();
    return table;
  }

  template <class Start>
  std::shared_ptr<Work> run(Collective kind, const OperationName& name, const at::Tensor& larger, int64_t detail,
                            const Start& start) {
    // Every rank sees the same sizes, so every rank leaves here.
    if (larger.numel() == 0) return completed_work();
    Operation operation = describe_operation(name, static_cast<int64_t>(larger.nbytes()));
    Pending pending;
    if (announces_) {
      try {
        meet(operation, {kind, larger.scalar_type(), detail, operation.bytes, operation.subject});
      } catch (const CommunicationError& error) {
        if (!pending_group_) return std::make_shared<FailedWork>(error.what());
        if (pending_group_->failure.empty()) pending_group_->failure = error.what();
        return group_member();
      }
    }
    start_or_raise(operation, [&] { start(pending); });
    if (!pending_group_) {
      if (size() > 1) count_collective(kind, operation.bytes);
      return make_work(std::move(operation), std::move(pending));
    }
    PendingGroup& group = *pending_group_;
    group.bytes[static_cast<size_t>(kind)] += operation.bytes;
    if (group.operation.collectives == 0) {
      group.operation.name = operation.name;
      group.operation.subject = operation.subject;
    }
    group.operation.collectives += 1;
    group.operation.bytes += operation.bytes;
    for (auto& work : pending.works) group.pending.works.push_back(std::move(work));
    for (auto& tensor : pending.tensors) group.pending.tensors.push_back(std::move(tensor));
    for (auto& finish : pending.finishers) group.pending.finishers.push_back(std::move(finish));
    return group_member();
  }

  static std::shared_ptr<Work> group_member() {
    static const auto member = std::make_shared<GroupMemberWork>();
    return member;
  }

  std::shared_ptr<Work> make_work(Operation operation, Pending pending) {
    return std::make_shared<C10dWork>(group_, std::move(operation), std::move(pending.works),
                                      std::move(pending.tensors), std::move(pending.finishers));
  }

  void abandon_group() {
    if (!pending_group_) return;
    PendingGroup group = std::move(*pending_group_);
    pending_group_.reset();
    try {
      if (prefers_groups()) backend_->endCoalescing();
    } catch (const std::exception&) {
      // The first failure is the one to report.
    }
    // Waits for what has been started, so that its tensors outlive it.
    make_work(std::move(group.operation), std::move(group.pending)).reset();
  }

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::shared_ptr<CallBoard> board_;
  std::shared_ptr<const Group> group_;
  bool is_gloo_ = false;
  bool announces_ = false;  // ranks tell each other what they are about to do
  std::optional<PendingGroup> pending_group_;
};

}  // namespace

std::shared_ptr<Communicator> make_c10d_communicator(c10::intrusive_ptr<c10d::Backend> backend, std::string label,
                                                     milliseconds timeout, std::shared_ptr<CallBoard> board) {
  TORCH_INTERNAL_ASSERT(backend, "a communicator needs a backend");
  return std::make_shared<C10dCommunicator>(std::move(backend), std::move(label), timeout, std::move(board));
}

}  // namespace dtensor
