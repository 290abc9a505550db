#include "hsdp/recompute_region.h"

#include <ATen/ATen.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <mutex>
#include <string_view>

#include "dtensor/dispatch.h"
#include "dtensor/dtensor_impl.h"
#include "dtensor/operator_call.h"
#include "hsdp/construction/operator_traits.h"
#include "hsdp/scheduler.h"

namespace hsdp {
namespace {

using torch::jit::Stack;
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// Null for a weight, whose memory is its unit's.
const c10::StorageImpl* memory_of(const at::Tensor& tensor) {
  if (dtensor::dtensor_impl(tensor) != nullptr || !tensor.has_storage()) return nullptr;
  return tensor.storage().unsafeGetStorageImpl();
}

// The unit behind a weight or a view of one, and the weight's index; null for all other tensors.
std::pair<std::shared_ptr<Unit>, size_t> unit_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  if (auto* impl = dtensor::dtensor_impl(tensor)) {
    return {std::dynamic_pointer_cast<Unit>(impl->owner()), impl->owner_index()};
  }
  if (!tensor.key_set().has(dtensor::kDTensorKey)) return {};
  auto found = dtensor::unsharded_storage_owner(tensor);
  return {std::dynamic_pointer_cast<Unit>(found.owner), found.index};
}

// The same tensor without its history, which would keep graphs alive in a circle.
at::Tensor without_history(const at::Tensor& tensor) {
  if (tensor.is_leaf()) return tensor;
  auto* impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true));
}

at::Tensor with_requires_grad(const at::Tensor& tensor, bool requires_grad) {
  if (tensor.requires_grad() == requires_grad) return tensor;
  at::NoGradGuard no_grad;
  return tensor.detach().set_requires_grad(requires_grad);
}

at::Tensor bytes_of(const c10::Storage& storage) {
  return at::empty({0}, at::TensorOptions(storage.device()).dtype(at::kByte))
      .set_(storage, 0, {static_cast<int64_t>(storage.nbytes())}, {1});
}

c10::Storage copy_of(const c10::Storage& storage) { return bytes_of(storage).clone().storage(); }

bool covers(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(tensor.itemsize()) == static_cast<int64_t>(tensor.storage().nbytes()) &&
         tensor.is_non_overlapping_and_dense();
}

bool makes_blank_memory(std::string_view name) {
  return name == "aten::empty" || name == "aten::empty_like" || name == "aten::empty_strided" ||
         name == "aten::empty_permuted" || name == "aten::new_empty" || name == "aten::new_empty_strided";
}

// Collectives would come in another order than on other ranks, and memory that is exchanged cannot be followed.
bool can_run_twice(const c10::OperatorHandle& op, const Stack& stack) {
  const std::string_view name = op.schema().name();
  if (name.starts_with("c10d::") || name.starts_with("_c10d_functional::") || name == "aten::set_") return false;
  bool can = true;
  for (size_t i = dtensor::argument_begin(op, stack); i < stack.size(); ++i) {
    can &= !stack[i].isStorage();
    dtensor::for_each_tensor_in(stack[i], [&](const at::Tensor& tensor) {
      // Optimizer state and gradients are sharded, and no part of a forward.
      if (dtensor::dtensor_impl(tensor) != nullptr) can &= unit_of(tensor).first != nullptr;
    });
  }
  return can;
}

c10::IValue clone_generator(const c10::IValue& value) {
  auto generator = value.toGenerator();
  if (!generator.defined()) return value;
  std::lock_guard lock(generator.mutex());
  return generator.clone();
}

bool may_be_viewed(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && !argument.alias_info()->isWrite();
}

// What an operator that reads no values filled a memory with; `like` stands for tensors whose shape it was given.
at::Tensor run_factory(const c10::OperatorHandle& op, const Stack& arguments, bool blank, const at::Tensor& like) {
  Stack stack;
  for (auto& argument : arguments) {
    stack.push_back(dtensor::map_tensors_in(argument, [&](const at::Tensor&) { return like; }));
  }
  op.callBoxed(&stack);
  auto made = stack.back().toTensor();
  if (blank) bytes_of(made.storage()).zero_();
  return made;
}

}  // namespace

RecomputeRegion::Geometry RecomputeRegion::Geometry::of(const at::Tensor& tensor) {
  return {tensor.sizes().vec(), tensor.strides().vec(), tensor.storage_offset(),
          at::TensorOptions(tensor.device()).dtype(tensor.dtype())};
}

at::Tensor RecomputeRegion::Geometry::on(const c10::Storage& storage) const {
  return at::empty({0}, options).set_(storage, offset, sizes, strides);
}

RecomputeRegion::RecomputeRegion(const Unit& unit)
    : Recomputation("the forward of unit \"" + unit.name() + "\""), random_(RandomState::now({unit.device()})) {}

// ---- first run ----

bool RecomputeRegion::record(const c10::OperatorHandle& op, Stack& stack) {
  const bool grad_mode = at::GradMode::is_enabled();
  at::NoGradGuard no_grad;
  const auto& traits = traits_of(op);
  const bool for_the_host = !traits.makes_tensors && !traits.writes;
  if (!for_the_host && (!can_run_twice(op, stack) || !prepare_writes(op, stack))) return false;
  std::optional<Recorded> recorded;
  std::vector<at::Tensor> viewed;
  std::vector<std::pair<std::shared_ptr<Unit>, size_t>> weights;
  if (!for_the_host) {
    recorded = describe(op, stack);
    recorded->grad_mode = grad_mode;
    for (size_t i = 0; i < traits.arguments.size(); ++i) {
      dtensor::for_each_tensor_in(stack[dtensor::argument_begin(op, stack) + i], [&](const at::Tensor& tensor) {
        if (auto weight = unit_of(tensor); weight.first) weights.push_back(std::move(weight));
        if (!tensor.defined() || traits.arguments[i].shape_only) return;
        if (may_be_viewed(op.schema().arguments()[i])) {
          viewed.push_back(tensor);
        } else {
          use_content(tensor, /*overwritten=*/false);
        }
      });
    }
  }
  const size_t saved = expected();
  try {
    at::AutoGradMode as_called(grad_mode);
    const FirstRun run(*this);
    dtensor::run_by_rules(op, stack);
  } catch (...) {
    expect_only(saved);
    throw;
  }
  if (for_the_host) return true;
  for (auto& [unit, index] : weights) {
    auto scheduler = unit->scheduler();
    note_weight(unit, index, scheduler ? scheduler->scope_token() : 0);
  }
  // reshape, contiguous and to() return a view or a copy.
  for (auto& tensor : viewed) {
    bool is_view = false;
    for (size_t i = stack.size() - op.schema().returns().size(); i < stack.size(); ++i) {
      dtensor::for_each_tensor_in(stack[i], [&](const at::Tensor& result) {
        is_view |= result.defined() && memory_of(result) == memory_of(tensor);
      });
    }
    if (!is_view) use_content(tensor, /*overwritten=*/false);
  }
  recorded->saved = expected();
  keep_results(*recorded, stack);
  operators_.push_back(std::move(*recorded));
  return true;
}

// False when the operator writes what only the first run may write.
bool RecomputeRegion::prepare_writes(const c10::OperatorHandle& op, const Stack& stack) {
  const auto& traits = traits_of(op);
  bool can = true;
  for (size_t i = 0; i < traits.arguments.size() && traits.writes; ++i) {
    if (!traits.arguments[i].written) continue;
    dtensor::for_each_tensor_in(stack[dtensor::argument_begin(op, stack) + i], [&](const at::Tensor& tensor) {
      if (!tensor.defined() || !can) return;
      const auto* memory = memory_of(tensor);
      can = memory != nullptr && unit_of(tensor).first == nullptr;
      if (!can) return;
      use_content(tensor, traits.overwrites && covers(tensor));
      auto found = memories_.find(memory);
      const bool inside = found != memories_.end() && found->second.inside;
      if (inside && !found->second.constant) return;
      // The history of a tensor from outside goes on with this operator, which is the first one after the region.
      can = inside || !tensor.requires_grad();
      take_snapshot(tensor, /*written=*/can);
    });
  }
  return can;
}

RecomputeRegion::Recorded RecomputeRegion::describe(const c10::OperatorHandle& op, const Stack& stack) {
  Recorded recorded{op};
  const auto autocast = AutocastState::now();
  if (autocasts_.empty() || !(autocasts_.back() == autocast)) autocasts_.push_back(autocast);
  recorded.autocast = autocasts_.size() - 1;
  recorded.blank = makes_blank_memory(op.schema().name());
  for (size_t i = dtensor::argument_begin(op, stack); i < stack.size(); ++i) {
    if (stack[i].isGenerator() && !random_.holds(stack[i].toGenerator())) {
      // The program goes on drawing from it.
      recorded.arguments.push_back(clone_generator(stack[i]));
      continue;
    }
    recorded.arguments.push_back(dtensor::map_tensors_in(stack[i], [&](const at::Tensor& tensor) {
      recorded.operands.push_back(tensor.defined() ? find(tensor) : Operand());
      return at::Tensor();
    }));
  }
  return recorded;
}

RecomputeRegion::Operand RecomputeRegion::find(const at::Tensor& tensor) {
  const auto* memory = memory_of(tensor);
  Operand operand;
  auto known = known_.find(tensor.unsafeGetTensorImpl());
  if (known != known_.end() && known->second.memory == memory) {
    operand = known->second.operand;
  } else {
    auto found = memories_.find(memory);
    if (memory != nullptr && found != memories_.end() && found->second.inside) {
      operand = {Operand::Kind::alias, aliases_.size(), false};
      aliases_.push_back({found->second.value, Geometry::of(tensor)});
    } else {
      operand = {Operand::Kind::outside, outside_.size(), false};
      Outside outside;
      if (memory != nullptr && unit_of(tensor).first == nullptr) {
        outside.memory = memory;
        outside.geometry = Geometry::of(tensor);
        memories_.try_emplace(memory, Memory{tensor.storage().getWeakStorageImpl()});
      }
      auto copied = snapshots_.find(memory);
      const bool is_copied = outside.memory != nullptr && copied != snapshots_.end();
      outside.tensor =
          VersionedTensor(is_copied ? outside.geometry.on(copied->second.storage) : without_history(tensor));
      outside_.push_back(std::move(outside));
    }
    known_.insert_or_assign(tensor.unsafeGetTensorImpl(),
                            KnownTensor{WeakTensor(tensor.getIntrusivePtr()), memory, operand});
  }
  operand.requires_grad = tensor.requires_grad();
  return operand;
}

void RecomputeRegion::take_snapshot(const at::Tensor& tensor, bool written) {
  const auto* memory = memory_of(tensor);
  auto found = snapshots_.find(memory);
  if (found != snapshots_.end()) {
    found->second.written |= written;
    return;
  }
  const bool is_held =
      std::any_of(outside_.begin(), outside_.end(), [&](const Outside& one) { return one.memory == memory; });
  if (!is_held && !written) return;
  memories_.try_emplace(memory, Memory{tensor.storage().getWeakStorageImpl()});
  const auto copy = copy_of(tensor.storage());
  for (auto& one : outside_) {
    if (one.memory == memory) one.tensor = VersionedTensor(one.geometry.on(copy));
  }
  snapshots_.emplace(memory, Snapshot{copy, written});
}

// An operator is about to read what a factory put into a memory, or to write into it. What came there since through a
// raw pointer, as torch::tensor({...}) and accessors do, can only be kept.
void RecomputeRegion::use_content(const at::Tensor& tensor, bool overwritten) {
  const auto* memory = memory_of(tensor);
  auto found = memories_.find(memory);
  if (memory == nullptr || found == memories_.end() || !found->second.factory) return;
  auto& factory = operators_[*std::exchange(found->second.factory, std::nullopt)];
  if (overwritten || traits_of(factory.op).draws) return;
  const auto now = found->second.geometry.on(tensor.storage());
  const auto then = run_factory(factory.op, factory.arguments, factory.blank, now);
  if (bytes_of(then.storage()).equal(bytes_of(tensor.storage()))) return;
  found->second.constant = true;
  factory.constant = outside_.size();
  outside_.push_back({VersionedTensor(now), found->second.geometry, memory});
}

void RecomputeRegion::keep_results(Recorded& recorded, const Stack& stack) {
  const auto& traits = traits_of(recorded.op);
  const bool reads = std::any_of(recorded.operands.begin(), recorded.operands.end(),
                                 [](const Operand& one) { return one.kind != Operand::Kind::undefined; });
  const bool shapes_only = std::all_of(traits.arguments.begin(), traits.arguments.end(), [&](const auto& one) {
    const auto place = static_cast<size_t>(&one - traits.arguments.data());
    return one.shape_only || !dtensor::holds_tensors(recorded.arguments[place]);
  });
  const auto& returns = recorded.op.schema().returns();
  const bool factory = (!reads || shapes_only) && !traits.writes && returns.size() == 1 && stack.back().isTensor();
  for (size_t i = stack.size() - returns.size(); i < stack.size(); ++i) {
    dtensor::for_each_tensor_in(stack[i], [&](const at::Tensor& result) {
      recorded.results.emplace_back();
      if (!result.defined()) return;
      auto* impl = result.unsafeGetTensorImpl();
      const auto* memory = memory_of(result);
      auto known = known_.find(impl);
      if (known != known_.end() && known->second.memory == memory) return;
      const size_t value = values_++;
      recorded.results.back() = value;
      known_.insert_or_assign(
          impl, KnownTensor{WeakTensor(result.getIntrusivePtr()), memory, {Operand::Kind::value, value, false}});
      if (memory == nullptr || unit_of(result).first != nullptr || memories_.contains(memory)) return;
      Memory fresh{result.storage().getWeakStorageImpl()};
      fresh.inside = true;
      fresh.value = value;
      if (factory) {
        fresh.factory = operators_.size();
        fresh.geometry = Geometry::of(result);
        if (recorded.blank) bytes_of(result.storage()).zero_();
      }
      memories_.emplace(memory, std::move(fresh));
    });
  }
}

void RecomputeRegion::finish() {
  seal();
  known_.clear();
  memories_.clear();
  while (!operators_.empty() &&
         operators_.back().saved == (operators_.size() > 1 ? operators_[operators_.size() - 2].saved : 0)) {
    operators_.pop_back();
  }
  std::vector<bool> used(outside_.size(), false);
  for (auto& one : operators_) {
    if (one.constant) used[*one.constant] = true;
    for (auto& operand : one.operands) {
      if (operand.kind == Operand::Kind::outside) used[operand.index] = true;
    }
  }
  for (size_t i = 0; i < outside_.size(); ++i) {
    if (!used[i]) outside_[i].tensor = VersionedTensor();
  }
}

// ---- second run ----

class RecomputeRegion::SecondRun {
 public:
  explicit SecondRun(const RecomputeRegion& region)
      : region_(region), values_(region.values_), outside_(region.outside_.size()), last_use_(region.values_, 0) {
    for (size_t k = 0; k < region_.operators_.size(); ++k) {
      for (auto& operand : region_.operators_[k].operands) {
        if (operand.kind == Operand::Kind::value) last_use_[operand.index] = k;
        if (operand.kind == Operand::Kind::alias) last_use_[region_.aliases_[operand.index].value] = k;
      }
    }
    for (auto& [memory, snapshot] : region_.snapshots_) {
      if (snapshot.written) written_.emplace(memory, copy_of(snapshot.storage));
    }
  }

  void run(size_t k) {
    const auto& recorded = region_.operators_[k];
    if (recorded.constant) {
      values_[*recorded.results.front()] = outside(*recorded.constant);
      return;
    }
    Stack stack;
    size_t next = 0;
    for (auto& argument : recorded.arguments) {
      if (argument.isGenerator() && !region_.random_.holds(argument.toGenerator())) {
        stack.push_back(clone_generator(argument));
      } else {
        stack.push_back(
            dtensor::map_tensors_in(argument, [&](const at::Tensor&) { return tensor(recorded.operands[next++]); }));
      }
    }
    {
      at::AutoGradMode as_recorded(recorded.grad_mode);
      recorded.op.callBoxed(&stack);
    }
    next = 0;
    for (auto& results : stack) {
      dtensor::for_each_tensor_in(results, [&](const at::Tensor& result) {
        const auto value = recorded.results[next++];
        if (!value) return;
        if (recorded.blank) bytes_of(result.storage()).zero_();
        values_[*value] = result;
      });
    }
    for (auto& value : recorded.results) {
      if (value && last_use_[*value] <= k) values_[*value] = at::Tensor();
    }
    for (auto& operand : recorded.operands) {
      if (operand.kind == Operand::Kind::value && last_use_[operand.index] == k) values_[operand.index] = at::Tensor();
    }
  }

 private:
  at::Tensor tensor(const Operand& operand) {
    switch (operand.kind) {
      case Operand::Kind::undefined:
        return {};
      case Operand::Kind::value: {
        auto& value = values_[operand.index];
        auto same = with_requires_grad(value, operand.requires_grad);
        // It became a leaf past the dispatcher.
        if (operand.requires_grad) value = same;
        return same;
      }
      case Operand::Kind::alias: {
        const auto& alias = region_.aliases_[operand.index];
        at::NoGradGuard no_grad;
        return alias.geometry.on(values_[alias.value].storage()).set_requires_grad(operand.requires_grad);
      }
      case Operand::Kind::outside:
        break;
    }
    return with_requires_grad(outside(operand.index), operand.requires_grad);
  }

  const at::Tensor& outside(size_t index) {
    auto& bound = outside_[index];
    if (bound.defined()) return bound;
    const auto& one = region_.outside_[index];
    auto found = written_.find(one.memory);
    at::NoGradGuard no_grad;
    return bound = found == written_.end() ? one.tensor.get() : one.geometry.on(found->second);
  }

  const RecomputeRegion& region_;
  std::vector<at::Tensor> values_, outside_;
  std::vector<size_t> last_use_;
  std::unordered_map<const c10::StorageImpl*, c10::Storage> written_;
};

void RecomputeRegion::run_again() {
  const RunConditionsScope conditions(random_, autocasts_.front());
  SecondRun second(*this);
  size_t autocast = 0;
  for (size_t k = 0; k < operators_.size(); ++k) {
    const auto& recorded = operators_[k];
    if (recorded.autocast != autocast) autocasts_[autocast = recorded.autocast].set();
    second.run(k);
    if (answered() != recorded.saved) raise_unlike_counts(recorded.saved, answered());
  }
}

}  // namespace hsdp
