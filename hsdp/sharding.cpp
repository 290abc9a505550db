// What fully_shard does to a module: everything is validated first, then changed.
#include <ATen/ATen.h>

#include <algorithm>
#include <cstdio>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "hsdp/host.h"
#include "hsdp/init.h"
#include "hsdp/sharded_module.h"
#include "hsdp/transport.h"
#include "hsdp/unit_groups.h"

namespace hsdp {
namespace {

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

// Where this rank computes on this mesh.
c10::Device compute_device(const dtensor::DeviceMesh& mesh) {
  if (is_initialized() && current_environment().device().type() == mesh.device_type()) {
    return current_environment().device();
  }
  return c10::Device(mesh.device_type(), mesh.device_type() == kHost ? -1 : 0);
}

void check_dtype(const char* name, const std::optional<at::ScalarType>& dtype) {
  if (!dtype || (at::isFloatingType(*dtype) && c10::elementSize(*dtype) > 1)) return;
  raise<ValueError>(kWhere, "mixed_precision.", name, " is ", *dtype,
                    ", expected a floating dtype of at least 16 bits; what travels in fewer takes an "
                    "AllGatherExtension");
}

std::shared_ptr<const UnitContext> make_context(const FullyShardOptions& options) {
  auto context = std::make_shared<UnitContext>();
  context->mesh = options.mesh ? options.mesh : (is_initialized() ? current_environment() : init()).mesh();
  const auto& mesh = *context->mesh;
  if (mesh.ndim() > 2) {
    raise<dtensor::NotSupportedError>(kWhere, mesh.to_string(), " has ", mesh.ndim(),
                                      " axes, expected one to shard over, or two: replicate, shard");
  }
  check_dtype("param_dtype", options.mixed_precision.param_dtype);
  check_dtype("reduce_dtype", options.mixed_precision.reduce_dtype);
  check_dtype("output_dtype", options.mixed_precision.output_dtype);
  check_dtype("grad_dtype", options.mixed_precision.grad_dtype);
  context->mixed_precision = options.mixed_precision;
  context->offload = options.offload;
  context->prefetch = options.prefetch;
  context->make_transport = options.transport ? options.transport : make_transport;
  if (mesh.has_groups() && context->shard_size() > 1) {
    context->transport = context->make_transport(mesh.shared_communicator(context->shard_axis()));
    if (!context->transport) raise<ValueError>(kWhere, "options.transport returned null, expected a transport");
  }
  return context;
}

void check_parameter_patterns(const UnitGroups& found, const FullyShardOptions& options) {
  std::vector<std::string> names;
  for (auto& group : found.groups) {
    for (auto& parameter : group.parameters) {
      for (auto& slot : parameter.slots) names.push_back(slot.path);
    }
  }
  check_patterns_match("replicated", options.replicated, names);
  std::vector<std::string> patterns;
  for (auto& [pattern, extension] : options.all_gather_extensions) {
    if (!extension) raise<ValueError>(kWhere, "all_gather_extensions \"", pattern, "\" is null, expected an extension");
    patterns.push_back(pattern);
  }
  check_patterns_match("all_gather_extensions", patterns, names);
}

int64_t shard_dim_of(const FullyShardOptions& options, const std::string& path, const at::Tensor& parameter) {
  const auto dim = options.shard_placement_fn ? options.shard_placement_fn(path, parameter).value_or(0) : 0;
  if (dim < -parameter.dim() || dim >= parameter.dim()) {
    raise<ValueError>("shard_placement_fn", "dim ", dim, " for parameter \"", path, "\" of shape ", parameter.sizes(),
                      ", expected ", -parameter.dim(), " to ", parameter.dim() - 1);
  }
  return dim < 0 ? dim + parameter.dim() : dim;
}

// Units whose module is picked; a pick that is no unit has no forward that could be told from its surroundings.
void mark_checkpointed(torch::nn::Module& root, const UnitSelector& selector,
                       const std::vector<std::shared_ptr<Unit>>& fresh,
                       const std::vector<std::shared_ptr<Unit>>& nested) {
  std::unordered_map<const torch::nn::Module*, std::shared_ptr<Unit>> units;
  for (auto* list : {&fresh, &nested}) {
    for (auto& unit : *list) {
      for (auto* top : unit->modules()) units[top] = unit;
    }
  }
  std::vector<std::shared_ptr<Unit>> picked;
  for (auto& rule : selector.rules()) {
    bool used = false;
    for (auto& named : root.named_modules("", /*include_self=*/false)) {
      if (!rule.matches(named.key(), *named.value())) continue;
      used = true;
      auto unit = units.find(named.value().get());
      if (unit == units.end()) {
        raise<ValueError>(kWhere, "activation_checkpoint ", rule.description, " picks \"", named.key(),
                          "\", which is no unit, expected one; name it in .units as well");
      }
      picked.push_back(unit->second);
    }
    if (!used) {
      raise<ValueError>(kWhere, "activation_checkpoint ", rule.description,
                        " matches none of the submodules, expected at least one that is a unit");
    }
  }
  for (auto& unit : picked) unit->set_checkpointed(true);
}

}  // namespace

std::shared_ptr<ShardedModule> ShardedModule::create(std::shared_ptr<torch::nn::Module> module,
                                                     const FullyShardOptions& options) {
  if (!module) raise<ValueError>(kWhere, "the module is null, expected one made in meta_init");
  const auto context = make_context(options);
  const auto& mesh = context->mesh;
  const UnitGroups found(*module, options.units, options.ignored);
  check_parameter_patterns(found, options);

  // ---- validate; nothing has changed yet ----
  std::shared_ptr<ShardedModule> sharded(new ShardedModule(module));
  sharded->context_ = context;
  std::unordered_map<const c10::StorageImpl*, std::string> memory;
  std::vector<std::shared_ptr<Unit>> fresh;
  const auto loose_owner = std::make_shared<LooseOwner>(sharded);
  for (auto& unit : found.nested) {
    auto scheduler = unit->scheduler();
    if (unit->modules().front() == module.get() || (scheduler && scheduler->root() == module.get())) {
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
      const bool is_replicated = matches_any(options.replicated, parameter.slots);
      if (parameter.tensor.dim() == 0 && !is_replicated) {
        raise<dtensor::NotSupportedError>(kWhere, "parameter \"", path,
                                          "\" is a scalar, expected at least one dim to shard; "
                                          "give it the shape {1}, or name it in .replicated");
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
      dtensor::Placements placements(static_cast<size_t>(mesh->ndim()), dtensor::Replicate());
      if (!is_replicated) placements.back() = dtensor::Shard(shard_dim_of(options, path, parameter.tensor));
      auto layout = dtensor::Layout::create(mesh, std::move(placements), parameter.tensor.sizes(), {},
                                            parameter.tensor.scalar_type());
      parameters.emplace_back(parameter.tensor, parameter.slots, std::move(layout));
      if (options.offload.to_host) parameters.back().offload(options.offload.pin_memory);
      for (auto& [pattern, extension] : options.all_gather_extensions) {
        if (!matches_any({pattern}, parameter.slots)) continue;
        parameters.back().set_extension(extension);
        break;
      }
      sharded->add_tape(tape);
    }
    const bool is_root = group.modules.front() == module.get();
    UnitSettings settings;
    settings.reshard_after_forward = options.reshard_after_forward.value_or(ReshardAfterForward(!is_root));
    settings.reshard_after_forward.group_of(context->shard_size());
    fresh.push_back(std::make_shared<Unit>(is_root ? "root" : group.path, group.modules, std::move(parameters), context,
                                           std::move(settings)));
    if (options.offload.to_host) fresh.back()->set_device(compute_device(*mesh));
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
      const auto is_ignored = std::find_if(found.ignored.begin(), found.ignored.end(), [&](const auto& parameter) {
        return parameter.tensor.unsafeGetTensorImpl() == impl;
      });
      const bool registered = buffer != buffers.end() || is_ignored != found.ignored.end();
      const auto name = buffer != buffers.end() ? buffer->second
                        : registered            ? is_ignored->slots.front().path
                                                : c10::str("unregistered member of shape ", live.tensor.sizes());
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
  mark_checkpointed(*module, options.activation_checkpoint, fresh, found.nested);

  // ---- commit ----
  if (mesh->rank() == 0) {
    for (auto& orphan : found.orphans) std::fprintf(stderr, "%s\n", orphan.c_str());
  }
  for (auto& unit : fresh) {
    for (auto& parameter : unit->parameters()) parameter.shard_on_meta();
    unit->adopt_parameters();
  }
  for (auto& unit : found.nested) {
    for (auto& parameter : unit->parameters()) {
      auto slots = found.nested_slots.find(&parameter.impl());
      if (slots != found.nested_slots.end()) parameter.set_slots(slots->second);
    }
    for (auto& named : module->named_modules()) {
      if (named.value().get() == unit->modules().front() && unit->modules().size() == 1) unit->set_name(named.key());
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
    for (auto* top : unit->modules()) {
      for (auto& below : const_cast<torch::nn::Module*>(top)->modules(/*include_self=*/false)) {
        subtrees[unit.get()].insert(below.get());
      }
    }
  }
  for (auto& unit : all) {
    std::vector<Unit*> ancestors;
    for (auto& other : all) {
      if (other != unit && subtrees[other.get()].count(unit->modules().front()) != 0) ancestors.push_back(other.get());
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
    for (auto& parameter : unit->parameters()) sharded->known_.insert(&parameter.impl());
  }
  for (auto& parameter : found.ignored) sharded->known_.insert(parameter.tensor.unsafeGetTensorImpl());
  sharded->own_scheduler_->set_units(all);
  sharded->units_ = std::move(all);
  return sharded;
}

}  // namespace hsdp
