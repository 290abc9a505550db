#include "tests/testing/staged_backend.h"

#include <ATen/ATen.h>

#include <functional>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "dtensor/collective.h"
#include "hsdp/launch/backend_builtin.h"

namespace testing_support {
namespace {

class StagedWork final : public c10d::Work {
 public:
  StagedWork(c10::intrusive_ptr<c10d::Work> below, std::function<void()> copy_back)
      : below_(std::move(below)), copy_back_(std::move(copy_back)) {}
  bool isCompleted() override { return below_->isCompleted(); }
  bool wait(std::chrono::milliseconds timeout) override {
    TORCH_CHECK(timeout == kNoTimeout, "a wait with a time-out, which on a device with streams would block the host");
    const bool finished = below_->wait(timeout);
    dtensor::CollectiveGuard guard;
    if (finished && copy_back_) std::exchange(copy_back_, nullptr)();
    return finished;
  }

 private:
  c10::intrusive_ptr<c10d::Work> below_;
  std::function<void()> copy_back_;
};

class StagedBackend final : public c10d::Backend {
 public:
  StagedBackend(c10::intrusive_ptr<c10d::Backend> below, c10::Device device)
      : Backend(below->getRank(), below->getSize()), below_(std::move(below)), device_(device) {}

  const std::string getBackendName() const override { return "staged"; }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions&) override {
    std::vector<at::Tensor> own{staged(input).view({-1})};
    const auto gathered = at::empty({getSize(), own.front().numel()}, own.front().options());
    std::vector<std::vector<at::Tensor>> rows{gathered.unbind(0)};
    return start(below_->allgather(rows, own), output, gathered);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(options.reduceOp == c10d::ReduceOp::SUM);
    std::vector<at::Tensor> whole{staged(input).view({getSize(), -1})};
    return start(below_->allreduce(whole), output, whole.front().select(0, getRank()));
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    std::vector<at::Tensor> host{staged(tensors.at(0))};
    return start(below_->allreduce(host, options), tensors.at(0), host.front());
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    std::vector<at::Tensor> host{staged(tensors.at(0))};
    return start(below_->broadcast(host, options), tensors.at(0), host.front());
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    TORCH_CHECK(options.device == device_, "a barrier on another device than the rank's");
    std::vector<at::Tensor> token{at::zeros({1})};
    return below_->allreduce(token);
  }

 private:
  at::Tensor staged(const at::Tensor& tensor) const {
    TORCH_CHECK(tensor.device() == device_, "a tensor on ", tensor.device(), ", expected ", device_);
    return tensor.to(at::kCPU);
  }
  static c10::intrusive_ptr<c10d::Work> start(c10::intrusive_ptr<c10d::Work> work, at::Tensor output,
                                              at::Tensor result) {
    return c10::make_intrusive<StagedWork>(std::move(work), [output = std::move(output), result = std::move(result)] {
      output.copy_(result.view(output.sizes()));
    });
  }

  c10::intrusive_ptr<c10d::Backend> below_;
  c10::Device device_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_staged_backend(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank,
                                                      int64_t size, std::chrono::milliseconds timeout,
                                                      c10::Device device) {
  return c10::make_intrusive<StagedBackend>(hsdp::gloo_backend().make(store, rank, size, timeout, device), device);
}

}  // namespace testing_support
