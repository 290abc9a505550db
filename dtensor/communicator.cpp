#include "dtensor/communicator.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cctype>

#include "dtensor/collective.h"
#include "dtensor/dtensor_impl.h"
#include "dtensor/error.h"

namespace dtensor {

Work::~Work() = default;
Communicator::~Communicator() = default;

namespace {

struct AtomicCounts {
  std::atomic<int64_t> all_gathers{0}, reduce_scatters{0}, all_reduces{0}, broadcasts{0}, barriers{0};
  std::atomic<int64_t> all_gather_bytes{0}, reduce_scatter_bytes{0}, all_reduce_bytes{0};
};

AtomicCounts& counts() {
  static AtomicCounts instance;
  return instance;
}

class CompletedWork final : public Work {
 public:
  void wait() override {}
  bool is_completed() override { return true; }
};

/// The null object of communication: user code needs no `if (size > 1)`.
class SelfCommunicator final : public Communicator {
 public:
  int64_t rank() const override { return 0; }
  int64_t size() const override { return 1; }
  std::string describe() const override { return "self, rank 0 of 1"; }
  bool prefers_groups() const override { return false; }

  std::shared_ptr<Work> all_gather(const at::Tensor& output, const at::Tensor& input, OperationName name) override {
    check_gather_arguments(name.operation, output, input, 1);
    return copy(output, input);
  }
  std::shared_ptr<Work> reduce_scatter(const at::Tensor& output, const at::Tensor& input, OperationName name) override {
    check_gather_arguments(name.operation, input, output, 1);
    return copy(output, input);
  }
  std::shared_ptr<Work> all_reduce(const at::Tensor& tensor, ReduceOp, OperationName name) override {
    check_plain(name.operation, tensor);
    return completed_work();
  }
  std::shared_ptr<Work> broadcast(const at::Tensor& tensor, int64_t root, OperationName name) override {
    check_plain(name.operation, tensor);
    if (root != 0) raise<ValueError>(name.operation, "root ", root, " is outside a group of 1 rank, expected 0");
    return completed_work();
  }
  void start_group() override {}
  std::shared_ptr<Work> end_group() override { return completed_work(); }
  void barrier(OperationName) override {}

 private:
  static std::shared_ptr<Work> copy(const at::Tensor& output, const at::Tensor& input) {
    if (output.numel() > 0 && output.data_ptr() != input.data_ptr()) {
      CollectiveGuard guard;
      untracked_alias(output).view({-1}).copy_(untracked_alias(input).view({-1}));
    }
    return completed_work();
  }
};

}  // namespace

void count_collective(Collective kind, int64_t bytes) {
  AtomicCounts& c = counts();
  switch (kind) {
    case Collective::all_gather:
      ++c.all_gathers;
      c.all_gather_bytes += bytes;
      break;
    case Collective::reduce_scatter:
      ++c.reduce_scatters;
      c.reduce_scatter_bytes += bytes;
      break;
    case Collective::all_reduce:
      ++c.all_reduces;
      c.all_reduce_bytes += bytes;
      break;
    case Collective::broadcast:
      ++c.broadcasts;
      break;
    case Collective::barrier:
      ++c.barriers;
      break;
  }
}

CollectiveCounts collective_counts() {
  const AtomicCounts& c = counts();
  CollectiveCounts result;
  result.all_gathers = c.all_gathers;
  result.reduce_scatters = c.reduce_scatters;
  result.all_reduces = c.all_reduces;
  result.broadcasts = c.broadcasts;
  result.barriers = c.barriers;
  result.all_gather_bytes = c.all_gather_bytes;
  result.reduce_scatter_bytes = c.reduce_scatter_bytes;
  result.all_reduce_bytes = c.all_reduce_bytes;
  return result;
}

void reset_collective_counts() {
  AtomicCounts& c = counts();
  for (auto* counter : {&c.all_gathers, &c.reduce_scatters, &c.all_reduces, &c.broadcasts, &c.barriers,
                        &c.all_gather_bytes, &c.reduce_scatter_bytes, &c.all_reduce_bytes}) {
    *counter = 0;
  }
}

std::shared_ptr<Work> completed_work() {
  static const auto work = std::make_shared<CompletedWork>();
  return work;
}

std::string backend_message(const std::exception& error) {
  const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
  std::string text = c10_error ? c10_error->what_without_backtrace() : error.what();
  text = text.substr(0, text.find('\n'));
  if (!text.empty() && text.front() == '[') {
    const size_t end = text.find("] ");
    if (end != std::string::npos && text.substr(0, end).find(".cc:") != std::string::npos) text.erase(0, end + 2);
  }
  while (!text.empty() && (std::isspace(static_cast<unsigned char>(text.back())) || text.back() == '.')) {
    text.pop_back();
  }
  return text.empty() ? "no message from the backend" : text;
}

at::Tensor untracked_alias(const at::Tensor& tensor) { return tensor.variable_data(); }

void free_buffer(const at::Tensor& buffer) {
  auto* storage = buffer.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
  storage->set_nbytes(0);
}

void check_plain(const char* operation, const at::Tensor& tensor) {
  auto* impl = distributed_impl(tensor);
  if (impl == nullptr) return;
  raise<NotSupportedError>(operation, impl->describe(),
                           " is sharded, of which each rank holds another part, expected a plain tensor; gradients are "
                           "already reduced when backward() returns: leave this call out");
}

void check_contiguous(const char* operation, const char* argument, const at::Tensor& tensor) {
  check_plain(operation, tensor);
  if (!tensor.is_contiguous()) {
    raise<ValueError>(operation, argument, " of sizes ", tensor.sizes(), " and strides ", tensor.strides(),
                      " is not contiguous, expected a contiguous tensor; call contiguous()");
  }
}

void check_gather_arguments(const char* operation, const at::Tensor& full, const at::Tensor& shard, int64_t ranks) {
  check_contiguous(operation, "the full tensor", full);
  check_contiguous(operation, "the shard", shard);
  if (full.scalar_type() != shard.scalar_type()) {
    raise<ValueError>(operation, "the full tensor is ", full.scalar_type(), " and the shard ", shard.scalar_type(),
                      ", expected one dtype");
  }
  if (full.numel() != ranks * shard.numel()) {
    raise<ValueError>(operation, "the full tensor has ", full.numel(), " elements and the shard ", shard.numel(),
                      ", expected ", ranks * shard.numel(), " in the full tensor of ", ranks, " ranks");
  }
}

void check_reducible(const char* operation, const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kInt:
    case at::kLong:
      return;
    default:
      raise<NotSupportedError>(operation, "cannot reduce ", tensor.scalar_type(),
                               ", expected Float, Double, Half, BFloat16, Int or Long; convert the tensor first");
  }
}

std::shared_ptr<Communicator> make_self_communicator() { return std::make_shared<SelfCommunicator>(); }

}  // namespace dtensor
