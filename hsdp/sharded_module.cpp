#include "hsdp/sharded_module.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "hsdp/construction/replay.h"
#include "hsdp/init.h"
#include "hsdp/module_access.h"
#include "hsdp/transport.h"

namespace hsdp {
namespace {

using Below = c10::impl::ExcludeDispatchKeyGuard;
using dtensor::raise;
using dtensor::StateError;
using dtensor::ValueError;

constexpr auto kWhere = "fully_shard";

// Buffers that are still deferred belong to nobody; reading one in a forward reports everything that has no values.
class LooseOwner : public dtensor::ParameterOwner {
 public:
  explicit LooseOwner(std::weak_ptr<ShardedModule> module) : module_(std::move(module)) {}
  bool readable() const override {
    auto module = module_.lock();
    return module && module->scheduler()->readable();
  }
  at::Tensor unsharded(size_t, bool) override {
    if (auto module = module_.lock()) module->scheduler()->check_values();
    return {};
  }
  at::Tensor unsharded_for_raw_access(size_t index) override { return unsharded(index, false); }
  void gather() override {}
  void pin() override {}
  void unpin() override {}
  void written(size_t) override {}
  void shard_written(size_t) override {}

 private:
  std::weak_ptr<ShardedModule> module_;
};

std::string list(const std::set<std::string>& items, size_t limit) {
  std::string text;
  size_t count = 0;
  for (auto& item : items) {
    if (count++ == limit) return text + ", and " + std::to_string(items.size() - limit) + " more";
    text += (count > 1 ? ", " : "") + item;
  }
  return text;
}

// FNV-1a; ranks only have to notice that they differ.
int64_t hash_bytes(const at::Tensor& bytes) {
  uint64_t hash = 1469598103934665603ull;
  const auto* data = static_cast<const uint8_t*>(bytes.const_data_ptr());
  for (size_t i = 0; i < bytes.nbytes(); ++i) hash = (hash ^ data[i]) * 1099511628211ull;
  return static_cast<int64_t>(hash);
}

}  // namespace

// What fully_shard would do, found out before anything changes.
struct ShardedModule::Collected {
  struct Parameter {
    at::Tensor tensor;
    std::vector<ParameterSlot> slots;
  };
  struct Group {
    std::string path;
    torch::nn::Module* module;
    std::vector<Parameter> parameters;
  };
  std::vector<Group> groups;  // root first, then in the order of named_modules
  std::vector<std::shared_ptr<Unit>> nested;
  std::unordered_map<const c10::TensorImpl*, std::vector<ParameterSlot>> nested_slots;
  std::unordered_set<const c10::TensorImpl*> parameters;

  Collected(torch::nn::Module& root, const UnitSelector& selector) {
    groups.push_back({"", &root, {}});
    std::vector<bool> used(selector.rules().size(), false);
    std::set<std::string> types, paths;
    visit(root, "", 0, selector, used, types, paths);
    for (size_t i = 0; i < used.size(); ++i) {
      if (used[i]) continue;
      raise<ValueError>(kWhere, "selector ", selector.rules()[i].description,
                        " matches none of the submodules, expected at "
                        "least one; the types here are ",
                        types.empty() ? "none" : list(types, 12), ", the names ",
                        paths.empty() ? "none" : list(paths, 12));
    }
  }

 private:
  struct Position {
    size_t group, index;
  };

  void visit(torch::nn::Module& module, const std::string& path, size_t group, const UnitSelector& selector,
             std::vector<bool>& used, std::set<std::string>& types, std::set<std::string>& paths) {
    if (!seen_modules_.insert(&module).second) return;
    for (auto& entry : ModuleAccess::parameters(module)) {
      if (!entry.value().defined()) continue;
      add({&module, entry.key(), path.empty() ? entry.key() : path + "." + entry.key()}, entry.value(), group);
    }
    for (auto& child : module.named_children()) {
      const auto child_path = path.empty() ? child.key() : path + "." + child.key();
      types.insert(child.value()->name());
      paths.insert(child_path);
      auto child_group = group;
      for (size_t i = 0; i < used.size(); ++i) {
        if (!selector.rules()[i].matches(child_path, *child.value())) continue;
        used[i] = true;
        if (child_group != group) continue;
        child_group = groups.size();
        groups.push_back({child_path, child.value().get(), {}});
      }
      visit(*child.value(), child_path, child_group, selector, used, types, paths);
    }
  }

  void add(ParameterSlot slot, const at::Tensor& tensor, size_t group) {
    const auto* identity = tensor.unsafeGetTensorImpl();
    if (auto found = positions_.find(identity); found != positions_.end()) {
      groups[found->second.group].parameters[found->second.index].slots.push_back(std::move(slot));
      return;
    }
    parameters.insert(identity);
    if (auto* impl = dtensor::distributed_impl(tensor)) {
      if (auto unit = std::dynamic_pointer_cast<Unit>(impl->owner())) {
        if (std::find(nested.begin(), nested.end(), unit) == nested.end()) nested.push_back(unit);
        nested_slots[identity].push_back(std::move(slot));
        return;
      }
    }
    positions_[identity] = {group, groups[group].parameters.size()};
    groups[group].parameters.push_back({tensor, {std::move(slot)}});
  }

  std::unordered_set<const torch::nn::Module*> seen_modules_;
  std::unordered_map<const c10::TensorImpl*, Position> positions_;
};

std::shared_ptr<ShardedModule> ShardedModule::create(std::shared_ptr<torch::nn::Module> module,
                                                     const FullyShardOptions& options) {
  if (!module) raise<ValueError>(kWhere, "the module is null, expected one made in meta_init");
  auto mesh = options.mesh ? options.mesh : (is_initialized() ? current_environment() : init()).mesh();
  if (mesh->ndim() != 1) {
    raise<dtensor::NotSupportedError>(kWhere, mesh->to_string(), " has ", mesh->ndim(),
                                      " axes, expected one to shard over; "
                                      "pass a mesh of one axis");
  }
  Collected found(*module, options.units);

  // ---- validate; nothing has changed yet ----
  std::shared_ptr<ShardedModule> sharded(new ShardedModule(module));
  sharded->mesh_ = mesh;
  std::unordered_map<const c10::StorageImpl*, std::string> memory;
  std::vector<std::shared_ptr<Unit>> fresh;
  const auto loose_owner = std::make_shared<LooseOwner>(sharded);
  for (auto& unit : found.nested) {
    auto scheduler = unit->scheduler();
    if (unit->module() == module.get() || (scheduler && scheduler->root() == module.get())) {
      raise<StateError>(kWhere, "module ", module->name(), " is sharded already, expected one call a module");
    }
    for (auto& other : scheduler ? scheduler->units() : std::vector<std::shared_ptr<Unit>>()) {
      if (std::find(found.nested.begin(), found.nested.end(), other) != found.nested.end()) continue;
      raise<StateError>(kWhere, "unit \"", unit->name(), "\" belongs to another sharded module, which also has unit \"",
                        other->name(),
                        "\", expected parts that this module contains; a submodule can be shared by "
                        "sharding one module that contains both");
    }
    for (auto& parameter : unit->parameters()) sharded->add_tape(parameter.tape());
    if (unit->parameters().front().layout().mesh() != mesh) {
      raise<ValueError>(kWhere, "unit \"", unit->name(), "\" was sharded over another mesh, expected ",
                        mesh->to_string(), " for the whole module");
    }
  }
  for (auto& group : found.groups) {
    if (group.parameters.empty()) continue;
    std::vector<ShardedParameter> parameters;
    for (auto& parameter : group.parameters) {
      const auto& path = parameter.slots.front().path;
      auto* impl = dtensor::dtensor_impl(parameter.tensor);
      auto tape = impl != nullptr ? tape_of(parameter.tensor) : nullptr;
      if (!tape) {
        raise<dtensor::NotSupportedError>(
            kWhere, "parameter \"", path, "\" is ", dtensor::describe(parameter.tensor),
            ", expected one made by meta_init; build the module as hsdp::meta_init([&] { return Net(...); })");
      }
      if (at::isComplexType(parameter.tensor.scalar_type())) {
        raise<dtensor::NotSupportedError>(kWhere, "parameter \"", path, "\" is complex (",
                                          parameter.tensor.scalar_type(),
                                          "), expected a real dtype; register its real view");
      }
      if (parameter.tensor.dim() == 0) {
        raise<dtensor::NotSupportedError>(kWhere, "parameter \"", path,
                                          "\" is a scalar, expected at least one dim to shard; "
                                          "give it the shape {1}");
      }
      if (!parameter.tensor.is_contiguous()) {
        raise<dtensor::NotSupportedError>(kWhere, "parameter \"", path, "\" of shape ", parameter.tensor.sizes(),
                                          " has strides ", parameter.tensor.strides(), ", expected a contiguous one");
      }
      auto [other, unique] = memory.try_emplace(impl->local().storage().unsafeGetStorageImpl(), path);
      if (!unique) {
        raise<dtensor::NotSupportedError>(kWhere, "parameters \"", other->second, "\" and \"", path,
                                          "\" are views of one memory, expected memory of their own; tie parameters by "
                                          "registering one tensor twice");
      }
      auto layout = dtensor::Layout::create(mesh, {dtensor::Shard(0)}, parameter.tensor.sizes(), {},
                                            parameter.tensor.scalar_type());
      parameters.emplace_back(parameter.tensor, parameter.slots, std::move(layout));
      sharded->add_tape(tape);
    }
    const bool is_root = group.module == module.get();
    fresh.push_back(std::make_shared<Unit>(is_root ? "root" : group.path, group.module, std::move(parameters),
                                           options.reshard_after_forward.value_or(!is_root)));
  }
  if (fresh.empty() && found.nested.empty()) {
    raise<ValueError>(kWhere, "module ", module->name(), " has no parameters, expected at least one to shard");
  }
  std::unordered_map<const c10::TensorImpl*, std::string> buffers;
  for (auto& buffer : module->named_buffers()) {
    auto* impl = dtensor::dtensor_impl(buffer.value());
    if (impl == nullptr || !buffers.try_emplace(impl, buffer.key()).second) continue;
    if (auto tape = tape_of(buffer.value())) sharded->add_tape(tape);
  }
  for (auto& tape : sharded->tapes_) {
    for (auto& live : tape->live()) {
      auto* impl = dtensor::dtensor_impl(live.tensor);
      if (impl == nullptr || found.parameters.count(impl) != 0) continue;
      auto buffer = buffers.find(impl);
      const bool registered = buffer != buffers.end();
      // What requires grad and is not registered here is a parameter of another module of the same construction.
      if (!registered && live.tensor.requires_grad()) continue;
      const auto name = registered ? buffer->second : c10::str("unregistered member of shape ", live.tensor.sizes());
      if (auto shared = memory.find(impl->local().storage().unsafeGetStorageImpl()); shared != memory.end()) {
        raise<dtensor::NotSupportedError>(kWhere, "tensor \"", name, "\" is a view of parameter \"", shared->second,
                                          "\", expected memory of its own; take the view inside forward");
      }
      sharded->loose_.push_back({name, live.tensor, tape, live.id});
    }
  }
  std::shared_ptr<Transport> transport;
  if (mesh->has_groups() && mesh->size() > 1) transport = make_transport(mesh->shared_communicator(0));

  // ---- commit ----
  for (auto& unit : fresh) {
    for (auto& parameter : unit->parameters()) parameter.shard_on_meta();
    unit->adopt_parameters();
    unit->set_transport(transport);
  }
  for (auto& unit : found.nested) {
    for (auto& parameter : unit->parameters()) {
      auto slots = found.nested_slots.find(&parameter.impl());
      if (slots != found.nested_slots.end()) parameter.set_slots(slots->second);
    }
    for (auto& named : module->named_modules()) {
      if (named.value().get() == unit->module()) unit->set_name(named.key());
    }
  }
  for (auto& loose : sharded->loose_) {
    auto* impl = dtensor::dtensor_impl(loose.tensor);
    impl->set_name(loose.name);
    impl->set_owner(loose_owner, 0);
  }
  sharded->loose_owner_ = loose_owner;
  // A unit's place in this list is part of what ranks compare at each gather; it is the same on all.
  auto all = std::move(fresh);
  all.insert(all.end(), found.nested.begin(), found.nested.end());
  std::unordered_map<const Unit*, std::unordered_set<const torch::nn::Module*>> subtrees;
  for (auto& unit : all) {
    for (auto& below : const_cast<torch::nn::Module*>(unit->module())->modules(/*include_self=*/false)) {
      subtrees[unit.get()].insert(below.get());
    }
  }
  for (auto& unit : all) {
    std::vector<Unit*> ancestors;
    for (auto& other : all) {
      if (subtrees[other.get()].count(unit->module()) != 0) ancestors.push_back(other.get());
    }
    unit->set_ancestors(std::move(ancestors));
  }
  sharded->own_scheduler_ = std::make_shared<Scheduler>(module.get());
  sharded->own_scheduler_->set_values_check([weak = std::weak_ptr<ShardedModule>(sharded)] {
    auto locked = weak.lock();
    return locked == nullptr || locked->check_values();
  });
  sharded->own_scheduler_->set_units(all);
  sharded->units_ = std::move(all);
  return sharded;
}

void ShardedModule::add_tape(const std::shared_ptr<Tape>& tape) {
  if (std::find(tapes_.begin(), tapes_.end(), tape) == tapes_.end()) tapes_.push_back(tape);
}

std::shared_ptr<Scheduler> ShardedModule::scheduler() const {
  auto scheduler = units_.front()->scheduler();
  if (!scheduler) {
    raise<StateError>("forward",
                      "the fully_shard result that wrapped this module in a larger one is gone, expected it to "
                      "live as long as its parts are used");
  }
  return scheduler;
}

// ---- from meta to values ----

void ShardedModule::check_device(const char* where, at::Device device) const {
  if (device.type() == mesh_->device_type()) return;
  raise<ValueError>(where, "asked for ", device, ", expected a ", c10::DeviceTypeName(mesh_->device_type(), true),
                    " device as ", mesh_->to_string(), " has; pass env.device()");
}

void ShardedModule::materialize(at::Device device) {
  to_empty(device);
  replay_init();
}

void ShardedModule::replace_by_empty(at::Device device) {
  check_device("to_empty", device);
  std::vector<std::pair<ParameterSlot, at::Tensor>> former;
  for (auto& unit : units_) {
    for (auto& parameter : unit->parameters()) {
      for (auto& slot : parameter.slots()) former.emplace_back(slot, parameter.tensor());
    }
  }
  try {
    for (auto& unit : units_) {
      unit->reshard();
      for (auto& parameter : unit->parameters()) parameter.replace_by_empty(device);
    }
  } catch (...) {
    for (auto& [slot, tensor] : former) ModuleAccess::parameters(*slot.module)[slot.name] = tensor;
    throw;
  }
}

int64_t ShardedModule::reset_sharded_param() {
  struct Planned {
    ShardedParameter* parameter;
    ShardedParameter::Reset reset;
  };
  std::vector<Planned> plan;
  for (auto& unit : units_) {
    for (auto& parameter : unit->parameters()) plan.push_back({&parameter, parameter.plan_reset()});
  }
  int64_t repaired = 0;
  for (auto& planned : plan) {
    repaired += planned.reset.needed ? 1 : 0;
    planned.parameter->commit_reset(std::move(planned.reset));
  }
  scheduler()->recheck_values();
  return repaired;
}

void ShardedModule::to_empty(at::Device device) {
  replace_by_empty(device);
  reset_sharded_param();
  for (auto& unit : units_) {
    for (auto& parameter : unit->parameters()) parameter.impl().set_has_values(false);
  }
  Below below(dtensor::kDTensorKey);
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  // Tensors that are views of each other get one memory, as they had in construction.
  std::unordered_map<const c10::StorageImpl*, c10::Storage> storages;
  for (auto& loose : loose_) {
    const auto options = at::TensorOptions(device).dtype(loose.tensor.scalar_type());
    if (auto* impl = dtensor::dtensor_impl(loose.tensor)) {
      const auto& meta = impl->local();
      auto& storage = storages[meta.storage().unsafeGetStorageImpl()];
      if (!storage) {
        storage = at::empty({static_cast<int64_t>(meta.storage().nbytes())}, at::TensorOptions(device).dtype(at::kByte))
                      .storage();
      }
      impl->become_ordinary(at::empty({0}, options).set_(storage, meta.storage_offset(), meta.sizes(), meta.strides()));
    } else {
      loose.tensor.set_data(at::empty_strided(loose.tensor.sizes(), loose.tensor.strides(), options));
    }
    loose.filled = false;
    loose.empty_version = loose.tensor._version();
  }
  scheduler()->recheck_values();
}

void ShardedModule::replay_init() {
  for (auto& unit : units_) {
    for (auto& parameter : unit->parameters()) {
      if (parameter.is_materialized()) continue;
      raise<StateError>("replay_init", "parameter \"", parameter.name(),
                        "\" is on meta, expected memory; call "
                        "to_empty(device) first, or materialize(device) for both");
    }
  }
  Below below(dtensor::kDTensorKey);
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  if (mesh_->size() > 1 && mesh_->has_groups()) {
    const auto device =
        at::TensorOptions(units_.front()->parameters().front().impl().local().device()).dtype(at::kLong);
    std::vector<int64_t> hashes;
    for (auto& tape : tapes_) hashes.push_back(hash_bytes(tape->generator_state()));
    const auto mine = at::tensor(hashes).to(device.device());
    auto all = at::empty({mesh_->size() * mine.numel()}, device);
    mesh_->communicator(0).all_gather(all, mine, {"all_gather", "replay_init seed check"})->wait();
    const auto table = all.view({mesh_->size(), mine.numel()}).cpu();
    for (int64_t rank = 1; rank < mesh_->size(); ++rank) {
      if (table[rank].equal(table[0])) continue;
      raise<ValueError>("replay_init", "rank ", rank,
                        " had another generator state than rank 0 when meta_init ran, expected "
                        "the same on all ranks; call torch::manual_seed(seed) with one seed before meta_init");
    }
  }
  for (auto& tape : tapes_) {
    std::multimap<ValueId, ShardedParameter*> parameters;
    std::multimap<ValueId, LooseTensor*> loose;
    std::vector<ValueId> wanted;
    for (auto& unit : units_) {
      for (auto& parameter : unit->parameters()) {
        if (parameter.tape() != tape) continue;
        parameters.emplace(parameter.value(), &parameter);
        wanted.push_back(parameter.value());
      }
    }
    for (auto& tensor : loose_) {
      if (tensor.tape != tape) continue;
      loose.emplace(tensor.value, &tensor);
      wanted.push_back(tensor.value);
    }
    std::sort(wanted.begin(), wanted.end());
    wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
    replay(*tape, wanted, [&](ValueId value, const at::Tensor& full) {
      for (auto [entry, end] = parameters.equal_range(value); entry != end; ++entry) {
        auto& parameter = *entry->second;
        auto local = parameter.impl().local();
        local.copy_(dtensor::narrow_to_box(full, parameter.layout().local()));
        parameter.impl().set_has_values(true);
      }
      for (auto [entry, end] = loose.equal_range(value); entry != end; ++entry) {
        entry->second->tensor.copy_(full);
        entry->second->filled = true;
      }
    });
  }
  scheduler()->recheck_values();
}

std::vector<std::string> ShardedModule::tensors_without_values() const {
  std::vector<std::string> names;
  for (auto& unit : units_) {
    for (auto& parameter : unit->parameters()) {
      if (!parameter.is_materialized()) {
        names.push_back("\"" + parameter.name() + "\" (on meta)");
      } else if (!parameter.impl().has_values()) {
        names.push_back("\"" + parameter.name() + "\" (never set)");
      }
    }
  }
  for (auto& loose : loose_) {
    if (dtensor::dtensor_impl(loose.tensor) != nullptr) {
      names.push_back("\"" + loose.name + "\" (on meta)");
    } else if (!loose.filled && loose.tensor._version() == loose.empty_version) {
      names.push_back("\"" + loose.name + "\" (never set)");
    }
  }
  return names;
}

bool ShardedModule::check_values() const {
  std::unordered_set<const c10::TensorImpl*> managed;
  for (auto& unit : units_) {
    for (auto& parameter : unit->parameters()) managed.insert(&parameter.impl());
  }
  for (auto& parameter : module_->named_parameters()) {
    if (managed.count(parameter.value().unsafeGetTensorImpl()) != 0) continue;
    raise<StateError>("forward", "parameter \"", parameter.key(),
                      "\" was registered after fully_shard, expected all of them "
                      "before it; register it in the module's constructor");
  }
  const auto names = tensors_without_values();
  if (names.empty()) return true;
  std::string text;
  for (size_t i = 0; i < names.size() && i < 20; ++i) text += (i ? ", " : "") + names[i];
  if (names.size() > 20) text += ", and " + std::to_string(names.size() - 20) + " more";
  raise<StateError>(
      "forward", names.size(), " tensors have no values: ", text,
      "; expected all to be set before the first forward: call materialize(device), or to_empty(device) and "
      "replay_init()");
}

}  // namespace hsdp
