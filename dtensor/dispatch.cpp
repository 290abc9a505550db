#include "dtensor/dispatch.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "dtensor/collective.h"
#include "dtensor/common_draws.h"
#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "dtensor/hash_bytes.h"
#include "dtensor/operator_call.h"
#include "dtensor/rules.h"

namespace dtensor {
namespace {

thread_local OperatorInterceptor* interceptor = nullptr;
thread_local bool sharded_rules = false;
// Whose parameters this thread last saw in a scope: tells whether it is in one where an operator sees none of them.
thread_local std::weak_ptr<ParameterOwner> last_readable;

thread_local int open_scopes = 0;

bool in_scope() {
  if (sharded_rules) return false;
  if (open_scopes > 0) return true;
  const auto owner = last_readable.lock();
  return owner && owner->readable();
}

// ---- storages of gathered parameters ----

struct StorageTable {
  std::shared_mutex mutex;
  std::unordered_map<const c10::StorageImpl*, std::pair<std::weak_ptr<ParameterOwner>, size_t>> owners;
};

StorageTable& storage_table() {
  // Leaked: tensors may outlive static destruction.
  static auto* table = new StorageTable;
  return *table;
}

// ---- key bit of plain views ----

struct KeySetAccess : c10::TensorImpl {
  static void add_key(c10::TensorImpl* impl) {
    const auto member = &KeySetAccess::key_set_;
    impl->*member = impl->key_set().add(kDTensorKey);
  }
};

// Owners read by one operator, pinned so that gathering one does not free another.
class PinnedOwners {
 public:
  PinnedOwners() = default;
  PinnedOwners(const PinnedOwners&) = delete;
  PinnedOwners& operator=(const PinnedOwners&) = delete;
  ~PinnedOwners() {
    for (auto& owner : owners_) owner->unpin();
  }
  void add(const std::shared_ptr<ParameterOwner>& owner) {
    for (auto& known : owners_) {
      if (known == owner) return;
    }
    owner->pin();
    owners_.push_back(owner);
  }

 private:
  c10::SmallVector<std::shared_ptr<ParameterOwner>, 2> owners_;
};

struct WholeArgument {
  at::Tensor original, whole;
  std::shared_ptr<ParameterOwner> owner;
  size_t index;
  bool written;
};

// What torch says of an in-place change of a leaf: inside a forward the leaf is a whole copy, which torch would let
// pass.
void refuse_inplace_on_leaf(const c10::OperatorHandle& op, const at::Tensor& tensor) {
  if (!at::GradMode::is_enabled() || !tensor.requires_grad()) return;
  auto* impl = dtensor_impl(tensor);
  raise<StateError>(op.schema().name().c_str(), impl != nullptr ? impl->describe() : "a view of a parameter",
                    " requires grad and is changed in place with grad mode on, expected torch::NoGradGuard around it");
}

// Beside whole parameters, a copy of one, a gradient or a state is read whole as well. Its changes would be lost.
at::Tensor whole_of_unmanaged(const c10::OperatorHandle& op, const DTensorImpl& impl, const at::Tensor& tensor,
                              bool written) {
  if (written || (at::GradMode::is_enabled() && tensor.requires_grad())) refuse_mixed(op, impl);
  return DTensor(tensor).full_tensor();
}

// Beside a parameter that is whole in another dtype than the one it is kept in, other inputs take that dtype. Not what
// is written or viewed: running statistics are written, though their schema does not say so.
void cast_inputs(const c10::OperatorHandle& op, torch::jit::Stack& stack, c10::ScalarType dtype) {
  // These ask another tensor for nothing but its dtype or shape.
  static const auto* asking = new std::unordered_set<std::string_view>{
      "aten::to",        "aten::type_as",    "aten::result_type",       "aten::view_as",
      "aten::expand_as", "aten::reshape_as", "aten::broadcast_tensors", "aten::can_cast"};
  if (asking->count(op.schema().name()) != 0) return;
  replace_tensors(op, stack, [&](const at::Tensor& tensor, const c10::Argument& argument) -> at::Tensor {
    if (!tensor.defined() || !at::isFloatingType(tensor.scalar_type()) || tensor.scalar_type() == dtype ||
        tensor.dim() == 0 || argument.alias_info() != nullptr || argument.name().starts_with("running_")) {
      return tensor;
    }
    return tensor.to(dtype);
  });
}

// Rule 1 and 6: the operator sees whole parameters.
void run_on_whole(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  PinnedOwners pinned;
  c10::SmallVector<WholeArgument, 4> wholes;
  std::optional<c10::ScalarType> input_dtype;
  const bool is_collective = op.schema().name().starts_with("c10d::");
  replace_tensors(op, stack, [&](const at::Tensor& tensor, const c10::Argument& argument) -> at::Tensor {
    if (!tensor.defined() || !tensor.key_set().has(kDTensorKey)) return tensor;
    // Schemas of collectives do not say what they write, so that a whole parameter's change would be lost.
    if (is_collective) check_plain(op.schema().name().c_str(), tensor);
    const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    if (written) refuse_inplace_on_leaf(op, tensor);
    if (auto* impl = dtensor_impl(tensor)) {
      auto owner = impl->owner();
      if (!owner) return whole_of_unmanaged(op, *impl, tensor, written);
      if (written) {
        check_write(op, *impl);
        owner->check_whole_write(impl->owner_index());
      }
      if (written && op.hasTag(at::Tag::inplace_view)) {
        raise<NotSupportedError>(op.schema().name().c_str(), impl->describe(),
                                 " would change its shape in place, expected the one it was sharded with; use the "
                                 "operator without the underscore");
      }
      if (impl->is_alias() && at::GradMode::is_enabled() && tensor.requires_grad()) {
        raise<NotSupportedError>(op.schema().name().c_str(), impl->describe(),
                                 ", an alias that was made outside this forward, requires grad of its own, expected "
                                 "detach() inside the forward");
      }
      pinned.add(owner);
      // An alias made by data() or detach() has cut the gradient.
      auto whole = owner->unsharded(impl->owner_index(), at::GradMode::is_enabled() && tensor.requires_grad());
      wholes.push_back({tensor, whole, owner, impl->owner_index(), written});
      if (!input_dtype) input_dtype = owner->input_dtype(impl->owner_index());
      return whole;
    }
    if (auto found = unsharded_storage_owner(tensor); found.owner) {
      if (is_collective) {
        raise<NotSupportedError>(op.schema().name().c_str(),
                                 "a view of a sharded parameter, whose change would be lost, expected a plain tensor; "
                                 "give it a clone()");
      }
      if (written) {
        found.owner->check_write(found.index);
        found.owner->check_whole_write(found.index);
      }
      pinned.add(found.owner);
      found.owner->gather();
      wholes.push_back({tensor, tensor, found.owner, found.index, written});
      if (!input_dtype) input_dtype = found.owner->input_dtype(found.index);
    }
    return tensor;
  });
  if (input_dtype) cast_inputs(op, stack, *input_dtype);
  {
    // A whole parameter that is filled with random numbers must be the same on all ranks.
    const bool fills = std::any_of(wholes.begin(), wholes.end(), [](const auto& argument) { return argument.written; });
    const auto common = fills && op.hasTag(at::Tag::nondeterministic_seeded) ? open_common_draws() : nullptr;
    op.callBoxed(&stack);
  }
  for (auto& argument : wholes) {
    if (argument.written) argument.owner->written(argument.index);
  }
  replace_results(op, stack, [&](const at::Tensor& result) -> at::Tensor {
    if (!result.defined()) return result;
    for (auto& argument : wholes) {
      if (result.is_same(argument.whole)) return argument.original;
    }
    if (!result.key_set().has(kDTensorKey) && result.has_storage()) {
      // A view of a gathered parameter outlives the gather: with the key it comes back here when it is read.
      for (auto& argument : wholes) {
        if (result.storage().unsafeGetStorageImpl() == argument.whole.storage().unsafeGetStorageImpl()) {
          KeySetAccess::add_key(result.unsafeGetTensorImpl());
          break;
        }
      }
    }
    return result;
  });
}

// What the tensor arguments of a call are, as far as the choice of rule needs it.
struct Census {
  bool deferred = false;        // made by meta_init, no values
  bool distributed = false;     // any distributed tensor
  bool whole = false;           // a managed parameter that may be read whole, or a view of a gathered one
  bool managed = false;         // such a parameter itself
  bool companion = false;       // a distributed tensor that nobody manages (optimizer state, gradient), scalars aside
  bool differentiable = false;  // a managed parameter whose gradient is wanted
  bool plain = false;           // a plain tensor of more than one element
  bool state = false;           // a companion without a name, unlike gradients
  bool aliased = false;         // a companion that is written, or of which a view is taken
  // Managed parameters, of one shape or as lists, are written, nothing else is, and none of their units is gathered.
  bool writes_shards_only = true;
};

Census take_census(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  Census census;
  bool writes = false;
  const bool lists = !op.schema().arguments().empty() && stack[argument_begin(op, stack)].isTensorList();
  c10::IntArrayRef sizes;
  // full_like(p.data(), ...), and zeros_like(p) without grad mode, is how optimizers make their state, also where
  // `model->parameters()` keeps a forward scope open around them: state lies as the shards do.
  const bool like_factory = op.schema().name().ends_with("_like");
  const auto visit = [&](const at::Tensor& tensor, const c10::Argument& argument) {
    const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    auto* impl = dtensor_impl(tensor);
    if (written) {
      writes = true;
      if (impl == nullptr) census.writes_shards_only = false;
    }
    if (!tensor.defined()) return;
    if (!tensor.key_set().has(kDTensorKey)) {
      census.plain |= tensor.numel() > 1 || (at::GradMode::is_enabled() && tensor.requires_grad());
      return;
    }
    if (impl == nullptr) {
      census.writes_shards_only = false;
      auto found = unsharded_storage_owner(tensor);
      if (!found.owner) return;
      if (!found.owner->readable()) {
        raise<StateError>(op.schema().name().c_str(),
                          "a view of a sharded parameter is read outside a forward, expected inside one; take the view "
                          "again where it is used, or copy it with clone()");
      }
      census.whole = true;
      last_readable = found.owner;
      return;
    }
    if (impl->state() == DTensorImpl::State::deferred) {
      auto owner = impl->owner();
      // The owner's error lists everything that has no values.
      if (owner && owner->readable()) owner->unsharded(impl->owner_index(), false);
      census.deferred = true;
      census.companion |= impl->pending_fill().has_value();
      return;
    }
    census.distributed = true;
    auto owner = impl->owner();
    if (!owner) {
      census.companion |= impl->dim() > 0;
      census.state |= impl->dim() > 0 && impl->name().empty();
      census.aliased |= argument.alias_info() != nullptr;
      return;
    }
    if (sharded_rules || !owner->readable()) return;
    last_readable = owner;
    if (!like_factory || owner->is_read_only() || (!impl->is_alias() && at::GradMode::is_enabled())) {
      census.whole = true;
      census.managed = true;
      census.differentiable |= at::GradMode::is_enabled() && tensor.requires_grad();
      if (lists || sizes.empty()) sizes = impl->sizes();
      census.writes_shards_only &= !owner->holds_whole() && impl->sizes().equals(sizes);
    }
  };
  const auto begin = argument_begin(op, stack);
  for (size_t i = begin; i < stack.size(); ++i) {
    const auto& argument = op.schema().arguments()[i - begin];
    for_each_tensor_in(stack[i], [&](const at::Tensor& tensor) { visit(tensor, argument); });
  }
  census.writes_shards_only &= writes && !census.differentiable;
  return census;
}

// Where whole parameters may be read, shards serve optimizers and averages, which mix parameters with state of the same
// layout, and initialisers, which change parameters that nobody has gathered.
bool runs_on_whole(const c10::OperatorHandle& op, const torch::jit::Stack& stack, const Census& census) {
  if (!census.whole) {
    return census.companion && !census.aliased && (census.plain || !has_shard_rule(op, stack)) && in_scope();
  }
  if (!census.managed) return true;
  if (reads_metadata(op)) return false;
  if (census.companion && !census.differentiable && has_shard_rule(op, stack)) return false;
  return !(census.writes_shards_only && writes_shards(op));
}

// State that a forward made like a parameter, and now uses as a whole (a view of it, a change that no rule knows),
// becomes whole. It has no name, unlike a gradient, and belongs to nobody.
void make_state_whole(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  for_each_tensor(op, stack, [&](const at::Tensor& tensor) {
    auto* impl = distributed_impl(tensor);
    if (impl == nullptr || impl->owner() || !impl->name().empty() || tensor.requires_grad()) return;
    if (!impl->layout() || impl->local().is_meta()) return;
    // Body and local; an alias of it would stay behind.
    if (impl->local().storage().use_count() > 2) {
      raise<NotSupportedError>(
          op.schema().name().c_str(), impl->describe(),
          " was made like a parameter in a forward and has aliases, expected none where it is used "
          "as a whole; make it with torch::zeros(p.sizes(), p.options())");
    }
    impl->become_ordinary(DTensor(tensor).full_tensor());
  });
}

// Numbers that go into such state, and may come from this rank's data: the next gather compares them.
void note_operands(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto owner = last_readable.lock();
  if (!owner) return;
  uint64_t hash = hash_bytes(nullptr, 0);
  const auto note = [&](double number) { hash = hash_bytes(&number, sizeof(number), hash); };
  for (size_t i = argument_begin(op, stack); i < stack.size(); ++i) {
    const auto& value = stack[i];
    if (value.isDouble()) note(value.toDouble());
    if (value.isInt()) note(static_cast<double>(value.toInt()));
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().numel() == 1 &&
        !value.toTensor().key_set().has(kDTensorKey) && !value.toTensor().is_meta() &&
        !at::isComplexType(value.toTensor().scalar_type())) {
      note(value.toTensor().item<double>());
    }
  }
  owner->note_operand(hash);
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard below(kDTensorKey);
  if (interceptor != nullptr && interceptor->intercept(op, *stack)) return;
  run_by_rules(op, *stack);
}

}  // namespace

void run_by_rules(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  auto census = take_census(op, stack);
  // A plain tensor is this rank's own, of which a shard would take a part; optimizers have none.
  if (!census.whole && census.aliased && (census.plain || !has_shard_rule(op, stack)) && in_scope()) {
    make_state_whole(op, stack);
    census = take_census(op, stack);
  }
  if (runs_on_whole(op, stack, census)) {
    run_on_whole(op, stack);
  } else if (census.distributed || census.deferred) {
    const bool may_be_state = census.state || op.schema().name().ends_with("_like");
    if (may_be_state && !census.deferred && in_scope()) note_operands(op, stack);
    run_on_shards(op, stack);
  } else {
    op.callBoxed(&stack);
  }
}

OperatorInterceptor::~OperatorInterceptor() = default;

InterceptScope::InterceptScope(OperatorInterceptor& scope, bool every_operator)
    : former_(interceptor), former_included_(c10::impl::tls_is_dispatch_key_included(kDTensorKey)) {
  interceptor = &scope;
  if (every_operator) c10::impl::tls_set_dispatch_key_included(kDTensorKey, true);
}

InterceptScope::~InterceptScope() {
  interceptor = former_;
  c10::impl::tls_set_dispatch_key_included(kDTensorKey, former_included_);
}

ShardedRulesGuard::ShardedRulesGuard(bool sharded) : sharded_(sharded), former_(sharded_rules) {
  sharded_rules = sharded;
  if (!sharded) ++open_scopes;
}
bool ShardedRulesGuard::is_active() { return sharded_rules; }
ShardedRulesGuard::~ShardedRulesGuard() {
  sharded_rules = former_;
  if (!sharded_) --open_scopes;
}

void register_unsharded_storage(const c10::StorageImpl* storage, std::weak_ptr<ParameterOwner> owner, size_t index) {
  auto& table = storage_table();
  std::unique_lock lock(table.mutex);
  table.owners[storage] = {std::move(owner), index};
}

void forget_unsharded_storage(const c10::StorageImpl* storage) {
  auto& table = storage_table();
  std::unique_lock lock(table.mutex);
  table.owners.erase(storage);
}

StorageOwner unsharded_storage_owner(const at::TensorBase& tensor) {
  if (!tensor.has_storage()) return {};
  auto& table = storage_table();
  std::shared_lock lock(table.mutex);
  auto found = table.owners.find(tensor.storage().unsafeGetStorageImpl());
  if (found == table.owners.end()) return {};
  return {found->second.first.lock(), found->second.second};
}

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace dtensor
