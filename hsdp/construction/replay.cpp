#include "hsdp/construction/replay.h"

#include <ATen/ATen.h>
#include <ATen/core/List.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "dtensor/dtensor_impl.h"
#include "dtensor/operator_call.h"
#include "hsdp/construction/operator_traits.h"
#include "hsdp/host.h"

namespace hsdp {
namespace {

class DefaultDtype {
 public:
  DefaultDtype() : former_(c10::get_default_dtype()) {}
  ~DefaultDtype() { c10::set_default_dtype(former_); }
  DefaultDtype(const DefaultDtype&) = delete;
  DefaultDtype& operator=(const DefaultDtype&) = delete;
  void set(at::ScalarType dtype) {
    if (c10::get_default_dtype_as_scalartype() != dtype) c10::set_default_dtype(c10::scalarTypeToTypeMeta(dtype));
  }

 private:
  caffe2::TypeMeta former_;
};

// One run over some items of a tape: what exists at the moment, and when it goes.
class Player {
 public:
  Player(const Tape& tape, std::vector<uint32_t> items, std::span<const ValueId> wanted, const ReplaySink& sink)
      : tape_(tape), items_(std::move(items)), sink_(sink) {
    for (auto value : wanted) {
      auto& values = wanted_[tape_.group_of(value)];
      if (std::find(values.begin(), values.end(), value) == values.end()) values.push_back(value);
    }
    plan();
  }

  void run() {
    c10::InferenceMode ordinary(false);
    at::NoGradGuard no_grad;
    c10::impl::ExcludeDispatchKeyGuard below(dtensor::kDTensorKey);
    uint64_t position = 0;
    save_generator(position);
    for (auto index : items_) {
      const auto& item = tape_.items()[index];
      if (const auto* operation = std::get_if<Operation>(&item)) {
        run(*operation);
        if (operation->draws) save_generator(++position);
      } else if (const auto* allocation = std::get_if<Allocation>(&item)) {
        run(*allocation);
      } else {
        const auto& reseed = std::get<Reseed>(item);
        set_generator_state(host_generator(), reseed.state.defined() ? reseed.state : saved_.at(reseed.position));
        save_generator(++position);
      }
      settle(index);
    }
  }

 private:
  void plan() {
    std::unordered_map<ValueId, uint32_t> last_use;
    std::unordered_map<GroupId, uint32_t> last_touch;
    for (auto index : items_) {
      for_each_value(tape_.items()[index], [&](ValueId value) {
        last_use[value] = index;
        if (auto group = tape_.group_of(value); wanted_.contains(group)) last_touch[group] = index;
      });
      if (const auto* reseed = std::get_if<Reseed>(&tape_.items()[index]); reseed && !reseed->state.defined()) {
        saved_[reseed->position];
      }
    }
    std::unordered_set<ValueId> kept;
    for (auto& [group, values] : wanted_) {
      done_[last_touch.at(group)].push_back(group);
      kept.insert(values.begin(), values.end());
    }
    for (auto& [value, index] : last_use) {
      if (!kept.contains(value)) unused_[index].push_back(value);
    }
  }

  void save_generator(uint64_t position) {
    if (auto found = saved_.find(position); found != saved_.end()) found->second = generator_state(host_generator());
  }

  // Groups that end together are handed over in the order of their values.
  void settle(uint32_t index) {
    if (auto found = unused_.find(index); found != unused_.end()) {
      for (auto value : found->second) values_.erase(value);
    }
    auto found = done_.find(index);
    if (found == done_.end()) return;
    auto& groups = found->second;
    std::sort(groups.begin(), groups.end());
    for (auto group : groups) {
      for (auto value : wanted_.at(group)) {
        auto node = values_.extract(value);
        TORCH_INTERNAL_ASSERT(!node.empty(), "value ", value, " was not made");
        sink_(value, node.mapped());
      }
    }
  }

  void run(const Allocation& allocation) {
    const auto group = tape_.group_of(allocation.views.front().first);
    auto storage = allocation.content;
    if (!storage) {
      storage = allocate_storage(allocation.bytes, kHost);
    } else if (tape_.rewritten(group) || wanted_.contains(group)) {
      // The tape's own content stays as it is, for the next replay.
      auto copy = allocate_storage(storage.nbytes(), kHost);
      if (storage.nbytes() != 0) std::memcpy(copy.mutable_data(), storage.data(), storage.nbytes());
      storage = std::move(copy);
    }
    for (auto& [value, geometry] : allocation.views) values_[value] = geometry.on(storage);
  }

  void run(const Operation& operation) {
    const auto& traits = traits_of(operation.op);
    torch::jit::Stack stack;
    stack.reserve(operation.arguments.size());
    for (size_t i = 0; i < operation.arguments.size(); ++i) {
      const bool alias = operation.changes_geometry && traits.arguments[i].written;
      stack.push_back(argument(operation, i, alias));
    }
    dtype_.set(operation.default_dtype);
    operation.op.callBoxed(&stack);
    size_t next = 0;
    for (auto& result : stack) {
      dtensor::for_each_tensor_in(result, [&](const at::Tensor& tensor) {
        const auto value = operation.results.at(next++);
        if (value != kNoValue) values_[value] = tensor;
      });
    }
    TORCH_INTERNAL_ASSERT(next == operation.results.size());
  }

  c10::IValue argument(const Operation& operation, size_t index, bool alias) const {
    const auto tensor = [&](ValueId value) {
      const auto& found = values_.at(value);
      return alias ? dtensor::raw_alias(found) : found;
    };
    const auto& argument = operation.arguments[index];
    if (const auto* literal = std::get_if<c10::IValue>(&argument)) {
      // A generator of the constructor's own, as it was before this operator; it stays so for the next replay.
      return literal->isGenerator() && literal->toGenerator() != host_generator() ? literal->toGenerator().clone()
                                                                                  : *literal;
    }
    if (const auto* value = std::get_if<ValueId>(&argument)) return tensor(*value);
    if (const auto* geometry = std::get_if<Geometry>(&argument)) return geometry->allocate(kHost);
    const auto& values = std::get<std::vector<ValueId>>(argument);
    const auto& type = *operation.op.schema().arguments()[index].real_type();
    const auto* list = type.castRaw<c10::ListType>();
    if (list != nullptr && list->getElementType()->kind() == c10::TypeKind::OptionalType) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (auto value : values) {
        tensors.push_back(value == kNoValue ? std::nullopt : std::optional<at::Tensor>(tensor(value)));
      }
      return tensors;
    }
    c10::List<at::Tensor> tensors;
    for (auto value : values) tensors.push_back(value == kNoValue ? at::Tensor() : tensor(value));
    return tensors;
  }

  const Tape& tape_;
  std::vector<uint32_t> items_;
  const ReplaySink& sink_;
  DefaultDtype dtype_;
  std::unordered_map<GroupId, std::vector<ValueId>> wanted_;
  std::unordered_map<ValueId, at::Tensor> values_;
  std::unordered_map<uint32_t, std::vector<ValueId>> unused_;  // by the item after which they go
  std::unordered_map<uint32_t, std::vector<GroupId>> done_;    // by the item after which the sink receives them
  std::unordered_map<uint64_t, at::Tensor> saved_;             // generator states that the constructor went back to
};

}  // namespace

namespace {

// Plays from the true start of a construction and leaves the generator at its end. The construction before it is drawn
// through first, if nobody has replayed it.
void play(const Tape& tape, std::span<const ValueId> wanted, const ReplaySink& sink) {
  if (const auto& before = tape.predecessor()) {
    if (!before->end_state().defined()) play(*before, {}, [](ValueId, const at::Tensor&) {});
    set_generator_state(host_generator(), before->end_state());
  } else {
    set_generator_state(host_generator(), tape.generator_state());
  }
  Player(tape, tape.slice(wanted, /*draws=*/true), wanted, sink).run();
  tape.set_end_state(generator_state(host_generator()));
}

}  // namespace

bool replay(const Tape& tape, std::span<const ValueId> wanted, const ReplaySink& sink) {
  const auto former = generator_state(host_generator());
  auto restore = c10::make_scope_exit([&] { set_generator_state(host_generator(), former); });
  play(tape, wanted, sink);
  // Where the program has seeded or drawn since, that stands.
  if (!tape.exit_marker().defined()) return former.equal(tape.generator_state());
  const bool untouched = former.equal(tape.exit_marker());
  if (untouched) restore.release();
  return untouched;
}

void evaluate(const Tape& tape, std::span<const ValueId> wanted, const ReplaySink& sink) {
  Player(tape, tape.slice(wanted, /*draws=*/false), wanted, sink).run();
}

}  // namespace hsdp
