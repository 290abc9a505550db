#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hsdp/recomputation.h"
#include "hsdp/run_conditions.h"

namespace hsdp {

/// Consecutive operators of one thread, recorded so that backward can run them again instead of what they saved.
/// Tensors made among them are numbered; those from outside are held (a block's input, masks, buffers), and what is
/// written into one of them is written into a copy when they run again. Weights are read from their units both times.
///
/// A region belongs to the thread that records it until finish(); then see Recomputation.
class RecomputeRegion final : public Recomputation {
 public:
  explicit RecomputeRegion(const Unit& unit);

  /// Runs an operator by the rules and records it. Returns false, without having run it, when it cannot be run twice:
  /// then the region ends before it. An operator that throws is not recorded, and ends the region as well.
  bool record(const c10::OperatorHandle& op, torch::jit::Stack& stack);
  /// No more operators follow.
  void finish();

 private:
  struct Geometry {
    std::vector<int64_t> sizes, strides;
    int64_t offset = 0;
    at::TensorOptions options;
    static Geometry of(const at::Tensor& tensor);
    at::Tensor on(const c10::Storage& storage) const;
  };
  struct Operand {
    enum class Kind { undefined, value, alias, outside } kind = Kind::undefined;
    size_t index = 0;
    bool requires_grad = false;
  };
  struct Recorded {
    c10::OperatorHandle op;
    torch::jit::Stack arguments = {};  // tensors left out
    std::vector<Operand> operands = {};
    std::vector<std::optional<size_t>> results = {};  // numbers of new values
    bool grad_mode = false;
    bool blank = false;  // makes memory that nobody has initialised; zeros here
    size_t autocast = 0;
    std::optional<size_t> constant = {};  // this tensor from outside instead of running it
    size_t saved = 0;                     // tensors, up to and with this operator
  };
  /// A tensor that no recorded operator made.
  struct Outside {
    VersionedTensor tensor;
    Geometry geometry = {};
    const c10::StorageImpl* memory = nullptr;  // null: a weight, or without memory of its own
  };
  /// A second tensor on the memory of a value, made past the dispatcher.
  struct Alias {
    size_t value;
    Geometry geometry;
  };
  struct KnownTensor {
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> kept;  // no other tensor is given the address
    const c10::StorageImpl* memory;
    Operand operand;
  };
  struct Memory {
    c10::weak_intrusive_ptr<c10::StorageImpl> kept;
    bool inside = false;                 // made by a recorded operator
    size_t value = 0;                    // then the first value on it
    bool constant = false;               // and what is in it came through a raw pointer
    std::optional<size_t> factory = {};  // the operator that filled it, until another one uses what is in it
    Geometry geometry = {};              // of what that operator returned
  };
  /// What a memory from outside held before something was written into it.
  struct Snapshot {
    c10::Storage storage;
    bool written = false;  // by a recorded operator
  };
  class SecondRun;

  bool prepare_writes(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
  Recorded describe(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
  Operand find(const at::Tensor& tensor);
  void take_snapshot(const at::Tensor& tensor, bool written);
  void keep_results(Recorded& recorded, const torch::jit::Stack& stack);
  void use_content(const at::Tensor& tensor, bool overwritten);
  void run_again() override;

  RandomState random_;
  std::vector<AutocastState> autocasts_;
  std::vector<Recorded> operators_;
  std::vector<Outside> outside_;
  std::vector<Alias> aliases_;
  size_t values_ = 0;
  std::unordered_map<const c10::StorageImpl*, Snapshot> snapshots_;
  // While it is recorded.
  std::unordered_map<const c10::TensorImpl*, KnownTensor> known_;
  std::unordered_map<const c10::StorageImpl*, Memory> memories_;
};

}  // namespace hsdp
