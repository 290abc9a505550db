#include "hsdp/construction/tape.h"

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <limits>
#include <queue>
#include <unordered_map>
#include <utility>

#include "dtensor/dtensor_impl.h"
#include "hsdp/construction/construction_memory.h"
#include "hsdp/host.h"

namespace hsdp {

Geometry Geometry::of(const at::Tensor& tensor) {
  return {tensor.scalar_type(),
          tensor.sizes().vec(),
          tensor.strides().vec(),
          tensor.storage_offset(),
          tensor.is_conj(),
          tensor.is_neg(),
          tensor.unsafeGetTensorImpl()->is_wrapped_number()};
}

at::Tensor Geometry::on(const c10::Storage& storage) const {
  c10::impl::ExcludeDispatchKeyGuard below(dtensor::kDTensorKey);
  auto tensor = at::empty({0}, at::TensorOptions(dtype).device(storage.device()));
  tensor.set_(storage, offset, sizes, strides);
  if (conjugate) tensor._set_conj(true);
  if (negative) tensor._set_neg(true);
  if (wrapped_number) tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

at::Tensor Geometry::allocate(c10::Device device) const {
  const auto bytes = at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(dtype));
  auto compact = *this;
  compact.offset = 0;
  return compact.on(allocate_storage(bytes, device));
}

c10::Storage allocate_storage(size_t bytes, c10::Device device) {
  c10::impl::ExcludeDispatchKeyGuard below(dtensor::kDTensorKey);
  return at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions(at::kByte).device(device)).storage();
}

GroupId Tape::new_group() {
  groups_.emplace_back();
  return static_cast<GroupId>(groups_.size() - 1);
}

ValueId Tape::new_value(GroupId group) {
  values_.push_back({group, static_cast<uint32_t>(items_.size())});
  return values_.size() - 1;
}

void Tape::push(Item item, std::span<const GroupId> written) {
  TORCH_INTERNAL_ASSERT(items_.size() < std::numeric_limits<uint32_t>::max());
  const auto index = static_cast<uint32_t>(items_.size());
  for (auto group : written) {
    auto& writers = groups_[group];
    if (writers.empty() || writers.back() != index) writers.push_back(index);
  }
  const auto* operation = std::get_if<Operation>(&item);
  if (std::holds_alternative<Reseed>(item) || (operation != nullptr && operation->draws)) draws_.push_back(index);
  items_.push_back(std::move(item));
}

std::vector<uint32_t> Tape::slice(std::span<const ValueId> wanted, bool draws) const {
  // Items are taken from the last to the first, so the first time a group is asked for is also the latest moment at
  // which its content is needed: every earlier writer, and no later one, belongs to the slice.
  std::priority_queue<uint32_t> open;
  std::unordered_set<uint32_t> seen;
  std::unordered_set<GroupId> reached;
  const auto add = [&](uint32_t index) {
    if (seen.insert(index).second) open.push(index);
  };
  const auto need = [&](ValueId value, uint32_t before) {
    const auto& [group, creator] = values_[value];
    if (creator < before) add(creator);
    if (!reached.insert(group).second) return;
    for (auto writer : groups_[group]) {
      if (writer >= before) break;
      add(writer);
    }
  };
  for (auto value : wanted) need(value, static_cast<uint32_t>(items_.size()));
  if (draws) {
    for (auto index : draws_) add(index);
  }
  std::vector<uint32_t> slice;
  while (!open.empty()) {
    const auto index = open.top();
    open.pop();
    slice.push_back(index);
    for_each_value(items_[index], [&](ValueId value) { need(value, index); });
  }
  std::reverse(slice.begin(), slice.end());
  return slice;
}

std::vector<at::Tensor> Tape::generator_states() const {
  std::vector<at::Tensor> states{generator_state_};
  for (auto& item : items_) {
    if (const auto* reseed = std::get_if<Reseed>(&item); reseed != nullptr && reseed->state.defined()) {
      states.push_back(reseed->state);
    }
    const auto* operation = std::get_if<Operation>(&item);
    if (operation == nullptr) continue;
    for (auto& argument : operation->arguments) {
      const auto* literal = std::get_if<c10::IValue>(&argument);
      if (literal == nullptr || !literal->isGenerator() || literal->toGenerator() == host_generator()) continue;
      states.push_back(literal->toGenerator().get_state());
    }
  }
  return states;
}

uint64_t Tape::enlist(RecordedValue& value) {
  std::lock_guard lock(mutex_);
  recorded_.insert(&value);
  return births_++;
}

void Tape::strike(RecordedValue& value) {
  std::lock_guard lock(mutex_);
  recorded_.erase(&value);
}

std::vector<LiveValue> Tape::live() const {
  std::vector<std::pair<uint64_t, LiveValue>> found;
  {
    std::lock_guard lock(mutex_);
    for (auto* value : recorded_) {
      std::vector<at::Tensor> tensors;
      value->collect(tensors);
      for (auto& tensor : tensors) found.push_back({value->birth(), {std::move(tensor), value->id()}});
    }
  }
  // The order of birth is the same on all ranks.
  std::stable_sort(found.begin(), found.end(), [](auto& a, auto& b) { return a.first < b.first; });
  std::vector<LiveValue> live;
  for (auto& [birth, value] : found) live.push_back(std::move(value));
  return live;
}

std::shared_ptr<Tape> tape_of(const at::Tensor& deferred) {
  auto* value = RecordedValue::of(deferred);
  return value == nullptr ? nullptr : value->tape();
}

ValueId value_id_of(const at::Tensor& deferred) {
  auto* value = RecordedValue::of(deferred);
  return value == nullptr ? kNoValue : value->id();
}

}  // namespace hsdp
