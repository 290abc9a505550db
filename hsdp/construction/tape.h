#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_set>
#include <variant>
#include <vector>

namespace hsdp {

class RecordedValue;

/// Names one tensor view during construction: a geometry on one piece of memory.
using ValueId = uint64_t;
inline constexpr ValueId kNoValue = ~ValueId{0};
/// Names one piece of memory, which several values may view.
using GroupId = uint32_t;

/// Everything about a strided tensor but its memory.
struct Geometry {
  at::ScalarType dtype;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  bool conjugate = false, negative = false;
  bool wrapped_number = false;

  static Geometry of(const at::Tensor& tensor);
  bool operator==(const Geometry&) const = default;
  /// A tensor of this geometry on `storage`, whose device decides where it is.
  at::Tensor on(const c10::Storage& storage) const;
  /// The same on memory of its own, which nothing has filled.
  at::Tensor allocate(c10::Device device) const;
};

/// Zero to so many bytes of memory that nothing has filled.
c10::Storage allocate_storage(size_t bytes, c10::Device device);

/// An argument of a recorded operator: a literal (a generator of the constructor's own as it was then), a value, a list
/// of values (kNoValue: an absent element), or the shape of a tensor of which the operator reads nothing else.
using Argument = std::variant<c10::IValue, ValueId, std::vector<ValueId>, Geometry>;

struct Operation {
  c10::OperatorHandle op;
  std::vector<Argument> arguments;
  std::vector<ValueId> results;  // of the tensors among the results, in order; kNoValue: undefined
  at::ScalarType default_dtype;
  bool draws = false;             // advances the generator
  bool changes_geometry = false;  // an argument written in place has another shape afterwards
};

/// Memory that no operator made: a constant's content, or none (overwritten before it is read).
struct Allocation {
  c10::Storage content;  // null: uninitialised
  size_t bytes = 0;
  std::vector<std::pair<ValueId, Geometry>> views;
};

/// The constructor set the generator: to `state`, or back to where it was after `position` draws and settings.
struct Reseed {
  at::Tensor state;
  uint64_t position = 0;
};

using Item = std::variant<Operation, Allocation, Reseed>;

/// A tensor that was made in construction and still exists.
struct LiveValue {
  at::Tensor tensor;
  ValueId id;
};

/// What the constructors of one meta_init did: operators in order, the constants they read, and the state of the
/// default generator before them; and which of the tensors still exist. Holds no memory of parameters.
/// Kept alive by the tensors themselves and by whoever means to replay it. Written by one thread, during construction;
/// immutable afterwards, except that tensors may die on any thread.
class Tape {
 public:
  explicit Tape(at::Tensor generator_state) : generator_state_(std::move(generator_state)) {}

  /// The tensors that exist now, oldest first: parameters, buffers, and members that nobody registered. Several may
  /// have one id: aliases by data() and set_data().
  std::vector<LiveValue> live() const;

  /// State of the default generator when construction started: its true start, unless there is a predecessor.
  const at::Tensor& generator_state() const { return generator_state_; }
  /// Every generator state that values depend on: that one, those that constructors set, and those of generators of
  /// their own at each draw. Ranks that differ in one would make unlike values.
  std::vector<at::Tensor> generator_states() const;
  /// The construction after which this one started while its numbers were not drawn yet: this one's start is its end.
  const std::shared_ptr<Tape>& predecessor() const { return predecessor_; }
  /// What stands on the generator since the end of construction for the state that drawing would have led to; undefined
  /// when nothing was drawn. See ConstructionScope.
  const at::Tensor& exit_marker() const { return exit_marker_; }
  bool draws() const { return !draws_.empty(); }
  /// State of the generator after the construction, once a replay has found it out.
  const at::Tensor& end_state() const { return end_state_; }
  void set_end_state(at::Tensor state) const { end_state_ = std::move(state); }
  const std::vector<Item>& items() const { return items_; }
  GroupId group_of(ValueId value) const { return values_[value].group; }
  size_t value_count() const { return values_.size(); }
  /// Whether anything writes this memory after the item that made it.
  bool rewritten(GroupId group) const { return groups_[group].size() > 1; }
  /// Indices, ascending, of the items that the final content of `wanted` depends on; with `draws` also of all that
  /// advance or set the generator.
  std::vector<uint32_t> slice(std::span<const ValueId> wanted, bool draws) const;

  // ---- recording ----
  void set_predecessor(std::shared_ptr<Tape> tape) { predecessor_ = std::move(tape); }
  void set_exit_marker(at::Tensor state) { exit_marker_ = std::move(state); }
  GroupId new_group();
  /// A value that the next item pushed creates.
  ValueId new_value(GroupId group);
  /// Appends; `written` are the groups that the item makes or writes.
  void push(Item item, std::span<const GroupId> written);
  uint64_t enlist(RecordedValue& value);
  void strike(RecordedValue& value);
  /// Guards who stands for which value.
  std::mutex& mutex() const { return mutex_; }

 private:
  struct Value {
    GroupId group;
    uint32_t creator;
  };
  at::Tensor generator_state_, exit_marker_;
  mutable at::Tensor end_state_;
  std::shared_ptr<Tape> predecessor_;
  std::vector<Item> items_;
  std::vector<Value> values_;
  std::vector<std::vector<uint32_t>> groups_;  // items that make or write the memory
  std::vector<uint32_t> draws_;

  mutable std::mutex mutex_;
  std::unordered_set<RecordedValue*> recorded_;
  uint64_t births_ = 0;
};

/// Calls `visit(id)` for every value that the item reads, writes or makes.
template <class Visit>
void for_each_value(const Item& item, Visit&& visit) {
  if (const auto* operation = std::get_if<Operation>(&item)) {
    for (auto& argument : operation->arguments) {
      if (const auto* value = std::get_if<ValueId>(&argument)) visit(*value);
      if (const auto* values = std::get_if<std::vector<ValueId>>(&argument)) {
        for (auto value : *values) {
          if (value != kNoValue) visit(value);
        }
      }
    }
    for (auto value : operation->results) {
      if (value != kNoValue) visit(value);
    }
  } else if (const auto* allocation = std::get_if<Allocation>(&item)) {
    for (auto& view : allocation->views) visit(view.first);
  }
}

/// The tape behind a tensor made in meta_init; null for any other tensor, and once it has become distributed or
/// ordinary.
std::shared_ptr<Tape> tape_of(const at::Tensor& deferred);
/// Its value on that tape; kNoValue where there is none.
ValueId value_id_of(const at::Tensor& deferred);

}  // namespace hsdp
