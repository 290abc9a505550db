#pragma once

#include <memory>
#include <string>
#include <vector>

#include "dtensor/dispatch.h"
#include "hsdp/construction/construction_memory.h"
#include "hsdp/construction/parked_generator.h"
#include "hsdp/construction/tape.h"

namespace hsdp {

struct RecordedCall;

/// Records the operators of one construction. Random operators, and what depends on them or is large, run on meta and
/// go on the tape. Everything else is a *constant* and runs for real, so that constructors may look at it and write it
/// through raw pointers, whenever they like. Memory changes side where it must: a constant that an operator on the tape
/// writes moves to the tape, and a value on the tape that does not depend on random numbers is computed when the
/// constructor looks at it. Devices are not recorded: values go where the module is materialized.
/// One thread: the one whose operators an InterceptScope sends here.
class Recorder final : public dtensor::OperatorInterceptor {
 public:
  Recorder();

  /// Throws NotSupportedError naming the operator for what a replay could not repeat.
  bool intercept(const c10::OperatorHandle& op, torch::jit::Stack& stack) override;
  /// Ends construction: every tensor that is left becomes a meta tensor with a value on the tape.
  std::shared_ptr<Tape> finish();

  const std::shared_ptr<Tape>& tape() const { return tape_; }

 private:
  void collect(RecordedCall& call);
  void draw_from_own_generator(RecordedCall& call) const;
  at::Tensor wrap(const RecordedCall& call, const at::Tensor& inner, const std::shared_ptr<Memory>& memory);
  bool prepare_overwrite(RecordedCall& call);
  void answer_set_data(RecordedCall& call) const;
  bool answer_equal(RecordedCall& call) const;
  bool make_constant(RecordedCall& call);
  void run_constant(RecordedCall& call);
  void run_taped(RecordedCall& call);
  void run_without_meta_kernel(RecordedCall& call, const torch::jit::Stack& given, const std::string& reason);
  void keep_constant(RecordedCall& call, torch::jit::Stack results);
  void keep_taped(RecordedCall& call, torch::jit::Stack results);
  std::vector<Argument> encode(const RecordedCall& call);
  void follow_generator();

  ParkedGenerator generator_;
  std::shared_ptr<Tape> tape_;
  ConstructionMemory memory_;
};

}  // namespace hsdp
