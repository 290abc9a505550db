#pragma once

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

namespace hsdp {

/// While it lives, tensors made on this thread take no memory and what makes them is recorded: meta_init in two calls.
/// Scopes nest, the inner ones join the outermost. Destroyed without finish(), after an exception, it leaves the thread
/// and the default generator as they were, and tensors that are left without values. One thread.
class ConstructionScope {
 public:
  ConstructionScope();
  ~ConstructionScope();
  ConstructionScope(const ConstructionScope&) = delete;
  ConstructionScope& operator=(const ConstructionScope&) = delete;

  /// Construction is complete. Throws NotSupportedError where random numbers were drawn that cannot be drawn again.
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;  // null in an inner scope
};

/// Runs `factory` so that no parameter takes memory, and returns what it returns: a module holder, a shared pointer, a
/// module by value, nothing. Parameters, buffers and other tensors of the module are on meta afterwards; fully_shard
/// and materialize give them the values that plain construction at this point would have, at any number of ranks.
///
/// The module's source is not changed. Constructors may call any operator, read constants (`item()`, accessors) and
/// write them through raw pointers; torch::manual_seed is followed, device arguments are ignored. The default
/// generator is where plain construction would have left it once the values are replayed; until then it stands at a
/// state of its own, from which a next meta_init goes on rightly. Throws dtensor::NotSupportedError naming the operator
/// where a constructor reads a random value on the host, uses what another meta_init made, or writes random values into
/// memory from outside. Exceptions of the factory pass through. Only this thread is recorded.
template <class F>
auto meta_init(F&& factory) -> std::invoke_result_t<F> {
  ConstructionScope scope;
  if constexpr (std::is_void_v<std::invoke_result_t<F>>) {
    std::invoke(std::forward<F>(factory));
    scope.finish();
  } else {
    std::invoke_result_t<F> result = std::invoke(std::forward<F>(factory));
    scope.finish();
    return result;
  }
}

}  // namespace hsdp
