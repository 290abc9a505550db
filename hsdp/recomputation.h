#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hsdp/saved_tensor_sink.h"

namespace hsdp {

/// Part of a forward that saves nothing: backward runs it a second time when it first asks for what was saved, and the
/// n-th tensor saved then is the n-th of the first run. Weights are saved by reference in both.
///
/// Ownership: shared by the autograd nodes that wait for its tensors; gone with the last of them. What the second run
/// saved goes when its node has used it, or when the backward ends. Threads: one runs it for the first time; a lock
/// serialises those that unpack.
class Recomputation : public std::enable_shared_from_this<Recomputation> {
 public:
  virtual ~Recomputation();
  Recomputation(const Recomputation&) = delete;
  Recomputation& operator=(const Recomputation&) = delete;

  /// What operators save on this thread is numbered and not kept, as long as this lives.
  class FirstRun {
   public:
    explicit FirstRun(Recomputation& recomputation);

   private:
    struct Sink final : SavedTensorSink {
      explicit Sink(Recomputation& recomputation) : owner(recomputation) {}
      std::unique_ptr<RecomputedTensor> save(const at::Tensor& tensor) override { return owner.expect(tensor); }
      int64_t save_weight(const std::shared_ptr<Unit>& unit, size_t index, int64_t scope_token) override;
      Recomputation& owner;
    };
    Sink sink_;
    SavedTensorSinkScope scope_{&sink_};
  };

  at::Tensor unpack(size_t ordinal);
  void release(size_t ordinal);
  /// Whether backward has asked for anything yet.
  bool was_asked() const { return asked_; }

 protected:
  /// `what` is named in errors, as in `the function`.
  explicit Recomputation(std::string what) : what_(std::move(what)) {}

  /// The second run, with everything that is saved handed to answer(). Called with grad mode on, outside of inference
  /// mode, where operators read whole parameters.
  virtual void run_again() = 0;

  /// How many tensors were saved in the first run so far.
  size_t expected() const { return expected_.size(); }
  size_t answered() const { return answered_; }
  /// Takes back the promise of the tensors from this one on: the operator that saved them failed.
  void expect_only(size_t count) { expected_.resize(count); }
  /// No more tensors will be saved by the first run.
  void seal() { sealed_ = true; }
  /// The first run read this parameter: the second one must find it unchanged.
  int64_t note_weight(const std::shared_ptr<Unit>& unit, size_t index, int64_t scope_token);
  [[noreturn]] void raise_unlike_counts(size_t expected, size_t answered) const;

 private:
  struct Expected {
    at::DimVector sizes;
    at::ScalarType dtype;
    std::optional<uint32_t> weight_version;
    bool wanted = true;
    VersionedTensor tensor = {};  // what the second run saved
  };
  struct Weight {
    std::shared_ptr<Unit> unit;
    size_t index;
    Unit::Generation generation;
    int64_t scope_token;
  };
  class Placeholder;
  struct SecondRunSink;

  std::unique_ptr<RecomputedTensor> expect(const at::Tensor& tensor);
  void answer(const at::Tensor& tensor);
  void recompute();
  void forget();

  std::string what_;
  std::recursive_mutex mutex_;
  std::vector<Expected> expected_;
  std::vector<Weight> weights_;
  size_t answered_ = 0;
  bool sealed_ = false;
  std::atomic<bool> asked_ = false;
  bool running_ = false;
};

}  // namespace hsdp
