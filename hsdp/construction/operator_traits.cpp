#include "hsdp/construction/operator_traits.h"

#include <ATen/core/enum_tag.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/jit_type.h>

#include <array>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

namespace hsdp {
namespace {

using Names = std::unordered_set<std::string_view>;

const Names kFirstIsShape = {"aten::empty_like", "aten::zeros_like", "aten::ones_like",    "aten::full_like",
                             "aten::rand_like",  "aten::randn_like", "aten::randint_like", "aten::new_empty",
                             "aten::new_zeros",  "aten::new_ones",   "aten::new_full",     "aten::new_empty_strided"};
const Names kSecondIsShape = {"aten::expand_as", "aten::view_as", "aten::reshape_as", "aten::resize_as_",
                              "aten::type_as"};
const Names kOverwrites = {"aten::zero_",        "aten::fill_",      "aten::copy_",       "aten::normal_",
                           "aten::uniform_",     "aten::random_",    "aten::bernoulli_",  "aten::cauchy_",
                           "aten::exponential_", "aten::geometric_", "aten::log_normal_", "aten::eye"};
const Names kReadsOnHost = {"aten::item", "aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero",
                            "aten::allclose"};

const Names kDrawsByShape = {"aten::rand",         "aten::randn",      "aten::randint",      "aten::randperm",
                             "aten::rand_like",    "aten::randn_like", "aten::randint_like", "aten::normal",
                             "aten::normal_",      "aten::uniform",    "aten::uniform_",     "aten::random",
                             "aten::random_",      "aten::bernoulli",  "aten::bernoulli_",   "aten::cauchy_",
                             "aten::exponential_", "aten::geometric_", "aten::log_normal_"};

bool holds_tensor(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::TensorType) return true;
  for (auto& contained : type.containedTypes()) {
    if (holds_tensor(*contained)) return true;
  }
  return false;
}

bool is_kind(const c10::Type& type, c10::TypeKind kind) {
  if (type.kind() == kind) return true;
  const auto* optional = type.castRaw<c10::OptionalType>();
  return optional != nullptr && optional->getElementType()->kind() == kind;
}

OperatorTraits read_traits(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const std::string_view name = schema.name();
  OperatorTraits traits;
  traits.draws = op.hasTag(at::Tag::nondeterministic_seeded);
  traits.reads_on_host = kReadsOnHost.contains(name) || op.hasTag(at::Tag::data_dependent_output);
  traits.draws_by_shape = kDrawsByShape.contains(name);
  traits.dtype_only = name == "aten::type_as" || (name == "aten::to" && schema.overload_name() == "other");
  traits.compares_types = name == "aten::_has_compatible_shallow_copy_type";
  // Normalisation in training writes its running statistics without saying so in the schema.
  const bool hidden_statistics = name == "aten::batch_norm" || name == "aten::instance_norm" ||
                                 name == "aten::native_batch_norm" || name == "aten::_batch_norm_impl_index" ||
                                 name == "aten::cudnn_batch_norm" || name == "aten::miopen_batch_norm";
  const auto& arguments = schema.arguments();
  traits.arguments.resize(arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& argument = traits.arguments[i];
    const auto& type = *arguments[i].real_type();
    argument.written = arguments[i].alias_info() != nullptr && arguments[i].alias_info()->isWrite();
    if (hidden_statistics && (arguments[i].name() == "running_mean" || arguments[i].name() == "running_var")) {
      argument.written = true;
    }
    traits.writes |= argument.written;
    argument.shape_only = (i == 0 && kFirstIsShape.contains(name)) || (i == 1 && kSecondIsShape.contains(name)) ||
                          (i == 1 && traits.dtype_only);
    argument.device = is_kind(type, c10::TypeKind::DeviceObjType);
    argument.optional_device = argument.device && type.kind() == c10::TypeKind::OptionalType;
    argument.pin_memory = arguments[i].name() == "pin_memory";
    argument.generator = is_kind(type, c10::TypeKind::GeneratorType);
    argument.indices = arguments[i].name() == "indices" && type.kind() == c10::TypeKind::ListType;
    traits.draws |= argument.generator;
  }
  traits.overwrites = traits.writes && kOverwrites.contains(name);
  traits.returns_written = traits.writes;
  for (auto& result : schema.returns()) {
    const bool tensor = holds_tensor(*result.real_type());
    traits.makes_tensors |= tensor;
    const auto* alias = result.alias_info();
    bool found = false;
    for (size_t i = 0; tensor && !found && alias != nullptr && alias->isWrite() && i < arguments.size(); ++i) {
      const auto* other = arguments[i].alias_info();
      if (other == nullptr || !other->isWrite() || other->beforeSets() != alias->beforeSets()) continue;
      traits.returned_arguments.push_back(i);
      found = true;
    }
    traits.returns_written &= found;
  }
  return traits;
}

}  // namespace

const OperatorTraits& traits_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<c10::OperatorHandle, OperatorTraits> cache;
  auto found = cache.find(op);
  if (found == cache.end()) found = cache.emplace(op, read_traits(op)).first;
  return found->second;
}

}  // namespace hsdp
