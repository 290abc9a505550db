#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "hsdp/saved_tensor_sink.h"

namespace hsdp {

struct CheckpointOptions {
  /// Backward draws the numbers again that the function took from the default generators, and leaves these where they
  /// are. Without it, dropout masks would differ.
  bool preserve_random_state = true;
};

namespace detail {

/// A tensor that a checkpointed function was given. Within another checkpoint, it is what that one computes again.
class KeptTensor {
 public:
  explicit KeptTensor(const at::Tensor& tensor);
  at::Tensor get() const;

 private:
  VersionedTensor tensor_;
  std::shared_ptr<RecomputedTensor> recomputed_;
  bool requires_grad_ = false;
};

/// Any other input: kept as it is.
template <class T>
class KeptInput {
 public:
  explicit KeptInput(const T& value) : value_(value) {}
  const T& get() const { return value_; }

 private:
  T value_;
};

template <>
class KeptInput<at::Tensor> : public KeptTensor {
 public:
  using KeptTensor::KeptTensor;
};

template <>
class KeptInput<std::optional<at::Tensor>> {
 public:
  explicit KeptInput(const std::optional<at::Tensor>& tensor) {
    if (tensor) tensor_.emplace(*tensor);
  }
  std::optional<at::Tensor> get() const { return tensor_ ? std::optional(tensor_->get()) : std::nullopt; }

 private:
  std::optional<KeptTensor> tensor_;
};

template <>
class KeptInput<std::vector<at::Tensor>> {
 public:
  explicit KeptInput(const std::vector<at::Tensor>& tensors) : tensors_(tensors.begin(), tensors.end()) {}
  std::vector<at::Tensor> get() const {
    std::vector<at::Tensor> tensors;
    for (auto& one : tensors_) tensors.push_back(one.get());
    return tensors;
  }

 private:
  std::vector<KeptTensor> tensors_;
};

/// The first run of a checkpointed function, on the thread that makes it.
class CheckpointedRun {
 public:
  CheckpointedRun(const CheckpointOptions& options, std::function<void()> again);
  ~CheckpointedRun();
  CheckpointedRun(const CheckpointedRun&) = delete;
  CheckpointedRun& operator=(const CheckpointedRun&) = delete;

  /// Before the run: an input, on whose device numbers may be drawn and which the function must not change.
  void add_input(const at::Tensor& tensor);
  void add_input(const std::optional<at::Tensor>& tensor);
  void add_input(const std::vector<at::Tensor>& tensors);
  template <class T>
  void add_input(const T&) {}
  void start();
  /// Throws NotSupportedError when an input was changed in place.
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Whether this thread builds a graph for backward.
bool builds_graph();

template <class Function, class... Inputs>
inline constexpr bool kTakesCopies = std::is_invocable_v<std::decay_t<Function>&, std::decay_t<Inputs>&...>;

template <class Function, class... Inputs>
concept TakesCopiesOf = kTakesCopies<Function, Inputs...>;

}  // namespace detail

/// Returns function(inputs...) and keeps none of what its operators save for backward: backward runs it again, once,
/// when it first needs that, and gathers its units once more for it. Memory is given for time.
///
/// The function is copied and so are the inputs; tensors among these, in optionals and in vectors need not require grad
/// and are kept, in a nested checkpoint as long as the run of the outer one. It may return anything, capture anything,
/// and open forward scopes of its own, but must do the same when it runs again: it sees the same numbers of the default
/// generators and the same autocast. Modules need not be sharded. Thread-safe. Throws NotSupportedError when it changes
/// an input in place; backward throws StateError when the second run saves other tensors than the first.
template <class... Inputs, detail::TakesCopiesOf<Inputs...> Function>
auto checkpoint(const CheckpointOptions& options, Function&& function, Inputs&&... inputs) {
  using Copy = std::decay_t<Function>;
  using Values = std::tuple<std::decay_t<Inputs>...>;
  const auto call = [](Copy& copy, Values& values) {
    return std::apply([&](auto&... value) { return std::invoke(copy, value...); }, values);
  };
  Copy copy(std::forward<Function>(function));
  Values values(std::forward<Inputs>(inputs)...);
  if (!detail::builds_graph()) return call(copy, values);
  const std::tuple<detail::KeptInput<std::decay_t<Inputs>>...> kept = std::apply(
      [](const auto&... value) { return std::tuple(detail::KeptInput<std::decay_t<Inputs>>(value)...); }, values);
  detail::CheckpointedRun run(options, [call, copy, kept] {
    Copy again(copy);
    Values restored = std::apply([](const auto&... one) { return Values(one.get()...); }, kept);
    call(again, restored);
  });
  std::apply([&](const auto&... value) { (run.add_input(value), ...); }, values);
  run.start();
  if constexpr (std::is_void_v<decltype(call(copy, values))>) {
    call(copy, values);
    run.finish();
  } else {
    auto result = call(copy, values);
    run.finish();
    return result;
  }
}

/// The same with the default options.
template <class... Inputs, detail::TakesCopiesOf<Inputs...> Function>
auto checkpoint(Function&& function, Inputs&&... inputs) {
  return checkpoint(CheckpointOptions(), std::forward<Function>(function), std::forward<Inputs>(inputs)...);
}

}  // namespace hsdp
