#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>

#include "dtensor/common_draws.h"
#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "dtensor/operator_call.h"
#include "dtensor/shard_rules.h"

namespace dtensor {

using c10::OperatorHandle;
using torch::jit::Stack;

namespace {

std::atomic<OpenCommonDraws> open_draws{nullptr};

}  // namespace

void set_common_draws(OpenCommonDraws open) { open_draws = open; }

std::shared_ptr<void> open_common_draws() {
  const auto open = open_draws.load();
  return open == nullptr ? nullptr : open();
}

// Draws for the whole tensor, so that every world size sees the same numbers, and keeps this rank's part.
void run_random(const OperatorHandle& op, Stack& stack) {
  const auto self = self_of(op, stack);
  auto* impl = distributed_impl(self);
  if (impl == nullptr) check_column(op, {self});
  const auto& layout = layout_of(op, *impl);
  for_each_tensor(op, stack, [&](const at::Tensor& tensor) {
    if (tensor.defined() && !tensor.is_same(self) && dtensor_impl(tensor) != nullptr) {
      refuse(op, *impl, "a random fill that depends on another distributed tensor, expected numbers or a plain one");
    }
  });
  if (layout.mesh()->size() == 1) return run_elementwise(op, stack);
  auto whole = at::empty(layout.sizes(), impl->local().options().requires_grad(false));
  self_of(op, stack) = whole;
  {
    const auto common = open_common_draws();
    op.callBoxed(&stack);
  }
  auto local = impl->local();
  if (!local.is_meta()) local.copy_(narrow_to_box(whole, layout.local()));
  note_shard_write(*impl);
  impl->set_pending_fill(std::nullopt);
  stack.back() = self;
}

void run_random_like(const OperatorHandle& op, Stack& stack) {
  const auto self = self_of(op, stack);
  auto* impl = distributed_impl(self);
  if (impl == nullptr) check_column(op, {self});
  const auto& layout = layout_of(op, *impl);
  self_of(op, stack) = at::empty(layout.sizes(), impl->local().options().requires_grad(false));
  {
    const auto common = layout.mesh()->size() == 1 ? nullptr : open_common_draws();
    op.callBoxed(&stack);
  }
  stack.back() = wrap_local(narrow_to_box(stack.back().toTensor(), layout.local()).contiguous(), *impl);
}

}  // namespace dtensor
