#include "tests/testing/recorded_backend.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "dtensor/collective.h"
#include "hsdp/launch/backend_builtin.h"
#include "tests/testing/private_streams.h"

namespace testing_support {
namespace {

std::atomic<int64_t> until_hang{-1};

constexpr const char* kOwnEvent = "backend";  // the checker lets these stand inside a group

void make_wait(const c10::Stream& waiting, const c10::Stream& first) {
  void* event = nullptr;
  recorder::record(&event, first, kOwnEvent);
  recorder::block(event, waiting, kOwnEvent);
  recorder::destroy(event);
}

class RecordedWork final : public c10d::Work {
 public:
  RecordedWork(int rank, c10d::OpType type, c10::Stream stream, std::vector<at::Tensor> tensors)
      : Work(rank, type), ended_(stream.device_type()), stream_(stream), tensors_(std::move(tensors)) {
    ended_.record(stream);
  }
  bool isCompleted() override {
    if (retrieveOpType() != c10d::OpType::BARRIER) return ended_.query();
    // Who asks for a barrier's end stands still until it comes: that is a wait of the host.
    if (recorded::is_stalled(stream_)) return false;
    ended_.synchronize();
    return true;
  }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds timeout) override {
    ended_.block(recorder::current_stream(stream_.device()));
    if (timeout != kNoTimeout || retrieveOpType() == c10d::OpType::BARRIER) {
      TORCH_CHECK(!recorded::is_stalled(stream_), "the collective timed out after ", timeout.count(), " ms");
      ended_.synchronize();
    }
    tensors_.clear();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }

 private:
  c10::Event ended_;
  c10::Stream stream_;
  std::vector<at::Tensor> tensors_;
};

class RecordedBackend final : public c10d::Backend {
 public:
  RecordedBackend(c10::intrusive_ptr<c10d::Backend> below, c10::Device device)
      : Backend(below->getRank(), below->getSize()),
        below_(std::move(below)),
        device_(device),
        stream_(recorder::new_stream(device, -1)) {
    // One text on all ranks of this group, and another one for every other group.
    static std::atomic<int64_t> made{0};
    auto name = at::tensor({static_cast<int64_t>(getpid()), made++}, at::kLong);
    std::vector<at::Tensor> names{name};
    below_->broadcast(names)->wait();
    communicator_ = c10::str("group ", name[0].item<int64_t>(), ".", name[1].item<int64_t>(), " of ", getSize());
    recorder::add({.kind = Logged::note, .name = "made", .call = {.communicator = communicator_}});
  }

  const std::string getBackendName() const override { return "recorded"; }
  bool supportsCoalescing() const override { return true; }
  void abort() override {
    aborted_ = true;
    recorded::resume();
  }

  void startCoalescing() override {
    check_usable();
    TORCH_CHECK(!group_, "a group is open");
    group_.emplace();
    add_bracket(Logged::group_start);
  }

  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    TORCH_CHECK(group_, "no group is open");
    const Group group = std::move(*group_);
    group_.reset();
    add_bracket(Logged::group_end);
    if (group.members.empty()) return nullptr;
    TORCH_CHECK(recorder::are_live(group.ranges), "a member's memory was freed before the group ended");
    const bool hangs = group.hangs || recorded::is_stalled(*group.stream);
    for (const auto& member : group.members) {
      if (!hangs) move(member);
    }
    if (!group.is_async) return nullptr;
    return c10::make_intrusive<RecordedWork>(getRank(), c10d::OpType::COALESCED, *group.stream, group.tensors);
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override {
    return run(c10d::OpType::_ALLGATHER_BASE, {"all_gather", input, "", -1}, options.asyncOp, {input}, {output},
               [this, output = on_host(output), input = on_host(input)] {
                 auto full = output.view({-1}).view(at::kByte), shard = input.clone().view({-1}).view(at::kByte);
                 below_->_allgather_base(full, shard)->wait();
               });
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(options.reduceOp == c10d::ReduceOp::SUM);
    return run(c10d::OpType::_REDUCE_SCATTER_BASE, {"reduce_scatter", output, "sum", -1}, options.asyncOp, {input},
               {output}, [this, output = on_host(output), input = on_host(input)] {
                 auto full = input, received = at::empty_like(full), shard = output.view({-1});
                 std::vector<int64_t> equal_splits;
                 below_->alltoall_base(received, full, equal_splits, equal_splits)->wait();
                 at::sum_out(shard, received.view({getSize(), -1}), 0, /*keepdim=*/false, shard.scalar_type());
               });
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                                 std::vector<at::Tensor>& inputs,
                                                                 const c10d::AllgatherOptions& options) override {
    startCoalescing();
    for (size_t i = 0; i < outputs.size(); ++i) _allgather_base(outputs[i], inputs.at(i), options);
    return endCoalescing();
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                                 std::vector<at::Tensor>& inputs,
                                                                 const c10d::ReduceScatterOptions& options) override {
    startCoalescing();
    for (size_t i = 0; i < outputs.size(); ++i) _reduce_scatter_base(outputs[i], inputs.at(i), options);
    return endCoalescing();
  }
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                                     const c10d::AllreduceCoalescedOptions& options) override {
    startCoalescing();
    for (const auto& tensor : tensors) {
      std::vector<at::Tensor> one{tensor};
      allreduce(one, options);
    }
    return endCoalescing();
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    return run(c10d::OpType::ALLREDUCE, {"all_reduce", tensors.at(0), name_of(options.reduceOp), -1}, options.asyncOp,
               {tensors[0]}, {tensors[0]}, [this, tensor = on_host(tensors[0]), op = options.reduceOp] {
                 std::vector<at::Tensor> host{tensor};
                 c10d::AllreduceOptions below;
                 below.reduceOp = op;
                 below_->allreduce(host, below)->wait();
               });
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    const bool is_root = options.rootRank == getRank();
    const std::vector<at::Tensor> none;
    return run(c10d::OpType::BROADCAST, {"broadcast", tensors.at(0), "", options.rootRank}, options.asyncOp,
               is_root ? tensors : none, is_root ? none : tensors,
               [this, tensor = on_host(tensors[0]), root = options.rootRank] {
                 std::vector<at::Tensor> host{tensor.view({-1}).view(at::kByte)};
                 c10d::BroadcastOptions below;
                 below.rootRank = root;
                 below_->broadcast(host, below)->wait();
               });
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    TORCH_CHECK(options.device == device_, "a barrier on another device than the rank's");
    auto work = run(c10d::OpType::BARRIER, {"barrier", at::Tensor(), "", -1}, options.asyncOp, {}, {}, [this] {
      std::vector<at::Tensor> token{at::zeros({1})};
      below_->allreduce(token)->wait();
    });
    if (!work) recorder::wait(recorder::current_stream(device_), "barrier");
    return work;
  }

 private:
  struct Call {
    const char* name;
    at::Tensor counted;
    std::string op;
    int64_t root;
  };
  struct Group {
    std::optional<c10::Stream> stream;
    bool is_async = false, hangs = false;
    std::vector<std::function<void()>> members;  // own nothing, as the real ones
    std::vector<ByteRange> ranges;
    std::vector<at::Tensor> tensors;  // of asynchronous ones
  };

  static std::string name_of(const c10d::ReduceOp& op) {
    if (op == c10d::ReduceOp::SUM) return "sum";
    if (op == c10d::ReduceOp::MAX) return "max";
    if (op == c10d::ReduceOp::MIN) return "min";
    TORCH_CHECK(false, "an operation that the tests do not know");
  }

  // Its memory, without owning it.
  static at::Tensor on_host(const at::Tensor& tensor) {
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), at::TensorOptions(tensor.scalar_type()));
  }

  static void move(const std::function<void()>& member) {
    const recorder::Inside inside;
    dtensor::CollectiveGuard guard;
    member();
  }

  void check_usable() const { TORCH_CHECK(!aborted_, "the communicator was aborted"); }

  void add_bracket(Logged kind) const {
    recorder::add({.kind = kind,
                   .stream = recorder::name_of(recorder::current_stream(device_)),
                   .call = {.communicator = communicator_}});
  }

  c10::intrusive_ptr<c10d::Work> run(c10d::OpType type, const Call& call, bool is_async,
                                     const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes,
                                     std::function<void()> member) {
    check_usable();
    std::vector<at::Tensor> tensors = reads;
    tensors.insert(tensors.end(), writes.begin(), writes.end());
    for (const auto& tensor : tensors) {
      TORCH_CHECK(tensor.device() == device_, "a tensor on ", tensor.device(), ", expected ", device_);
      TORCH_CHECK(tensor.is_contiguous(), "a tensor that is not contiguous");
    }
    const auto current = recorder::current_stream(device_);
    const auto stream = is_async ? stream_ : current;
    if (is_async) make_wait(stream, current);
    bool hangs = recorded::is_stalled(stream);
    if (until_hang >= 0 && until_hang-- == 0) {
      recorded::stall(stream);
      hangs = true;
    }
    recorder::add({.kind = Logged::collective,
                   .name = call.name,
                   .stream = recorder::name_of(stream),
                   .reads = recorder::ranges(reads),
                   .writes = recorder::ranges(writes),
                   .call = {.communicator = communicator_,
                            .dtype = call.counted.defined() ? c10::toString(call.counted.scalar_type()) : "",
                            .op = call.op,
                            .count = call.counted.defined() ? call.counted.numel() : 0,
                            .root = call.root,
                            .own_stream = is_async}});
    if (group_) {
      group_->stream = stream;
      group_->is_async |= is_async;
      group_->hangs |= hangs;
      group_->members.push_back(std::move(member));
      const auto ranges = recorder::ranges(tensors);
      group_->ranges.insert(group_->ranges.end(), ranges.begin(), ranges.end());
      if (is_async) group_->tensors.insert(group_->tensors.end(), tensors.begin(), tensors.end());
    } else if (!hangs) {
      move(member);
    }
    if (!is_async) return nullptr;
    return c10::make_intrusive<RecordedWork>(getRank(), type, stream, std::move(tensors));
  }

  c10::intrusive_ptr<c10d::Backend> below_;
  c10::Device device_;
  c10::Stream stream_;  // of asynchronous collectives
  std::string communicator_;
  std::optional<Group> group_;
  std::atomic<bool> aborted_{false};
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_recorded_backend(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank,
                                                        int64_t size, std::chrono::milliseconds timeout,
                                                        c10::Device device) {
  return c10::make_intrusive<RecordedBackend>(hsdp::gloo_backend().make(store, rank, size, timeout, device), device);
}

void hang_collective(int64_t n) { until_hang = n; }

}  // namespace testing_support
