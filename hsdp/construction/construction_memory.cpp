#include "hsdp/construction/construction_memory.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "dtensor/error.h"
#include "hsdp/construction/replay.h"
#include "hsdp/host.h"

namespace hsdp {
namespace {

c10::Storage copy_of(const c10::Storage& storage, size_t begin, size_t bytes) {
  auto copy = allocate_storage(bytes, kHost);
  if (bytes != 0) std::memcpy(copy.mutable_data(), static_cast<const char*>(storage.data()) + begin, bytes);
  return copy;
}

c10::Storage copy_of(const c10::Storage& storage) { return copy_of(storage, 0, storage.nbytes()); }

// A large tensor from outside is referred to, not copied, if its memory is sure to live as long as the reference.
// Memory that did not come from an allocator (from_blob) belongs to somebody else.
bool may_refer(const c10::Storage& storage) {
  constexpr size_t kLargestCopy = kLargestConstant * sizeof(double);
  return storage.nbytes() > kLargestCopy && storage.allocator() != nullptr;
}

}  // namespace

RecordedValue::RecordedValue(std::shared_ptr<Tape> tape, ConstructionMemory& table, std::shared_ptr<Memory> memory,
                             ValueId id)
    : tape_(std::move(tape)), table_(&table), memory_(std::move(memory)), id_(id) {
  slot_ = memory_->values.size();
  memory_->values.push_back(this);
  birth_ = tape_->enlist(*this);
}

RecordedValue::~RecordedValue() {
  if (tape_) tape_->strike(*this);
  if (!memory_) return;
  auto& values = memory_->values;
  values[slot_] = values.back();
  values[slot_]->slot_ = slot_;
  values.pop_back();
  if (values.empty()) table_->forget(*memory_);
}

RecordedValue* RecordedValue::of(const at::TensorBase& tensor) {
  const auto* impl = dtensor::dtensor_impl(tensor);
  return impl == nullptr ? nullptr : dynamic_cast<RecordedValue*>(impl->deferred().get());
}

bool RecordedValue::expose(dtensor::DTensorImpl& impl) {
  if (table_ == nullptr || table_->thread() != std::this_thread::get_id()) {
    dtensor::raise<dtensor::StateError>("raw access", impl.describe(),
                                        " was made by meta_init and has no memory yet, expected materialized values; "
                                        "call fully_shard(...) and materialize(device) first");
  }
  // `this` may go: `impl` stands for another value if its storage was exchanged.
  auto* table = table_;
  const auto memory = table->follow(impl).memory_;
  if (memory->real) return true;
  if (memory->drawn) {
    dtensor::raise<dtensor::NotSupportedError>(
        "meta_init", "raw access to ", impl.describe(),
        ", which depends on random numbers, expected a value that is known during construction; change it with "
        "operators, or after materialize(device)");
  }
  table->to_constant(*memory);
  return true;
}

void RecordedValue::attach(dtensor::DTensorImpl& impl) {
  if (tape_) {
    std::lock_guard lock(tape_->mutex());
    impls_.push_back(&impl);
  } else {
    impls_.push_back(&impl);
  }
}

void RecordedValue::detach(dtensor::DTensorImpl& impl) {
  std::unique_lock<std::mutex> lock;
  if (tape_) lock = std::unique_lock(tape_->mutex());
  impls_.erase(std::find(impls_.begin(), impls_.end(), &impl));
}

void RecordedValue::collect(std::vector<at::Tensor>& tensors) const {
  for (auto* impl : impls_) {
    // The last handle may be gone already, and the impl waits for the lock to say so.
    c10::raw::weak_intrusive_ptr::incref(impl);
    auto weak = c10::weak_intrusive_ptr<c10::TensorImpl>::reclaim(impl);
    if (auto strong = weak.lock()) tensors.emplace_back(std::move(strong));
  }
}

ConstructionMemory::~ConstructionMemory() { release(/*failed=*/true); }

void ConstructionMemory::release(bool failed) {
  for (auto& [storage, weak] : memories_) {
    auto memory = weak.lock();
    if (!memory) continue;
    for (auto* value : memory->values) {
      if (failed) {
        value->tape_->strike(*value);
        value->tape_ = nullptr;
        value->id_ = kNoValue;
      }
      value->table_ = nullptr;
      value->memory_ = nullptr;
    }
  }
  memories_.clear();
}

void ConstructionMemory::finish() {
  std::vector<std::shared_ptr<Memory>> all;
  for (auto& [storage, weak] : memories_) {
    if (auto memory = weak.lock()) all.push_back(std::move(memory));
  }
  for (auto& memory : all) follow_all(*memory);
  all.clear();
  // shelve() gives memory another place in the table.
  std::vector<std::shared_ptr<Memory>> constants;
  for (auto& [storage, weak] : memories_) {
    if (auto memory = weak.lock(); memory && memory->real) constants.push_back(std::move(memory));
  }
  for (auto& memory : constants) {
    shelve(*memory, memory->external && !may_refer(memory->storage) ? copy_of(memory->storage) : memory->storage);
  }
  constants.clear();
  release(/*failed=*/false);
  outside_.clear();
}

std::shared_ptr<Memory> ConstructionMemory::find(const c10::Storage& storage) const {
  auto found = memories_.find(storage.unsafeGetStorageImpl());
  return found == memories_.end() ? nullptr : found->second.lock();
}

void ConstructionMemory::forget(const Memory& memory) { memories_.erase(memory.storage.unsafeGetStorageImpl()); }

std::shared_ptr<Memory> ConstructionMemory::add_real(const c10::Storage& storage, bool external) {
  auto memory = std::make_shared<Memory>();
  memory->storage = storage;
  memory->real = true;
  memory->external = external;
  memories_[storage.unsafeGetStorageImpl()] = memory;
  return memory;
}

std::shared_ptr<Memory> ConstructionMemory::add_taped(const c10::Storage& meta_storage, bool drawn) {
  auto memory = std::make_shared<Memory>();
  memory->storage = meta_storage;
  memory->drawn = drawn;
  memory->group = tape_->new_group();
  memories_[meta_storage.unsafeGetStorageImpl()] = memory;
  return memory;
}

at::Tensor ConstructionMemory::wrap(const at::Tensor& inner, const std::shared_ptr<Memory>& memory) {
  const auto id = memory->real ? kNoValue : tape_->new_value(memory->group);
  return at::detail::make_tensor<dtensor::DTensorImpl>(inner,
                                                       std::make_shared<RecordedValue>(tape_, *this, memory, id));
}

void ConstructionMemory::rebind(dtensor::DTensorImpl& impl, const std::shared_ptr<Memory>& memory) {
  const auto id = memory->real ? kNoValue : tape_->new_value(memory->group);
  impl.set_deferred_value(impl.local(), std::make_shared<RecordedValue>(tape_, *this, memory, id));
}

RecordedValue& ConstructionMemory::follow(dtensor::DTensorImpl& impl) {
  auto& value = static_cast<RecordedValue&>(*impl.deferred());
  const auto& local = impl.local();
  const auto& storage = impl.unsafe_storage();
  const bool same_storage = !storage || storage.is_alias_of(local.storage());
  if (same_storage && local.sizes().equals(impl.sizes()) && local.strides().equals(impl.strides()) &&
      local.storage_offset() == impl.storage_offset()) {
    return value;
  }
  if (!value.memory_->real) {
    dtensor::raise<dtensor::NotSupportedError>("meta_init", impl.describe(), " was given its shape, formerly ",
                                               local.sizes(),
                                               ", past the operators, expected view(), resize_() or set_()");
  }
  auto memory = same_storage ? value.memory_ : find(storage);
  if (!memory) memory = add_real(storage, /*external=*/true);
  TORCH_INTERNAL_ASSERT(memory->real);
  auto geometry = Geometry::of(local);
  geometry.sizes = impl.sizes().vec();
  geometry.strides = impl.strides().vec();
  geometry.offset = impl.storage_offset();
  // Other tensors may stand for the old value.
  auto followed = std::make_shared<RecordedValue>(tape_, *this, memory, kNoValue);
  impl.set_deferred_value(geometry.on(memory->storage), followed);
  return *followed;
}

void ConstructionMemory::follow_all(Memory& memory) {
  std::vector<dtensor::DTensorImpl*> impls;
  for (auto* value : memory.values) impls.insert(impls.end(), value->impls_.begin(), value->impls_.end());
  for (auto* impl : impls) follow(*impl);
}

void ConstructionMemory::move(Memory& memory, c10::Storage storage) {
  auto node = memories_.extract(memory.storage.unsafeGetStorageImpl());
  memory.storage = std::move(storage);
  node.key() = memory.storage.unsafeGetStorageImpl();
  memories_.insert(std::move(node));
  memory.readings.clear();
}

std::vector<std::pair<ValueId, Geometry>> ConstructionMemory::name_views(Memory& memory) {
  std::vector<std::pair<ValueId, Geometry>> views;
  for (auto* value : memory.values) {
    const auto geometry = Geometry::of(value->impls_.front()->local());
    value->id_ = memory.real ? kNoValue : tape_->new_value(memory.group);
    if (!memory.real) views.emplace_back(value->id_, geometry);
    for (auto* impl : value->impls_) impl->set_deferred_value(geometry.on(memory.storage), impl->deferred());
  }
  return views;
}

void ConstructionMemory::shelve(Memory& memory, c10::Storage content) {
  follow_all(memory);
  const auto bytes = memory.storage.nbytes();
  move(memory, allocate_storage(bytes, at::kMeta));
  memory.real = false;
  memory.drawn = false;
  memory.external = false;
  memory.group = tape_->new_group();
  Allocation allocation{std::move(content), bytes, name_views(memory)};
  tape_->push(std::move(allocation), std::array{memory.group});
}

void ConstructionMemory::to_tape(Memory& memory) {
  TORCH_INTERNAL_ASSERT(memory.real);
  shelve(memory, memory.external && may_refer(memory.storage) ? memory.storage : copy_of(memory.storage));
}

void ConstructionMemory::to_constant(Memory& memory) {
  TORCH_INTERNAL_ASSERT(!memory.real && !memory.drawn);
  std::vector<ValueId> wanted;
  for (auto* value : memory.values) wanted.push_back(value->id_);
  std::unordered_map<ValueId, at::Tensor> computed;
  evaluate(*tape_, wanted, [&](ValueId id, const at::Tensor& full) { computed[id] = full; });
  move(memory, computed.begin()->second.storage());
  memory.real = true;
  for (auto* value : memory.values) {
    const auto& full = computed.at(std::exchange(value->id_, kNoValue));
    TORCH_INTERNAL_ASSERT(full.storage().is_alias_of(memory.storage));
    for (auto* impl : value->impls_) impl->set_deferred_value(dtensor::raw_alias(full), impl->deferred());
  }
}

void ConstructionMemory::renew(Memory& memory, bool real, bool drawn) {
  follow_all(memory);
  const auto bytes = memory.storage.nbytes();
  move(memory, allocate_storage(bytes, real ? kHost : at::kMeta));
  memory.real = real;
  memory.drawn = drawn;
  if (!real) memory.group = tape_->new_group();
  auto views = name_views(memory);
  if (!real) tape_->push(Allocation{c10::Storage(), bytes, std::move(views)}, std::array{memory.group});
}

ValueId ConstructionMemory::read_constant(const at::Tensor& real, bool wrapped_number) {
  // Enough for operators in a loop over the same few constants.
  constexpr size_t kReadingsKept = 8;
  const auto& storage = real.storage();
  auto memory = find(storage);
  std::vector<Reading>* readings;
  if (memory) {
    readings = &memory->readings;
  } else {
    auto& outside = outside_[storage.unsafeGetStorageImpl()];
    outside.first = storage;
    readings = &outside.second;
  }
  const bool refer = (memory == nullptr || memory->external) && may_refer(storage);
  auto geometry = Geometry::of(real);
  geometry.wrapped_number |= wrapped_number;
  const auto begin = static_cast<size_t>(geometry.offset) * real.itemsize();
  const auto bytes = at::detail::computeStorageNbytes(geometry.sizes, geometry.strides, real.itemsize());
  for (auto& known : *readings) {
    // Raw writes leave no trace but the bytes.
    if (known.geometry == geometry &&
        (refer || bytes == 0 ||
         std::memcmp(known.content.data(), static_cast<const char*>(storage.data()) + begin, bytes) == 0)) {
      return known.value;
    }
  }
  const auto content = refer ? storage : copy_of(storage, begin, bytes);
  auto view = geometry;
  if (!refer) view.offset = 0;
  const auto group = tape_->new_group();
  const auto value = tape_->new_value(group);
  tape_->push(Allocation{content, content.nbytes(), {{value, std::move(view)}}}, std::array{group});
  if (readings->size() == kReadingsKept) readings->erase(readings->begin());
  readings->push_back({std::move(geometry), content, value});
  return value;
}

}  // namespace hsdp
