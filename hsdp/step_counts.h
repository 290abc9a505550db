#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "hsdp/fused_batches.h"

namespace hsdp {

/// How often FusedAdamW has stepped each parameter, where the kernel reads it: on the device, one float for each
/// parameter, as parameters may part ways after a graph was recorded. A graph adds to them without the host, so that
/// from then on the host's counts may lag behind; both move alike in steps outside of it. Exact up to 2^24, where the
/// kernel's corrections have long been 1. The memory of a count is made outside of graphs and stays the same.
class StepCounts {
 public:
  /// The counts of `parameters`. Those that are not there, or that the host has set to another of `steps` since, become
  /// `steps` first; those of parameters that have moved here from another device come along.
  std::vector<at::Tensor> values(at::Device device, const std::vector<at::Tensor>& parameters,
                                 const std::vector<int64_t>& steps);
  /// Whether values() would have nothing to do.
  bool is_current(at::Device device, const at::Tensor& parameter, int64_t steps) const;
  /// One step more, or `by` = -1, for each parameter of the batches; once where it is there twice.
  void add(const std::vector<FusedBatch>& batches, int64_t by);
  /// The same on the device alone, for a graph.
  void record_step(const std::vector<FusedBatch>& batches);
  /// Whether a graph has: from then on it may have counted, whatever has become of what it counted.
  bool were_recorded() const { return recorded_; }
  /// The optimizer's state gets the counts of the device, for which the host waits, unless the host has set others.
  void read(const torch::optim::Optimizer& optimizer);
  /// Counts that the host has set go to the device.
  void write(const torch::optim::Optimizer& optimizer);

 private:
  struct Count {
    /// Parameters that came together are in one tensor, so that one kernel counts them.
    at::Tensor row, value;
    /// What the state has where the host has not set it.
    int64_t known = 0;
  };

  std::vector<Count*> add_on_device(const std::vector<FusedBatch>& batches, int64_t by);

  std::unordered_map<const void*, Count> counts_;
  bool recorded_ = false;
};

}  // namespace hsdp
