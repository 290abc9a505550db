#pragma once

#include <memory>

#include "hsdp/fully_shard.h"

namespace hsdp {

/// While it lives, all parameters of a sharded module are gathered: any number of forwards without gradients runs
/// without communication, on all ranks or on some (roll-outs, generation, evaluation on rank 0). `model->...` and the
/// bare module both work inside.
///
/// Opening it is a collective, one all-gather a unit; closing it communicates nothing and frees everything. Scopes
/// nest. Memory: the whole model on every rank. Inside, refused by name: forwards with grad mode on, backward, anything
/// that writes parameters (optimizer steps, copy_, set_data, load); what is written through raw pointers is dropped.
/// What a forward writes into buffers, or draws from the default generator, stays on the rank that did it. Threads: as
/// ForwardScope.
///
/// Throws StateError inside a backward or while tensors have no values, CommunicationError when a gather fails.
class SummonFull {
 public:
  template <class M>
  explicit SummonFull(const FullySharded<M>& model) : SummonFull(model.core()) {}
  explicit SummonFull(const std::shared_ptr<ShardedModule>& module);
  ~SummonFull();
  SummonFull(const SummonFull&) = delete;
  SummonFull& operator=(const SummonFull&) = delete;

 private:
  ForwardScope forward_;
  std::shared_ptr<Scheduler> scheduler_;
};

}  // namespace hsdp
