#include "hsdp/sharded_module.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "dtensor/hash_bytes.h"
#include "dtensor/mesh_collectives.h"
#include "hsdp/construction/replay.h"
#include "hsdp/host.h"
#include "hsdp/module_access.h"
#include "hsdp/name_pattern.h"
#include "hsdp/rank_generators.h"
#include "hsdp/replica_check.h"

namespace hsdp {
namespace {

using Below = c10::impl::ExcludeDispatchKeyGuard;
using dtensor::raise;
using dtensor::StateError;
using dtensor::ValueError;

// Whether any of these values can only be had by drawing the construction's random numbers again.
bool depends_on_draws(const Tape& tape, const std::vector<ValueId>& wanted) {
  const auto items = tape.slice(wanted, /*draws=*/false);
  return std::any_of(items.begin(), items.end(), [&](uint32_t index) {
    const auto* operation = std::get_if<Operation>(&tape.items()[index]);
    return operation != nullptr && operation->draws;
  });
}

int64_t hash_of(const std::vector<at::Tensor>& tensors) {
  auto hash = dtensor::hash_bytes(nullptr, 0);
  for (auto& bytes : tensors) hash = dtensor::hash_bytes(bytes.const_data_ptr(), bytes.nbytes(), hash);
  return static_cast<int64_t>(hash);
}

}  // namespace

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
  if (device.type() == mesh()->device_type()) return;
  raise<ValueError>(where, "asked for ", device, ", expected a ", c10::DeviceTypeName(mesh()->device_type(), true),
                    " device as ", mesh()->to_string(), " has; pass env.device()");
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
  // Without an index it stays what fully_shard found.
  if (context_->offload.to_host && (device.has_index() || device.type() == kHost)) {
    for (auto& unit : units_) {
      if (unit->context().offload.to_host) unit->set_device(device);
    }
  }
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
  if (mesh()->size() > 1 && mesh()->has_groups()) {
    std::vector<int64_t> hashes;
    for (auto& tape : tapes_) hashes.push_back(hash_of(tape->generator_states()));
    const auto mine = at::tensor(hashes).to(units_.front()->device());
    const auto table = dtensor::all_gather_rows(*mesh(), mine, {"all_gather", "replay_init seed check"}).to(kHost);
    for (int64_t rank = 1; rank < mesh()->size(); ++rank) {
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

UnitSet ShardedModule::unit_set() const { return UnitSet(scheduler(), units_); }

UnitSet ShardedModule::unit_set(const std::string& pattern) const {
  std::vector<std::shared_ptr<Unit>> found;
  std::string names;
  for (auto& unit : units_) {
    names += (names.empty() ? "\"" : ", \"") + unit->name() + "\"";
    if (matches_pattern(pattern, unit->name())) found.push_back(unit);
  }
  if (found.empty()) {
    raise<ValueError>("units", "pattern \"", pattern, "\" matches no unit, expected at least one; they are ", names);
  }
  return UnitSet(scheduler(), std::move(found));
}

std::vector<std::pair<std::string, at::Tensor>> ShardedModule::locals_replicated_over(int64_t axis) const {
  std::vector<std::pair<std::string, at::Tensor>> locals;
  for (auto& unit : units_) {
    for (auto& parameter : unit->parameters()) {
      if (!parameter.layout().placements()[static_cast<size_t>(axis)].is_replicate()) continue;
      locals.emplace_back(parameter.name(), parameter.impl().local());
    }
  }
  return locals;
}

void ShardedModule::check_replicas() const {
  Below below(dtensor::kDTensorKey);
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  for (int64_t axis = 0; axis < mesh()->ndim(); ++axis) {
    const auto locals = locals_replicated_over(axis);
    if (mesh()->size(axis) > 1 && !locals.empty()) check_replicas_equal(locals, *mesh(), axis);
  }
}

void ShardedModule::part_generators() {
  if (mesh()->size() == 1 || !mesh()->has_groups()) return;
  hsdp::part_generators(mesh()->rank(), units_.front()->device());
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
    if (entry.value().defined() && known_.count(entry.value().unsafeGetTensorImpl()) == 0) return true;
  }
  const auto children = module.children();
  return std::any_of(children.begin(), children.end(), [this](auto& child) { return registers_others(*child); });
}

void ShardedModule::check_registered() const {
  if (!registers_others(*module_)) return;
  for (auto& parameter : module_->named_parameters()) {
    if (known_.count(parameter.value().unsafeGetTensorImpl()) != 0) continue;
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
    check_replicas();
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
