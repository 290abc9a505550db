#include <ATen/ops/empty_like.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <chrono>
#include <functional>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "dtensor/c10d_work.h"
#include "dtensor/call_board.h"
#include "dtensor/collective.h"
#include "dtensor/collective_call.h"
#include "dtensor/collective_watch.h"
#include "dtensor/communicator.h"
#include "dtensor/error.h"
#include "dtensor/graph_capture.h"

namespace dtensor {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

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
    group->device = backend_->getBoundDeviceId();
    group_ = std::move(group);
    watch_ = std::make_unique<CollectiveWatch>(group_);
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
    return run({Collective::all_gather, untracked_alias(output), untracked_alias(input)}, name, 0);
  }

  std::shared_ptr<Work> reduce_scatter(const at::Tensor& output, const at::Tensor& input, OperationName name) override {
    check_gather_arguments(name.operation, input, output, size());
    check_reducible(name.operation, input);
    return run({Collective::reduce_scatter, untracked_alias(output), untracked_alias(input)}, name, 0);
  }

  std::shared_ptr<Work> all_reduce(const at::Tensor& tensor, ReduceOp op, OperationName name) override {
    check_contiguous(name.operation, "the tensor", tensor);
    check_reducible(name.operation, tensor);
    const auto alias = untracked_alias(tensor);
    return run({Collective::all_reduce, alias, alias, c10d_op(op, name.operation)}, name, static_cast<int64_t>(op));
  }

  std::shared_ptr<Work> broadcast(const at::Tensor& tensor, int64_t root, OperationName name) override {
    check_contiguous(name.operation, "the tensor", tensor);
    if (root < 0 || root >= size()) {
      raise<ValueError>(name.operation, "root ", root, " is outside the group, expected 0 to ", size() - 1);
    }
    const auto alias = untracked_alias(tensor);
    return run({Collective::broadcast, alias, alias, c10d::ReduceOp::SUM, root}, name, root);
  }

  void start_group() override {
    if (pending_group_) raise<StateError>("start_group", "a group is open already; end it before starting another");
    watch_->check();
    pending_group_.emplace();
  }

  std::shared_ptr<Work> end_group() override {
    if (!pending_group_) raise<StateError>("end_group", "no group is open; call start_group() first");
    PendingGroup group = std::move(*pending_group_);
    pending_group_.reset();
    if (!group.failure.empty()) {
      make_work(std::move(group.operation), std::move(group.pending)).reset();
      return std::make_shared<FailedWork>(std::move(group.failure));
    }
    if (group.operation.collectives == 0) return completed_work();
    start_or_raise(group.operation, [&] { start_together(group.calls, group.pending); });
    // One launch for the backend, so one collective of each kind for whoever counts.
    for (size_t kind = 0; kind < group.bytes.size(); ++kind) {
      if (size() > 1 && group.bytes[kind] > 0) count_collective(static_cast<Collective>(kind), group.bytes[kind]);
    }
    return make_work(std::move(group.operation), std::move(group.pending));
  }

  void barrier(OperationName name) override {
    if (size() == 1) return;
    if (pending_group_) raise<StateError>(name.operation, "a group is open; call end_group() first");
    watch_->check();
    const CollectiveCall call{.kind = Collective::barrier, .subject = std::string(name.subject)};
    const Operation operation = describe_operation(name, is_gloo_ ? CollectiveCall::kEncodedBytes : 0);
    if (announces_) meet(operation, call);
    // Over Gloo, whoever has heard of every rank has met them all.
    if (!is_gloo_) {
      PendingWork pending;
      start_or_raise(operation, [&] {
        c10d::BarrierOptions options;
        options.device = group_->device;
        add(pending, backend_->barrier(options));
      });
      // The host has to wait here, and on a device would wait without end. Connecting the ranks has its own limit.
      const auto begin = steady_clock::now();
      while (group_->device && !pending.works.empty() && !pending.works.front()->isCompleted()) {
        if (steady_clock::now() - begin > group_->timeout) {
          raise_failure(operation, failure_text(*group_, operation, begin, "some ranks have not come"));
        }
        std::this_thread::sleep_for(milliseconds(1));
      }
      make_work(operation, std::move(pending))->wait();
    }
    count_collective(Collective::barrier, 0);
  }

 private:
  struct Call {
    Collective kind;
    at::Tensor output, input;
    c10d::ReduceOp op = c10d::ReduceOp::SUM;
    int64_t root = 0;
  };
  struct PendingGroup {
    PendingWork pending;
    std::vector<Call> calls;  // that start when the group ends
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
  void gather_by_broadcasts(const at::Tensor& full, const at::Tensor& shard, PendingWork& pending) {
    const at::Tensor rows = full.view({size(), -1});
    const at::Tensor own = rows.select(0, rank());
    if (own.data_ptr() != shard.data_ptr()) own.copy_(shard.view({-1}));
    for (int64_t root = 0; root < size(); ++root) pending.works.push_back(start_broadcast(rows.select(0, root), root));
  }

  /// Gloo reduce-scatters by an all-reduce of everything. Exchanging the slices and adding them here halves the bytes
  /// on the wire, adds in the order of the ranks whatever the size, and accumulates half precision in float.
  void reduce_by_exchange(at::Tensor& full, const at::Tensor& shard, PendingWork& pending) {
    at::Tensor received = at::empty_like(full);
    std::vector<int64_t> equal_splits;
    pending.tensors.push_back(received);
    pending.works.push_back(backend_->alltoall_base(received, full, equal_splits, equal_splits));
    pending.finishers.emplace_back([received, shard, ranks = size()] {
      at::Tensor output = shard.view({-1});
      at::sum_out(output, received.view({ranks, -1}), 0, /*keepdim=*/false, shard.scalar_type());
      free_buffer(received);
    });
  }

  c10::intrusive_ptr<c10d::Work> start_broadcast(const at::Tensor& tensor, int64_t root) {
    std::vector<at::Tensor> tensors{tensor};
    auto options = with_stream(c10d::BroadcastOptions());
    options.rootRank = root;
    return backend_->broadcast(tensors, options);
  }

  /// On a device, collectives run on the current stream.
  template <class Options>
  Options with_stream(Options options) const {
    options.asyncOp = !group_->device;
    return options;
  }

  void start(const Call& call, PendingWork& pending) {
    const bool adds = call.kind == Collective::reduce_scatter || call.kind == Collective::all_reduce;
    at::Tensor output = adds ? call.output : movable(call.output), input = adds ? call.input : movable(call.input);
    pending.tensors.insert(pending.tensors.end(), {output, input});
    switch (call.kind) {
      case Collective::all_gather:
        if (is_gloo_) return gather_by_broadcasts(output, input, pending);
        return add(pending, backend_->_allgather_base(output, input, with_stream(c10d::AllgatherOptions())));
      case Collective::reduce_scatter:
        if (is_gloo_) return reduce_by_exchange(input, output, pending);
        return add(pending, backend_->_reduce_scatter_base(output, input, with_stream(c10d::ReduceScatterOptions())));
      case Collective::all_reduce: {
        auto options = with_stream(c10d::AllreduceOptions());
        options.reduceOp = call.op;
        std::vector<at::Tensor> tensors{output};
        return add(pending, backend_->allreduce(tensors, options));
      }
      case Collective::broadcast:
        return add(pending, start_broadcast(output, call.root));
      case Collective::barrier:
        break;
    }
    TORCH_INTERNAL_ASSERT(false);
  }

  /// Those of one kind that follow each other go to the backend as one call. (Its startCoalescing and endCoalescing
  /// would take all, but the watchdog of torch 2.11 takes what they end on the current stream for done at once.)
  void start_together(const std::vector<Call>& calls, PendingWork& pending) {
    for (size_t begin = 0; begin < calls.size();) {
      const Call& first = calls[begin];
      size_t end = begin + 1;
      while (end < calls.size() && calls[end].kind == first.kind && calls[end].op == first.op) ++end;
      const c10::ArrayRef<Call> alike(&first, end - begin);
      begin = end;
      if (alike.size() == 1 || first.kind == Collective::broadcast) {
        for (const auto& call : alike) start(call, pending);
        continue;
      }
      std::vector<at::Tensor> outputs, inputs;
      for (const auto& call : alike) {
        const bool moves = call.kind == Collective::all_gather;
        outputs.push_back(moves ? movable(call.output) : call.output);
        inputs.push_back(moves ? movable(call.input) : call.input);
        pending.tensors.insert(pending.tensors.end(), {call.output, call.input});
      }
      if (first.kind == Collective::all_gather) {
        const auto options = with_stream(c10d::AllgatherOptions());
        add(pending, backend_->allgather_into_tensor_coalesced(outputs, inputs, options));
      } else if (first.kind == Collective::reduce_scatter) {
        const auto options = with_stream(c10d::ReduceScatterOptions());
        add(pending, backend_->reduce_scatter_tensor_coalesced(outputs, inputs, options));
      } else {
        auto options = with_stream(c10d::AllreduceCoalescedOptions());
        options.reduceOp = first.op;
        add(pending, backend_->allreduce_coalesced(outputs, options));
      }
    }
  }

  /// A backend that runs a collective on the current stream has no work to give.
  static void add(PendingWork& pending, c10::intrusive_ptr<c10d::Work> work) {
    if (work) pending.works.push_back(std::move(work));
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
      raise_failure(operation, failure_text(*group_, operation, begin, cause));
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
      raise_failure(operation, failure_text(*group_, operation, start, error.what()));
    }
  }

  at::Tensor exchange(const Operation& operation, const CollectiveCall& call) {
    at::Tensor own, table;
    PendingWork pending;
    start_or_raise(operation, [&] {
      own = call.encode();
      table = at::zeros({size() * CollectiveCall::kEncodedBytes}, own.options());
      pending.tensors = {own, table};
      pending.works.push_back(backend_->_allgather_base(table, own));
    });
    make_work(operation, std::move(pending))->wait();
    return table;
  }

  std::shared_ptr<Work> run(const Call& call, const OperationName& name, int64_t detail) {
    const auto& larger = call.kind == Collective::reduce_scatter ? call.input : call.output;
    // Every rank sees the same sizes, so every rank leaves here.
    if (larger.numel() == 0) return completed_work();
    if (!pending_group_) watch_->check();
    Operation operation = describe_operation(name, static_cast<int64_t>(larger.nbytes()));
    if (announces_) {
      try {
        meet(operation, {call.kind, larger.scalar_type(), detail, operation.bytes, operation.subject});
      } catch (const CommunicationError& error) {
        if (!pending_group_) return std::make_shared<FailedWork>(error.what());
        if (pending_group_->failure.empty()) pending_group_->failure = error.what();
        return group_member();
      }
    }
    PendingWork pending;
    if (!pending_group_) {
      start_or_raise(operation, [&] { start(call, pending); });
      if (size() > 1) count_collective(call.kind, operation.bytes);
      return make_work(std::move(operation), std::move(pending));
    }
    PendingGroup& group = *pending_group_;
    if (prefers_groups()) {
      group.calls.push_back(call);
    } else {
      start_or_raise(operation, [&] { start(call, group.pending); });
    }
    group.bytes[static_cast<size_t>(call.kind)] += operation.bytes;
    if (group.operation.collectives == 0) {
      group.operation.name = operation.name;
      group.operation.subject = operation.subject;
    }
    group.operation.collectives += 1;
    group.operation.bytes += operation.bytes;
    return group_member();
  }

  static std::shared_ptr<Work> group_member() {
    static const auto member = std::make_shared<GroupMemberWork>();
    return member;
  }

  std::shared_ptr<Work> make_work(Operation operation, PendingWork pending) {
    if (group_->device && pending.works.empty()) pending.done = mark(operation);
    return std::make_shared<C10dWork>(group_, std::move(operation), std::move(pending));
  }

  /// A point on the current stream behind what was started there.
  std::shared_ptr<const c10::Event> mark(const Operation& operation) {
    const c10::Device device = *group_->device;
    auto done = std::make_shared<c10::Event>(device.type());
    done->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    if (!is_capturing(device)) watch_->started(operation, done);
    return done;
  }

  void abandon_group() noexcept {
    if (!pending_group_) return;
    PendingGroup group = std::move(*pending_group_);
    pending_group_.reset();
    try {
      // Waits for what has been started, so that its tensors outlive it.
      make_work(std::move(group.operation), std::move(group.pending)).reset();
    } catch (const std::exception&) {
      // The first failure is the one to report.
    }
  }

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::shared_ptr<CallBoard> board_;
  std::shared_ptr<const Group> group_;
  bool is_gloo_ = false;
  bool announces_ = false;  // ranks tell each other what they are about to do
  std::optional<PendingGroup> pending_group_;
  std::unique_ptr<CollectiveWatch> watch_;
};

}  // namespace

std::shared_ptr<Communicator> make_c10d_communicator(c10::intrusive_ptr<c10d::Backend> backend, std::string label,
                                                     milliseconds timeout, std::shared_ptr<CallBoard> board) {
  TORCH_INTERNAL_ASSERT(backend, "a communicator needs a backend");
  return std::make_shared<C10dCommunicator>(std::move(backend), std::move(label), timeout, std::move(board));
}

}  // namespace dtensor
