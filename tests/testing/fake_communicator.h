#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dtensor/communicator.h"

namespace testing_support {

/// Plays one rank of a group without the others. Results appear in wait() and not before, so that whoever reads too
/// early reads old values. Counts collectives as a real communicator does, and keeps a record of each.
class FakeCommunicator : public dtensor::Communicator {
 public:
  struct Call {
    std::string operation, subject;
    at::ScalarType dtype;
    int64_t numel;  // of the larger side
    int group;      // 0 outside a group, else the number of the group, from 1
  };
  /// What another rank contributes: a tensor like `own`, which is this rank's input.
  using Contribution = std::function<at::Tensor(int64_t rank, const at::Tensor& own)>;

  /// Without a contribution, other ranks contribute zeros.
  FakeCommunicator(int64_t rank, int64_t size, bool prefers_groups = false, Contribution contribution = nullptr);

  /// Lets the n-th wait from now on (1 is the next) throw a CommunicationError.
  void fail_wait(int n) { fail_in_ = n; }
  const std::vector<Call>& calls() const { return calls_; }
  void clear_calls() { calls_.clear(); }

  int64_t rank() const override { return rank_; }
  int64_t size() const override { return size_; }
  std::string describe() const override;
  bool prefers_groups() const override { return prefers_groups_; }
  std::shared_ptr<dtensor::Work> all_gather(const at::Tensor& output, const at::Tensor& input,
                                            dtensor::OperationName name) override;
  std::shared_ptr<dtensor::Work> reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                                dtensor::OperationName name) override;
  std::shared_ptr<dtensor::Work> all_reduce(const at::Tensor& tensor, dtensor::ReduceOp op,
                                            dtensor::OperationName name) override;
  std::shared_ptr<dtensor::Work> broadcast(const at::Tensor& tensor, int64_t root,
                                           dtensor::OperationName name) override;
  void start_group() override;
  std::shared_ptr<dtensor::Work> end_group() override;
  void barrier(dtensor::OperationName name) override;

 private:
  std::shared_ptr<dtensor::Work> record(dtensor::OperationName name, const at::Tensor& larger,
                                        std::function<void()> effect);
  std::vector<at::Tensor> inputs_of_all(const at::Tensor& own) const;

  int64_t rank_, size_;
  bool prefers_groups_;
  Contribution contribution_;
  std::vector<Call> calls_;
  int groups_ = 0;
  bool in_group_ = false;
  std::vector<std::function<void()>> group_effects_;
  int fail_in_ = 0;
};

}  // namespace testing_support
