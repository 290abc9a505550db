#include "hsdp/construction/recorder.h"

#include <ATen/ATen.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cctype>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "dtensor/error.h"
#include "dtensor/operator_call.h"
#include "hsdp/construction/operator_traits.h"
#include "hsdp/construction/recorded_call.h"
#include "hsdp/host.h"
#include "hsdp/rank_generators.h"

namespace hsdp {

using dtensor::NotSupportedError;
using dtensor::raise;
using torch::jit::Stack;

using Call = RecordedCall;
using Operand = RecordedOperand;

namespace {

// A shape stands in for a tensor whose values do not matter. Factories follow its strides; of the others only the sizes
// count, and one element expanded to them costs nothing.
at::Tensor stand_in(const OperatorTraits& traits, const Operand& operand, c10::Device device) {
  const auto geometry = operand.geometry();
  const auto options = at::TensorOptions(geometry.dtype).device(device);
  if (traits.dtype_only) return at::empty({0}, options);
  return operand.argument == 0 ? geometry.allocate(device) : at::empty({1}, options).expand(geometry.sizes);
}

at::Tensor zeros(const Geometry& geometry) {
  auto tensor = geometry.allocate(kHost);
  tensor.zero_();
  return tensor;
}

int64_t elements_in(const Stack& results) {
  int64_t elements = 0;
  for (auto& result : results) {
    dtensor::for_each_tensor_in(result, [&](const at::Tensor& tensor) {
      if (tensor.defined()) elements += tensor.numel();
    });
  }
  return elements;
}

// Small arguments give small results, unless a number among them is a size.
bool may_be_large(const Stack& arguments) {
  constexpr int64_t kSmall = 64;  // squared, as an outer product: kLargestConstant
  int64_t elements = 0;
  bool large_number = false;
  for (auto& argument : arguments) {
    dtensor::for_each_tensor_in(argument, [&](const at::Tensor& tensor) {
      if (tensor.defined()) elements += tensor.numel();
    });
    if (argument.isInt()) large_number |= argument.toInt() > kSmall;
    if (argument.isIntList()) {
      int64_t product = 1;
      for (auto number : argument.toIntVector()) product *= std::max<int64_t>(number, 1);
      large_number |= product > kSmall;
    }
  }
  return elements > kSmall || large_number;
}

bool covers(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(tensor.itemsize()) == static_cast<int64_t>(tensor.storage().nbytes()) &&
         tensor.is_non_overlapping_and_dense();
}

bool is_mask(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
}

bool takes_storage(const Stack& arguments) {
  return std::any_of(arguments.begin(), arguments.end(), [](auto& argument) { return argument.isStorage(); });
}

void check_strided(const Call& call, const at::Tensor& result) {
  if (result.layout() == at::kStrided) return;
  raise<NotSupportedError>("meta_init", call.name(), " makes a tensor of layout ", result.layout(),
                           ", expected strided tensors; make it after materialize(device)");
}

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

Recorder::Recorder()
    : tape_(std::make_shared<Tape>(common_generator_state(generator_.entry_state()))), memory_(tape_) {}

std::shared_ptr<Tape> Recorder::finish() {
  follow_generator();
  memory_.finish();
  return tape_;
}

void Recorder::follow_generator() {
  if (auto change = generator_.poll()) {
    tape_->push(Reseed{std::move(change->state), change->position}, {});
    generator_.advance();
  }
}

bool Recorder::intercept(const c10::OperatorHandle& op, Stack& stack) {
  const bool grad_mode = at::GradMode::is_enabled();
  at::NoGradGuard no_grad;
  const auto count = op.schema().arguments().size();
  Call call{op, traits_of(op), stack, Stack(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end()), {}};
  collect(call);
  if (call.operands.empty() && !call.traits.makes_tensors) return false;
  torch::jit::drop(stack, count);
  if (call.traits.compares_types) {
    answer_set_data(call);
    return true;
  }
  call.differentiable = grad_mode && call.name() != "aten::detach" &&
                        std::any_of(call.operands.begin(), call.operands.end(),
                                    [](auto& operand) { return operand.data() && operand.outer.requires_grad(); });
  draw_from_own_generator(call);
  bool taped = prepare_overwrite(call);
  if (call.draws_from_default()) follow_generator();
  if (taped && call.traits.reads_on_host) {
    if (answer_equal(call)) return true;
    if (!make_constant(call)) {
      raise<NotSupportedError>("meta_init", call.name(), " reads a value that depends on random numbers (shape ",
                               call.operands.front().outer.sizes(),
                               "), expected one that is known while the module is constructed; read it after "
                               "materialize(device), or compute it without random numbers");
    }
    taped = false;
  }
  if (taped) {
    run_taped(call);
  } else {
    run_constant(call);
  }
  return true;
}

void Recorder::collect(Call& call) {
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    const auto& argument = call.traits.arguments[i];
    dtensor::for_each_tensor_in(call.arguments[i], [&](const at::Tensor& tensor) {
      auto* value = RecordedValue::of(tensor);
      if (value != nullptr && value->tape() == tape_) value = &memory_.follow(*dtensor::dtensor_impl(tensor));
      Operand operand{i, tensor, value, argument.written, argument.shape_only, argument.indices};
      if (value != nullptr && value->tape() != tape_) {
        raise<NotSupportedError>(
            "meta_init", call.name(), " uses a tensor of shape ", tensor.sizes(),
            " that another meta_init made, expected tensors of this one; construct both modules in "
            "one meta_init");
      }
      if (value == nullptr && tensor.defined()) {
        if (dtensor::dtensor_impl(tensor) != nullptr || tensor.is_meta()) {
          raise<NotSupportedError>("meta_init", call.name(), " uses a ", tensor.is_meta() ? "meta" : "sharded",
                                   " tensor of shape ", tensor.sizes(),
                                   " from outside, expected tensors that have values; construct the module without it");
        }
        if (tensor.layout() != at::kStrided) {
          raise<NotSupportedError>("meta_init", call.name(), " uses a tensor of layout ", tensor.layout(),
                                   ", expected strided tensors; make it after materialize(device)");
        }
        if (tensor.device().type() != kHost) operand.outer = tensor.to(kHost);
      }
      call.operands.push_back(std::move(operand));
    });
  }
}

// A program goes on drawing from a generator of its own after construction, so its numbers are drawn now as well, into
// memory that goes at once; the tape keeps the state from which they can be drawn again.
void Recorder::draw_from_own_generator(Call& call) const {
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    if (!call.traits.arguments[i].generator || !call.arguments[i].isGenerator()) continue;
    auto generator = call.arguments[i].toGenerator();
    if (!generator.defined() || generator == host_generator()) continue;
    if (generator.device().type() != kHost) {
      raise<NotSupportedError>("meta_init", call.name(), " was given a generator of device ", generator.device(),
                               ", expected one of the host, where construction is replayed; pass one of device ",
                               c10::Device(kHost));
    }
    if (!call.traits.draws_by_shape) {
      raise<NotSupportedError>("meta_init", call.name(),
                               " was given a generator of its own, and how many numbers it takes depends on values, "
                               "expected the default generator; leave the argument out");
    }
    {
      std::lock_guard lock(generator.mutex());
      call.own_generator = generator.clone();
    }
    auto scratch = call.substitute(kHost, [](Operand& operand) { return zeros(operand.geometry()); });
    call.op.callBoxed(&scratch);
    // Whatever else runs the operator takes numbers that nobody misses.
    call.arguments[i] = call.own_generator.clone();
  }
}

// set_data asks whether two tensors are of one kind; whether they are real or on meta now says nothing about that.
void Recorder::answer_set_data(Call& call) const {
  const auto& self = call.operands.at(0);
  if (self.value != nullptr) {
    call.stack.emplace_back(true);
    return;
  }
  auto plain = call.substitute(kHost, [](Operand& operand) { return operand.outer; });
  call.op.callBoxed(&plain);
  call.stack.push_back(std::move(plain.back()));
}

// Attention asks whether its query is its key. Of one memory, or of different shapes, equal() compares no values
// either.
bool Recorder::answer_equal(Call& call) const {
  if (call.name() != "aten::equal") return false;
  const auto& left = call.operands.at(0);
  const auto& right = call.operands.at(1);
  const bool same_shape = left.outer.sizes().equals(right.outer.sizes());
  const bool same = left.memory() != nullptr && left.memory() == right.memory() && left.geometry() == right.geometry();
  if (same || !same_shape) call.stack.emplace_back(same);
  return same || !same_shape;
}

// Whether the call belongs on the tape. What is about to be overwritten gets fresh memory first, real or on the tape.
bool Recorder::prepare_overwrite(Call& call) {
  const auto taped = [&] {
    return call.traits.draws || std::any_of(call.operands.begin(), call.operands.end(),
                                            [](auto& operand) { return operand.data() && operand.taped(); });
  };
  if (!call.traits.overwrites) return taped();
  const auto target = std::find_if(call.operands.begin(), call.operands.end(), [](auto& o) { return o.written; });
  if (target == call.operands.end() || target->value == nullptr || !covers(target->below())) return taped();
  auto& memory = *target->memory();
  for (auto& operand : call.operands) {
    if (&operand != &*target && operand.memory() == &memory) return taped();
  }
  target->overwritten = true;
  const bool on_tape = taped();
  if (memory.real && (!on_tape || memory.external)) return on_tape;
  const bool real = !on_tape && target->below().numel() <= kLargestConstant;
  memory_.renew(memory, real, call.drawn());
  return !real;
}

// Where nothing is random, what the call reads can be computed.
bool Recorder::make_constant(Call& call) {
  if (call.traits.writes || call.drawn()) return false;
  for (auto& operand : call.operands) {
    if (operand.data() && operand.taped()) memory_.to_constant(*operand.memory());
  }
  return true;
}

void Recorder::run_constant(Call& call) {
  const auto fresh_and_large = [&](const Stack& results) {
    if (elements_in(results) <= kLargestConstant) return false;
    bool fresh = true;
    for (auto& result : results) {
      dtensor::for_each_tensor_in(result, [&](const at::Tensor& tensor) {
        if (tensor.defined() && call.aliased(tensor) != nullptr) fresh = false;
      });
    }
    return fresh;
  };
  const bool makes_only = call.traits.makes_tensors && !call.traits.writes;
  const bool factory = std::none_of(call.operands.begin(), call.operands.end(), [](auto& o) { return o.data(); });
  if (makes_only && (factory || may_be_large(call.arguments))) {
    auto results = call.substitute(at::kMeta, [&](Operand& operand) {
      return operand.shape_only ? stand_in(call.traits, operand, at::kMeta) : operand.geometry().allocate(at::kMeta);
    });
    bool known = true;
    try {
      call.op.callBoxed(&results);
    } catch (const std::exception&) {
      known = false;  // no meta kernel, or a mistake of the caller: then the real run says so
    }
    if (known && fresh_and_large(results)) return keep_taped(call, std::move(results));
  }
  auto results = call.substitute(kHost, [&](Operand& operand) {
    if (operand.shape_only) return stand_in(call.traits, operand, kHost);
    if (operand.value != nullptr && operand.outer.unsafeGetTensorImpl()->is_wrapped_number()) {
      operand.below().unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    return operand.below();
  });
  call.op.callBoxed(&results);
  if (makes_only && fresh_and_large(results)) return keep_taped(call, std::move(results));
  keep_constant(call, std::move(results));
}

// What plain construction would compute from parameters requires grad here, too, so that nobody takes it for a value
// without a history.
at::Tensor Recorder::wrap(const Call& call, const at::Tensor& inner, const std::shared_ptr<Memory>& memory) {
  auto outer = memory_.wrap(inner, memory);
  if (call.differentiable && (outer.is_floating_point() || outer.is_complex())) outer.set_requires_grad(true);
  return outer;
}

void Recorder::keep_constant(Call& call, Stack results) {
  const auto memory_at = [&](const at::Tensor& inner) {
    check_strided(call, inner);
    auto memory = memory_.find(inner.storage());
    // What is not on known memory is on fresh memory, or on that of an argument from outside.
    return memory ? memory
                  : memory_.add_real(inner.storage(), call.aliased(inner) != nullptr || takes_storage(call.arguments));
  };
  for (auto& operand : call.operands) {
    if (!operand.written || operand.value == nullptr) continue;
    operand.memory()->readings.clear();
    auto& impl = *dtensor::dtensor_impl(operand.outer);
    if (operand.changed_geometry()) memory_.rebind(impl, memory_at(impl.local()));
  }
  for (auto& result : results) {
    call.stack.push_back(dtensor::map_tensors_in(result, [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      if (auto* operand = call.identical(tensor)) return operand->outer;
      return wrap(call, tensor, memory_at(tensor));
    }));
  }
}

void Recorder::run_taped(Call& call) {
  for (auto& operand : call.operands) {
    if (!operand.written || !operand.outer.defined() || operand.taped()) continue;
    if (operand.value == nullptr || operand.memory()->external) {
      raise<NotSupportedError>("meta_init", call.name(), " writes into a tensor of shape ", operand.outer.sizes(),
                               " from outside, expected tensors made in meta_init; clone it first");
    }
    memory_.to_tape(*operand.memory());
  }
  const auto given = call.substitute(at::kMeta, [&](Operand& operand) {
    if (operand.shape_only) return stand_in(call.traits, operand, at::kMeta);
    // A mask among indices says how many elements there are.
    if (operand.taped() || (operand.indices && is_mask(operand.outer))) return operand.below();
    return operand.geometry().allocate(at::kMeta);
  });
  auto results = given;
  std::string reason;
  try {
    call.op.callBoxed(&results);
  } catch (const c10::NotImplementedError& error) {
    reason = first_line(error.what_without_backtrace());
  } catch (const c10::Error& error) {
    reason = first_line(error.what_without_backtrace());
    // Anything else is a mistake of the caller, told as plain construction would.
    if (lower(reason).find("meta") == std::string::npos) throw;
  }
  if (reason.empty()) {
    keep_taped(call, std::move(results));
  } else {
    run_without_meta_kernel(call, given, reason);
  }
}

void Recorder::run_without_meta_kernel(Call& call, const Stack& given, const std::string& reason) {
  if (call.traits.returns_written) {
    // Nothing to learn from a run: what was written keeps its shape.
    Stack results;
    for (size_t i : call.traits.returned_arguments) results.push_back(given[i]);
    return keep_taped(call, std::move(results));
  }
  if (make_constant(call)) return run_constant(call);
  bool ran = !call.op.hasTag(at::Tag::dynamic_output_shape);
  auto results = call.substitute(kHost, [&](Operand& operand) {
    return operand.shape_only ? stand_in(call.traits, operand, kHost) : zeros(operand.geometry());
  });
  if (ran) {
    try {
      call.op.callBoxed(&results);
    } catch (const std::exception&) {
      ran = false;
    }
    if (call.draws_from_default()) generator_.park();
  }
  if (!ran) {
    raise<NotSupportedError>("meta_init", call.name(), " cannot run on tensors without memory (", reason,
                             "), expected operators whose result has a shape that follows from the shapes of what they "
                             "read; call it after materialize(device)");
  }
  keep_taped(call, std::move(results));
}

void Recorder::keep_taped(Call& call, Stack results) {
  const bool drawn = call.drawn();
  for (auto& result : results) {
    dtensor::for_each_tensor_in(result, [&](const at::Tensor& tensor) {
      if (tensor.defined()) check_strided(call, tensor);
    });
  }
  // Reading constants adds to the tape: before the results get their names.
  Operation operation{call.op, encode(call), {}, c10::get_default_dtype_as_scalartype(), call.draws_from_default()};

  std::vector<GroupId> written;
  for (auto& operand : call.operands) {
    if (!operand.written || !operand.taped()) continue;
    auto memory = operand.value->memory();
    memory->drawn |= drawn;
    written.push_back(memory->group);
    if (!operand.changed_geometry()) continue;
    auto& impl = *dtensor::dtensor_impl(operand.outer);
    if (!impl.local().storage().is_alias_of(memory->storage)) memory = memory_.find(impl.local().storage());
    TORCH_INTERNAL_ASSERT(memory && !memory->real, call.name(), " moved a tensor to unknown memory");
    operation.changes_geometry = true;
    memory_.rebind(impl, memory);
    operand.value = RecordedValue::of(operand.outer);
  }
  std::unordered_map<const c10::StorageImpl*, std::shared_ptr<Memory>> fresh;
  for (auto& result : results) {
    call.stack.push_back(dtensor::map_tensors_in(result, [&](const at::Tensor& tensor) {
      if (!tensor.defined()) {
        operation.results.push_back(kNoValue);
        return tensor;
      }
      if (auto* operand = call.identical(tensor)) {
        operation.results.push_back(operand->value == nullptr ? kNoValue : operand->value->id());
        return operand->outer;
      }
      std::shared_ptr<Memory> memory;
      auto geometry = Geometry::of(tensor);
      if (auto* operand = call.aliased(tensor)) {
        // What stood in for the operand began at its first element.
        if (!operand->inner.is_same(operand->below())) geometry.offset += operand->below().storage_offset();
        // A view of a constant is a constant.
        memory = operand->value != nullptr ? operand->value->memory() : memory_.find(operand->outer.storage());
        if (!memory) memory = memory_.add_real(operand->outer.storage(), /*external=*/true);
      } else {
        auto& known = fresh[tensor.storage().unsafeGetStorageImpl()];
        if (!known) {
          known = memory_.add_taped(
              tensor.is_meta() ? tensor.storage() : allocate_storage(tensor.storage().nbytes(), at::kMeta), drawn);
          written.push_back(known->group);
        }
        memory = known;
      }
      const bool there = tensor.storage().is_alias_of(memory->storage);
      auto outer = wrap(call, there ? tensor : geometry.on(memory->storage), memory);
      operation.results.push_back(value_id_of(outer));
      return outer;
    }));
  }
  tape_->push(std::move(operation), written);
  if (call.draws_from_default()) generator_.advance();
}

std::vector<Argument> Recorder::encode(const Call& call) {
  std::vector<Argument> encoded;
  size_t next = 0;
  const auto value_of = [&](const Operand& operand) {
    if (!operand.outer.defined()) return kNoValue;
    if (operand.taped()) return operand.value->id();
    return memory_.read_constant(operand.below(), operand.outer.unsafeGetTensorImpl()->is_wrapped_number());
  };
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    const auto& argument = call.arguments[i];
    if (call.traits.arguments[i].device) {
      encoded.emplace_back(c10::IValue(c10::Device(kHost)));
    } else if (call.traits.arguments[i].pin_memory) {
      encoded.emplace_back(c10::IValue());
    } else if (call.traits.arguments[i].generator && call.own_generator.defined()) {
      encoded.emplace_back(c10::IValue(call.own_generator));
    } else if (!dtensor::holds_tensors(argument)) {
      encoded.emplace_back(argument);
    } else if (!argument.isTensor()) {
      std::vector<ValueId> values;
      if (argument.isTensorList()) {
        for (size_t count = argument.toTensorList().size(); count > 0; --count) {
          values.push_back(value_of(call.operands[next++]));
        }
      } else {
        for (const std::optional<at::Tensor> element : argument.toOptionalTensorList()) {
          values.push_back(element ? value_of(call.operands[next++]) : kNoValue);
        }
      }
      encoded.emplace_back(std::move(values));
    } else {
      const auto& operand = call.operands[next++];
      if (!operand.outer.defined()) {
        encoded.emplace_back(argument);
      } else if (operand.shape_only) {
        auto geometry = operand.geometry();
        if (call.traits.dtype_only) geometry = Geometry{geometry.dtype, {0}, {1}};
        encoded.emplace_back(std::move(geometry));
      } else {
        encoded.emplace_back(value_of(operand));
      }
    }
  }
  return encoded;
}

}  // namespace hsdp
