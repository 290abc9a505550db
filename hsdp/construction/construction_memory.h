#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "dtensor/dtensor_impl.h"
#include "hsdp/construction/tape.h"

namespace hsdp {

class ConstructionMemory;
class RecordedValue;

/// The bytes of a constant at one moment, when an operator on the tape read them.
struct Reading {
  Geometry geometry;
  c10::Storage content;  // from the first byte read
  ValueId value;
};

/// One piece of memory during construction. *Real* memory is on the host and holds a constant: it is not on the tape,
/// and an operator on the tape that reads it takes its bytes of that moment along. All other memory is on meta, and the
/// tape says what it holds.
struct Memory {
  c10::Storage storage;
  bool real = false;
  bool drawn = false;             // depends on random numbers; only on the tape
  bool external = false;          // real, and somebody outside construction owns it
  GroupId group = 0;              // on the tape: its name there
  std::vector<Reading> readings;  // real: the latest
  std::vector<RecordedValue*> values;
};

/// What a tensor born in meta_init stands for. Owned by the tensors that stand for it.
class RecordedValue final : public dtensor::DeferredValue {
 public:
  RecordedValue(std::shared_ptr<Tape> tape, ConstructionMemory& table, std::shared_ptr<Memory> memory, ValueId id);
  ~RecordedValue() override;

  /// Null for tensors that are not deferred, or deferred by something else.
  static RecordedValue* of(const at::TensorBase& tensor);

  bool expose(dtensor::DTensorImpl& impl) override;
  void attach(dtensor::DTensorImpl& impl) override;
  void detach(dtensor::DTensorImpl& impl) override;

  const std::shared_ptr<Tape>& tape() const { return tape_; }
  /// kNoValue while the memory is real, and after a construction that failed.
  ValueId id() const { return id_; }
  uint64_t birth() const { return birth_; }
  const std::shared_ptr<Memory>& memory() const { return memory_; }
  /// Appends the tensors that stand for this value and are still held by somebody. Tape's lock must be held.
  void collect(std::vector<at::Tensor>& tensors) const;

 private:
  friend class ConstructionMemory;
  std::shared_ptr<Tape> tape_;  // null after a construction that failed
  ConstructionMemory* table_;   // null after construction, as memory_
  std::shared_ptr<Memory> memory_;
  size_t slot_ = 0;  // in memory_->values
  ValueId id_;
  uint64_t birth_;
  std::vector<dtensor::DTensorImpl*> impls_;
};

/// All memory that tensors of one construction are on, and its changes between real and tape. One thread.
class ConstructionMemory {
 public:
  explicit ConstructionMemory(std::shared_ptr<Tape> tape) : tape_(std::move(tape)) {}
  /// Without finish(): the tensors that are left have no values and never will.
  ~ConstructionMemory();
  ConstructionMemory(const ConstructionMemory&) = delete;
  ConstructionMemory& operator=(const ConstructionMemory&) = delete;

  const std::shared_ptr<Tape>& tape() const { return tape_; }
  std::thread::id thread() const { return thread_; }

  /// Null where no tensor of this construction is on the storage.
  std::shared_ptr<Memory> find(const c10::Storage& storage) const;
  std::shared_ptr<Memory> add_real(const c10::Storage& storage, bool external);
  std::shared_ptr<Memory> add_taped(const c10::Storage& meta_storage, bool drawn);

  /// A new deferred tensor that holds `inner`, which is on `memory`. On the tape it is a value of the next item.
  at::Tensor wrap(const at::Tensor& inner, const std::shared_ptr<Memory>& memory);
  /// After an operator changed the geometry or the storage of the tensor that `impl` holds.
  void rebind(dtensor::DTensorImpl& impl, const std::shared_ptr<Memory>& memory);
  /// Lets what `impl` holds follow a shape and storage that were set past the operators, as torch::load does. Returns
  /// its value.
  RecordedValue& follow(dtensor::DTensorImpl& impl);

  /// Real -> tape, with the bytes it has now.
  void to_tape(Memory& memory);
  /// Tape -> real, by computing what the tape says. Must not depend on random numbers.
  void to_constant(Memory& memory);
  /// Fresh memory for all its tensors, before an operator overwrites it: what was there need not be kept until then.
  void renew(Memory& memory, bool real, bool drawn);
  /// The value that stands for the bytes that a real tensor, of this construction or from outside, has now.
  ValueId read_constant(const at::Tensor& real, bool wrapped_number);

  /// Moves all to the tape and lets go of the tensors.
  void finish();

 private:
  friend class RecordedValue;
  void follow_all(Memory& memory);
  void move(Memory& memory, c10::Storage storage);
  std::vector<std::pair<ValueId, Geometry>> name_views(Memory& memory);
  void shelve(Memory& memory, c10::Storage content);
  void release(bool failed);
  void forget(const Memory& memory);

  std::shared_ptr<Tape> tape_;
  const std::thread::id thread_ = std::this_thread::get_id();
  std::unordered_map<const c10::StorageImpl*, std::weak_ptr<Memory>> memories_;
  // Plain tensors from outside; the storage is held so that its address stays taken.
  std::unordered_map<const c10::StorageImpl*, std::pair<c10::Storage, std::vector<Reading>>> outside_;
};

/// The most elements that a constant may have without being put on the tape.
inline constexpr int64_t kLargestConstant = 4096;

}  // namespace hsdp
