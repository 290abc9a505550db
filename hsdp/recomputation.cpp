#include "hsdp/recomputation.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "dtensor/dispatch.h"
#include "dtensor/error.h"

namespace hsdp {
namespace {

// Of a plain module: the second run reads it as it is then.
bool is_weight(const at::Tensor& tensor) {
  if (!tensor.requires_grad() || tensor.is_inference()) return false;
  return tensor.is_leaf() || (tensor.is_view() && tensor._base().is_leaf());
}

}  // namespace

class Recomputation::Placeholder final : public RecomputedTensor {
 public:
  Placeholder(std::shared_ptr<Recomputation> recomputation, size_t ordinal)
      : recomputation_(std::move(recomputation)), ordinal_(ordinal) {}
  ~Placeholder() override { recomputation_->release(ordinal_); }
  at::Tensor unpack() override { return recomputation_->unpack(ordinal_); }

 private:
  std::shared_ptr<Recomputation> recomputation_;
  size_t ordinal_;
};

// The second run may itself run backward over what it builds, so that its own graph saves tensors as usual.
struct Recomputation::SecondRunSink final : SavedTensorSink {
  explicit SecondRunSink(Recomputation& recomputation) : owner(recomputation) {}
  std::unique_ptr<RecomputedTensor> save(const at::Tensor& tensor) override {
    owner.answer(tensor);
    return nullptr;
  }
  int64_t save_weight(const std::shared_ptr<Unit>& unit, size_t, int64_t scope_token) override {
    // The nodes of the first run still need the unit when the graph of this one goes.
    const auto& weights = owner.weights_;
    auto found = std::find_if(weights.begin(), weights.end(), [&](const Weight& one) { return one.unit == unit; });
    return found == weights.end() ? scope_token : found->scope_token;
  }
  Recomputation& owner;
};

Recomputation::~Recomputation() = default;

Recomputation::FirstRun::FirstRun(Recomputation& recomputation) : sink_(recomputation) {}

int64_t Recomputation::FirstRun::Sink::save_weight(const std::shared_ptr<Unit>& unit, size_t index,
                                                   int64_t scope_token) {
  return owner.note_weight(unit, index, scope_token);
}

int64_t Recomputation::note_weight(const std::shared_ptr<Unit>& unit, size_t index, int64_t scope_token) {
  const bool known = std::any_of(weights_.begin(), weights_.end(),
                                 [&](const Weight& one) { return one.unit == unit && one.index == index; });
  if (!known) weights_.push_back({unit, index, unit->generation(index), scope_token});
  return scope_token;
}

std::unique_ptr<RecomputedTensor> Recomputation::expect(const at::Tensor& tensor) {
  Expected one{at::DimVector(tensor.sizes()), tensor.scalar_type(), std::nullopt};
  if (is_weight(tensor)) one.weight_version = static_cast<uint32_t>(tensor._version());
  expected_.push_back(std::move(one));
  return std::make_unique<Placeholder>(shared_from_this(), expected_.size() - 1);
}

void Recomputation::answer(const at::Tensor& tensor) {
  const auto ordinal = answered_++;
  if (ordinal >= expected_.size()) return;
  auto& one = expected_[ordinal];
  if (!tensor.sizes().equals(one.sizes) || tensor.scalar_type() != one.dtype) {
    dtensor::raise<dtensor::StateError>("checkpoint", what_, " saved a ", c10::toString(one.dtype), " tensor of shape ",
                                        c10::IntArrayRef(one.sizes), " when it ran first and a ",
                                        c10::toString(tensor.scalar_type()), " tensor of shape ", tensor.sizes(),
                                        " when backward ran it again, expected the same; nothing that it depends on "
                                        "may change in between");
  }
  if (one.weight_version && is_weight(tensor) && *one.weight_version != tensor._version()) {
    dtensor::raise<dtensor::StateError>("backward", "a tensor of shape ", tensor.sizes(),
                                        " needed for gradient computation was modified by an inplace operation: it is "
                                        "at version ",
                                        tensor._version(), ", expected ", *one.weight_version);
  }
  if (one.wanted) one.tensor = VersionedTensor(tensor.is_leaf() ? tensor : tensor.detach());
}

at::Tensor Recomputation::unpack(size_t ordinal) {
  std::lock_guard lock(mutex_);
  asked_ = true;
  if (!expected_[ordinal].tensor.defined()) recompute();
  return expected_[ordinal].tensor.get();
}

void Recomputation::recompute() {
  if (running_) {
    dtensor::raise<dtensor::StateError>("checkpoint", what_,
                                        " runs a backward over its own first run while backward runs it again, "
                                        "expected tensors that it made in this run");
  }
  struct Running {
    explicit Running(bool& value) : flag(value) { flag = true; }
    ~Running() { flag = false; }
    bool& flag;
  } running(running_);
  answered_ = 0;
  try {
    for (auto& weight : weights_) check_unchanged(*weight.unit, weight.index, weight.generation);
    c10::InferenceMode normal(false);
    at::AutoGradMode grad(true);
    dtensor::ShardedRulesGuard whole_rules(false);
    SecondRunSink sink(*this);
    SavedTensorSinkScope scope(&sink);
    run_again();
    // Within the first run a backward may ask for what is saved so far.
    if (sealed_ ? answered_ != expected_.size() : answered_ < expected_.size()) {
      raise_unlike_counts(expected_.size(), answered_);
    }
  } catch (...) {
    forget();
    throw;
  }
  if (torch::autograd::get_current_graph_task_id() == -1) return;
  // What a retained graph or a partial backward leaves behind is computed again by the next one.
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    if (auto self = weak.lock()) self->forget();
  });
}

void Recomputation::raise_unlike_counts(size_t expected, size_t answered) const {
  dtensor::raise<dtensor::StateError>("checkpoint", what_, " saved ", expected,
                                      " tensors for backward when it ran first and ", answered,
                                      " when backward ran it again, expected the same; nothing that it depends on may "
                                      "change in between");
}

void Recomputation::forget() {
  std::vector<VersionedTensor> gone;  // destroyed after the lock is
  std::lock_guard lock(mutex_);
  for (auto& one : expected_) gone.push_back(std::exchange(one.tensor, {}));
}

void Recomputation::release(size_t ordinal) {
  VersionedTensor gone;
  std::lock_guard lock(mutex_);
  if (ordinal >= expected_.size()) return;
  expected_[ordinal].wanted = false;
  gone = std::exchange(expected_[ordinal].tensor, {});
}

}  // namespace hsdp
