#include "hsdp/sharded_module.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "dtensor/hash_bytes.h"
#include "hsdp/construction/replay.h"
#include "hsdp/host.h"
#include "hsdp/init.h"
#include "hsdp/module_access.h"
#include "hsdp/rank_generators.h"
#include "hsdp/transport.h"
#include "hsdp/unit_groups.h"

namespace hsdp {
namespace {

using Below = c10::impl::ExcludeDispatchKeyGuard;
using dtensor::raise;
using dtensor::StateError;
using dtensor::ValueError;

constexpr auto kWhere = "fully_shard";

// Whether any of these values can only be had by drawing the construction's random numbers again.
bool depends_on_draws(const Tape& tape, const std::vector<ValueId>& wanted) {
  const auto items = tape.slice(wanted, /*draws=*/false);
  return std::any_of(items.begin(), items.end(), [&](uint32_t index) {
    const auto* operation = std::get_if<Operation>(&tape.items()[index]);
    return operation != nullptr && operation->draws;
  });
}

// Buffers that are still deferred belong to nobody; reading one in a forward reports everything that has no values.
class LooseOwner : public dtensor::ParameterOwner {
 public:
  explicit LooseOwner(std::weak_ptr<ShardedModule> module) : module_(std::move(module)) {}
  bool readable() const override {
    auto module = module_.lock();
    return module && module->scheduler()->readable();
  }
  at::Tensor unsharded(size_t index, bool) override {
    if (index > 0) {
      raise<dtensor::NotSupportedError>("forward", "a tensor of shape ", c10::IntArrayRef(unregistered_.at(index - 1)),
                                        " that requires grad was made in meta_init and is not registered in the "
                                        "sharded module, expected register_parameter(name, tensor), or the detach() of "
                                        "what was computed from parameters");
    }
    if (auto module = module_.lock()) module->scheduler()->check_values();
    return {};
  }
  /// A tensor of the same construction that the module does not register and that requires grad. If it is another
  /// module's parameter, that one's fully_shard takes it over.
  void watch(dtensor::DTensorImpl& impl, const std::shared_ptr<LooseOwner>& self) {
    unregistered_.push_back(impl.sizes().vec());
    impl.set_owner(self, unregistered_.size());
  }
  at::Tensor unsharded_for_raw_access(size_t index) override { return unsharded(index, false); }
  void gather() override {}
  void pin() override {}
  void unpin() override {}
  void written(size_t) override {}
  void shard_written(size_t) override {}

 private:
  std::weak_ptr<ShardedModule> module_;
  std::vector<std::vector<int64_t>> unregistered_;  // by owner index, which starts at 1
};

int64_t hash_of(const std::vector<at::Tensor>& tensors) {
  auto hash = dtensor::hash_bytes(nullptr, 0);
  for (auto& bytes : tensors) hash = dtensor::hash_bytes(bytes.const_data_ptr(), bytes.nbytes(), hash);
  return static_cast<int64_t>(hash);
}

}  // namespace

std::shared_ptr<ShardedModule> ShardedModule::create(std::shared_ptr<torch::nn::Module> module,
                                                     const FullyShardOptions& options) {
  if (!module) raise<ValueError>(kWhere, "the module is null, expected one made in meta_init");
  auto mesh = options.mesh ? options.mesh : (is_initialized() ? current_environment() : init()).mesh();
  if (mesh->ndim() != 1) {
    raise<dtensor::NotSupportedError>(kWhere, mesh->to_string(), " has ", mesh->ndim(),
                                      " axes, expected one to shard over; "
                                      "pass a mesh of one axis");
  }
  const UnitGroups found(*module, options.units);

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
    if (scheduler && scheduler->gradient_divide_factor()) {
      raise<StateError>(
          kWhere, "unit \"", unit->name(), "\" has a gradient divide factor of ", *scheduler->gradient_divide_factor(),
          ", expected none yet; call set_gradient_divide_factor on what the outermost fully_shard returns");
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
    if (buffer.value().requires_grad() && found.parameters.count(impl) == 0) {
      raise<dtensor::NotSupportedError>(kWhere, "buffer \"", buffer.key(), "\" of shape ", buffer.value().sizes(),
                                        " requires grad, expected one without; register it as a parameter, or the "
                                        "detach() of what was computed from parameters");
    }
    if (auto tape = tape_of(buffer.value())) sharded->add_tape(tape);
  }
  std::vector<at::Tensor> unregistered;
  for (auto& tape : sharded->tapes_) {
    for (auto& live : tape->live()) {
      auto* impl = dtensor::dtensor_impl(live.tensor);
      if (impl == nullptr || found.parameters.count(impl) != 0) continue;
      auto buffer = buffers.find(impl);
      const bool registered = buffer != buffers.end();
      const auto name = registered ? buffer->second : c10::str("unregistered member of shape ", live.tensor.sizes());
      if (auto shared = memory.find(impl->local().storage().unsafeGetStorageImpl()); shared != memory.end()) {
        raise<dtensor::NotSupportedError>(kWhere, "tensor \"", name, "\" is a view of parameter \"", shared->second,
                                          "\", expected memory of its own; take the view inside forward");
      }
      if (!registered && live.tensor.requires_grad()) {
        unregistered.push_back(live.tensor);
        continue;
      }
      sharded->loose_.push_back({name, live.tensor, tape, live.id});
    }
  }
  std::shared_ptr<Transport> transport;
  if (mesh->has_groups() && mesh->size() > 1) transport = make_transport(mesh->shared_communicator(0));

  // ---- commit ----
  if (mesh->rank() == 0) {
    for (auto& orphan : found.orphans) std::fprintf(stderr, "%s\n", orphan.c_str());
  }
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
  for (auto& tensor : unregistered) loose_owner->watch(*dtensor::dtensor_impl(tensor), loose_owner);
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
  sharded->own_scheduler_->set_registration_check([weak = std::weak_ptr<ShardedModule>(sharded)] {
    if (auto locked = weak.lock()) locked->check_registered();
  });
  for (auto& unit : all) {
    for (auto& parameter : unit->parameters()) sharded->managed_.insert(&parameter.impl());
  }
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
  scheduler()->check_not_summoned("to_empty");
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
  scheduler()->check_not_summoned("reset_sharded_param");
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
  seed_of_to_empty_ = host_generator().current_seed();
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
  scheduler()->check_not_summoned("replay_init");
  check_generators();
  if (replay_values(/*only_missing=*/false)) part_generators();
  generators_settled_ = true;
  scheduler()->recheck_values();
}

void ShardedModule::replay_missing() {
  scheduler()->check_not_summoned("replay_missing");
  Below below(dtensor::kDTensorKey);
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  if (replay_values(/*only_missing=*/true)) {
    part_generators();
    generators_settled_ = true;
  }
  scheduler()->recheck_values();
}

void ShardedModule::check_generators() const {
  if (mesh_->size() > 1 && mesh_->has_groups()) {
    const auto device = at::TensorOptions(units_.front()->device()).dtype(at::kLong);
    std::vector<int64_t> hashes;
    for (auto& tape : tapes_) hashes.push_back(hash_of(tape->generator_states()));
    const auto mine = at::tensor(hashes).to(device.device());
    auto all = at::empty({mesh_->size() * mine.numel()}, device);
    mesh_->communicator(0).all_gather(all, mine, {"all_gather", "replay_init seed check"})->wait();
    const auto table = all.view({mesh_->size(), mine.numel()}).to(kHost);
    for (int64_t rank = 1; rank < mesh_->size(); ++rank) {
      if (table[rank].equal(table[0])) continue;
      raise<ValueError>("replay_init", "rank ", rank,
                        " had another generator state than rank 0 when meta_init ran, expected "
                        "the same on all ranks; call torch::manual_seed(seed) with one seed before meta_init, and seed "
                        "alike what constructors seed");
    }
  }
}

// Whether a generator stands now where plain construction leaves it.
bool ShardedModule::replay_values(bool only_missing) {
  bool as_constructed = false;
  bool generators_checked = !only_missing;
  for (auto& tape : tapes_) {
    std::multimap<ValueId, ShardedParameter*> parameters;
    std::multimap<ValueId, LooseTensor*> loose;
    std::vector<ValueId> wanted;
    for (auto& unit : units_) {
      for (auto& parameter : unit->parameters()) {
        if (only_missing || parameter.tape() != tape) continue;
        parameters.emplace(parameter.value(), &parameter);
        wanted.push_back(parameter.value());
      }
    }
    for (auto& tensor : loose_) {
      if (tensor.tape != tape || (only_missing && has_value(tensor))) continue;
      loose.emplace(tensor.value, &tensor);
      wanted.push_back(tensor.value);
    }
    std::sort(wanted.begin(), wanted.end());
    wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
    const ReplaySink sink = [&](ValueId value, const at::Tensor& full) {
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
    };
    if (only_missing && !depends_on_draws(*tape, wanted)) {
      evaluate(*tape, wanted, sink);
      continue;
    }
    if (!std::exchange(generators_checked, true)) check_generators();
    as_constructed |= replay(*tape, wanted, sink);
  }
  return as_constructed;
}

bool ShardedModule::has_value(const LooseTensor& loose) {
  return dtensor::dtensor_impl(loose.tensor) == nullptr &&
         (loose.filled || loose.tensor._version() != loose.empty_version);
}

void ShardedModule::set_gradient_divide_factor(double factor) {
  auto scheduler = this->scheduler();
  if (scheduler->root() != module_.get()) {
    raise<StateError>("set_gradient_divide_factor", "module ", module_->name(),
                      " is part of a larger sharded module, expected the outermost; call it on what the outermost "
                      "fully_shard returned");
  }
  scheduler->set_gradient_divide_factor(factor);
}

void ShardedModule::part_generators() {
  if (mesh_->size() == 1 || !mesh_->has_groups()) return;
  hsdp::part_generators(mesh_->rank(), units_.front()->device());
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
    } else if (!has_value(loose)) {
      names.push_back("\"" + loose.name + "\" (never set)");
    }
  }
  return names;
}

// Without the names of named_parameters(), which would cost more than a small forward.
bool ShardedModule::registers_others(torch::nn::Module& module) const {
  for (auto& entry : ModuleAccess::parameters(module)) {
    if (entry.value().defined() && managed_.count(entry.value().unsafeGetTensorImpl()) == 0) return true;
  }
  const auto children = module.children();
  return std::any_of(children.begin(), children.end(), [this](auto& child) { return registers_others(*child); });
}

void ShardedModule::check_registered() const {
  if (!registers_others(*module_)) return;
  for (auto& parameter : module_->named_parameters()) {
    if (managed_.count(parameter.value().unsafeGetTensorImpl()) != 0) continue;
    raise<StateError>("forward", "parameter \"", parameter.key(),
                      "\" was registered after fully_shard, expected all of them "
                      "before it; register it in the module's constructor");
  }
}

bool ShardedModule::check_values() {
  const auto names = tensors_without_values();
  if (names.empty()) {
    // Values that came from elsewhere than a replay: no call says when they are complete, so the first forward does.
    if (!std::exchange(generators_settled_, true) && !generators_are_parted() &&
        host_generator().current_seed() == seed_of_to_empty_) {
      part_generators();
    }
    return true;
  }
  std::string text;
  for (size_t i = 0; i < names.size() && i < 20; ++i) text += (i ? ", " : "") + names[i];
  if (names.size() > 20) text += ", and " + std::to_string(names.size() - 20) + " more";
  raise<StateError>(
      "forward", names.size(), " tensors have no values: ", text,
      "; expected all to be set before the first forward: call materialize(device), or to_empty(device) and "
      "replay_init()");
}

}  // namespace hsdp
