#include "hsdp/registered_tensors.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/nn/module.h>

#include <map>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "hsdp/init.h"

namespace hsdp {
namespace {

using dtensor::raise;
using dtensor::ValueError;

// Walks as Module::save does.
void collect_saved(const torch::nn::Module& module, std::unordered_set<const c10::TensorImpl*>& saved) {
  for (auto& entry : module.named_parameters(/*recurse=*/false)) saved.insert(entry.value().unsafeGetTensorImpl());
  for (auto& entry : module.named_buffers(/*recurse=*/false)) saved.insert(entry.value().unsafeGetTensorImpl());
  for (auto& child : module.named_children()) {
    if (child.value()->is_serializable()) collect_saved(*child.value(), saved);
  }
}

// Bit for bit: NaN is equal to itself, and there is a comparison for every dtype.
bool same_values(const at::Tensor& first, const at::Tensor& second) {
  const auto bytes = [](const at::Tensor& tensor) {
    return tensor.resolve_conj().resolve_neg().contiguous().view({-1}).view(at::kByte);
  };
  return bytes(first).equal(bytes(second.to(first.device())));
}

}  // namespace

std::vector<RegisteredTensor> registered_tensors(const ShardedModule& sharded) {
  std::unordered_map<const c10::TensorImpl*, ShardedParameter*> parameters;
  for (auto& unit : sharded.units()) {
    for (auto& parameter : unit->parameters()) parameters[&parameter.impl()] = &parameter;
  }
  std::unordered_set<const c10::TensorImpl*> saved;
  collect_saved(sharded.module(), saved);
  std::vector<RegisteredTensor> result;
  std::unordered_map<const c10::TensorImpl*, size_t> places;
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    const auto* impl = tensor.unsafeGetTensorImpl();
    auto [place, fresh] = places.try_emplace(impl, result.size());
    if (fresh) {
      auto found = parameters.find(impl);
      result.push_back({{}, tensor, found == parameters.end() ? nullptr : found->second, saved.contains(impl)});
    }
    result[place->second].names.push_back(name);
  };
  for (auto& entry : sharded.module().named_parameters()) add(entry.key(), entry.value());
  for (auto& entry : sharded.module().named_buffers()) add(entry.key(), entry.value());
  return result;
}

std::string quoted_list(const char* label, const std::vector<std::string>& names) {
  constexpr size_t kShown = 10;
  std::string text = label;
  for (size_t i = 0; i < names.size() && i < kShown; ++i) text += (i > 0 ? ", \"" : " \"") + names[i] + "\"";
  if (names.size() > kShown) text += " and " + std::to_string(names.size() - kShown) + " more";
  return text;
}

NameMatch match_names(const char* where, const std::string& what, const std::vector<RegisteredTensor>& targets,
                      const std::vector<ValueSource>& sources, const MatchOptions& options) {
  std::map<std::string, size_t> by_name;
  for (size_t i = 0; i < sources.size(); ++i) by_name[sources[i].name] = i;
  NameMatch match;
  std::vector<std::string> problems;
  std::vector<bool> used(sources.size(), false);
  for (auto& target : targets) {
    std::vector<size_t> found;
    for (auto& name : target.names) {
      auto entry = by_name.find(name);
      if (entry == by_name.end()) continue;
      const auto& source = sources[entry->second];
      const auto dtype = target.tensor.scalar_type();
      used[entry->second] = true;
      found.push_back(entry->second);
      if (!target.tensor.sizes().equals(source.sizes)) {
        problems.push_back(
            c10::str("\"", name, "\" of shape ", c10::IntArrayRef(source.sizes), ", expected ", target.tensor.sizes()));
      } else if ((c10::isComplexType(source.dtype) && !c10::isComplexType(dtype)) ||
                 (options.same_dtypes && source.dtype != dtype)) {
        problems.push_back(c10::str("\"", name, "\" of dtype ", source.dtype, ", expected ", dtype));
      }
    }
    // Of tied parameters one name is enough.
    if (found.empty() && (target.in_files || !options.unsaved_may_be_missing)) {
      match.missing.push_back(target.names.front());
    }
    match.sources.push_back(std::move(found));
  }
  for (size_t i = 0; i < sources.size(); ++i) {
    if (!used[i]) match.unexpected.push_back(sources[i].name);
  }
  std::vector<std::string> parts;
  if (options.strict && !match.missing.empty()) parts.push_back(quoted_list("missing", match.missing));
  if (options.strict && !match.unexpected.empty()) parts.push_back(quoted_list("unexpected", match.unexpected));
  constexpr size_t kShown = 10;
  for (size_t i = 0; i < problems.size() && i < kShown; ++i) parts.push_back(problems[i]);
  if (problems.size() > kShown) parts.push_back(c10::str(problems.size() - kShown, " more of other shapes or dtypes"));
  if (!parts.empty()) {
    std::string text;
    for (auto& part : parts) text += (text.empty() ? "" : ", ") + part;
    raise<ValueError>(where, what, " does not fit the module: ", text,
                      "; names and shapes must be those of the module");
  }
  return match;
}

std::vector<std::optional<size_t>> match_sources(const char* where, const std::string& what,
                                                 const std::vector<RegisteredTensor>& targets,
                                                 const std::vector<ValueSource>& sources, const MatchOptions& options) {
  std::vector<std::optional<size_t>> plan;
  for (const auto& found : match_names(where, what, targets, sources, options).sources) {
    plan.push_back(found.empty() ? std::nullopt : std::optional(found.front()));
    for (size_t k = 1; k < found.size(); ++k) {
      const auto &one = sources[found.front()], &other = sources[found[k]];
      const bool same_dtype = one.dtype == other.dtype;
      if (same_dtype && same_values(one.read(), other.read())) continue;
      raise<ValueError>(where, what, " has unlike ",
                        same_dtype ? std::string("values") : c10::str("dtypes ", one.dtype, " and ", other.dtype),
                        " for \"", one.name, "\" and \"", other.name,
                        "\", expected equal ones, since the module ties them; leave one of them out");
    }
  }
  return plan;
}

void set_value(const RegisteredTensor& target, const at::Tensor& whole) {
  c10::impl::ExcludeDispatchKeyGuard below(dtensor::kDTensorKey);
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  if (target.parameter == nullptr) {
    target.tensor.copy_(whole);
    return;
  }
  set_local(*target.parameter, dtensor::narrow_to_box(whole, target.parameter->layout().local()));
}

void set_local(const ShardedParameter& parameter, const at::Tensor& part) {
  c10::impl::ExcludeDispatchKeyGuard below(dtensor::kDTensorKey);
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  if (part.defined()) parameter.impl().local().copy_(part);
  parameter.impl().set_has_values(true);
}

at::Tensor whole_for_rank_0(const RegisteredTensor& target) {
  if (target.parameter == nullptr) return target.tensor;
  const auto& layout = target.parameter->layout();
  bool first_replica = true;
  for (int64_t axis = 0; axis < layout.mesh()->ndim(); ++axis) {
    if (!layout.placements()[static_cast<size_t>(axis)].is_replicate()) continue;
    layout.mesh()->communicator(axis).barrier({"barrier", target.names.front()});
    first_replica &= layout.mesh()->coordinate()[static_cast<size_t>(axis)] == 0;
  }
  return first_replica ? dtensor::DTensor(target.tensor).full_tensor() : at::Tensor();
}

void check_values(const char* where, const ShardedModule& sharded) {
  const auto names = sharded.tensors_without_values();
  if (names.empty()) return;
  raise<dtensor::StateError>(where, names.size(), " tensors have no values, the first is ", names.front(),
                             ", expected all to be set; call materialize(device) or load(path) first");
}

const dtensor::DeviceMesh& mesh_of(const ShardedModule& sharded, const char* where) {
  if (sharded.mesh()->has_groups()) return *sharded.mesh();
  raise<dtensor::StateError>(where, "the module lies on ", sharded.mesh()->to_string(),
                             ", which was made without groups, expected one that can communicate; use env.mesh()");
}

at::Device device_of(const ShardedModule& sharded) {
  const auto& local = sharded.units().front()->parameters().front().impl().local();
  const auto type = sharded.mesh()->device_type();
  if (local.device().type() == type) return local.device();
  if (is_initialized() && current_environment().device().type() == type) return current_environment().device();
  return at::Device(type);
}

}  // namespace hsdp
