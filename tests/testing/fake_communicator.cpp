#include "tests/testing/fake_communicator.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <utility>

#include "dtensor/collective.h"
#include "dtensor/error.h"

namespace testing_support {

using dtensor::Collective;
using dtensor::OperationName;
using dtensor::Work;

namespace {

class FakeWork : public Work {
 public:
  FakeWork(std::vector<std::function<void()>> effects, int* fail_in)
      : effects_(std::move(effects)), fail_in_(fail_in) {}
  void wait() override {
    if (*fail_in_ > 0 && --*fail_in_ == 0) {
      dtensor::raise<dtensor::CommunicationError>("fake", "the wait that was told to fail");
    }
    dtensor::CollectiveGuard guard;
    for (const auto& effect : effects_) effect();
    effects_.clear();
  }
  bool is_completed() override { return effects_.empty(); }

 private:
  std::vector<std::function<void()>> effects_;
  int* fail_in_;
};

}  // namespace

FakeCommunicator::FakeCommunicator(int64_t rank, int64_t size, bool prefers_groups, Contribution contribution)
    : rank_(rank), size_(size), prefers_groups_(prefers_groups), contribution_(std::move(contribution)) {}

std::string FakeCommunicator::describe() const { return c10::str("fake, rank ", rank_, " of ", size_); }

std::vector<at::Tensor> FakeCommunicator::inputs_of_all(const at::Tensor& own) const {
  std::vector<at::Tensor> inputs;
  for (int64_t rank = 0; rank < size_; ++rank) {
    if (rank == rank_) {
      inputs.push_back(own.clone());
    } else {
      inputs.push_back(contribution_ ? contribution_(rank, own) : at::zeros_like(own));
    }
  }
  return inputs;
}

std::shared_ptr<Work> FakeCommunicator::record(OperationName name, const at::Tensor& larger,
                                               std::function<void()> effect) {
  calls_.push_back(
      {name.operation, std::string(name.subject), larger.scalar_type(), larger.numel(), in_group_ ? groups_ : 0});
  std::vector<std::function<void()>> effects;
  (in_group_ ? group_effects_ : effects).push_back(std::move(effect));
  return std::make_shared<FakeWork>(std::move(effects), &fail_in_);
}

std::shared_ptr<Work> FakeCommunicator::all_gather(const at::Tensor& output, const at::Tensor& input,
                                                   OperationName name) {
  dtensor::check_gather_arguments(name.operation, output, input, size_);
  dtensor::count_collective(Collective::all_gather, static_cast<int64_t>(output.nbytes()));
  return record(name, output,
                [this, output, input] { output.view({-1}).copy_(at::cat(inputs_of_all(input.view({-1})))); });
}

std::shared_ptr<Work> FakeCommunicator::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                                       OperationName name) {
  dtensor::check_gather_arguments(name.operation, input, output, size_);
  dtensor::count_collective(Collective::reduce_scatter, static_cast<int64_t>(input.nbytes()));
  return record(name, input, [this, output, input] {
    output.view({-1}).copy_(at::stack(inputs_of_all(input.view({-1}))).sum(0).view({size_, -1})[rank_]);
  });
}

std::shared_ptr<Work> FakeCommunicator::all_reduce(const at::Tensor& tensor, dtensor::ReduceOp op, OperationName name) {
  dtensor::count_collective(Collective::all_reduce, static_cast<int64_t>(tensor.nbytes()));
  return record(name, tensor, [this, tensor, op] {
    const at::Tensor all = at::stack(inputs_of_all(tensor));
    tensor.copy_(op == dtensor::ReduceOp::sum ? all.sum(0) : op == dtensor::ReduceOp::max ? all.amax(0) : all.amin(0));
  });
}

std::shared_ptr<Work> FakeCommunicator::broadcast(const at::Tensor& tensor, int64_t root, OperationName name) {
  dtensor::count_collective(Collective::broadcast, 0);
  return record(name, tensor, [this, tensor, root] { tensor.copy_(inputs_of_all(tensor)[root]); });
}

void FakeCommunicator::start_group() {
  TORCH_INTERNAL_ASSERT(!in_group_, "a group is open already");
  in_group_ = true;
  ++groups_;
}

std::shared_ptr<Work> FakeCommunicator::end_group() {
  TORCH_INTERNAL_ASSERT(in_group_, "no group is open");
  in_group_ = false;
  return std::make_shared<FakeWork>(std::exchange(group_effects_, {}), &fail_in_);
}

void FakeCommunicator::barrier(OperationName name) {
  dtensor::count_collective(Collective::barrier, 0);
  calls_.push_back({name.operation, std::string(name.subject), at::kInt, 0, 0});
}

}  // namespace testing_support
