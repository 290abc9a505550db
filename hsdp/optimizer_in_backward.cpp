#include "hsdp/optimizer_in_backward.h"

#include <torch/csrc/autograd/engine.h>

#include <unordered_map>
#include <utility>

#include "dtensor/dispatch.h"
#include "dtensor/dtensor_impl.h"
#include "dtensor/error.h"
#include "hsdp/sharded_module.h"

namespace hsdp {
namespace {

using dtensor::raise;
using dtensor::StateError;
using dtensor::ValueError;
using torch::optim::Optimizer;

constexpr auto kWhere = "apply_optimizer_in_backward";

std::shared_ptr<Optimizer> make_for(const at::Tensor& parameter, const std::string& name,
                                    const ParameterOptimizer& make) {
  std::shared_ptr<Optimizer> optimizer = make(parameter);
  if (!optimizer) raise<ValueError>(kWhere, "no optimizer for parameter \"", name, "\", expected one");
  const auto& groups = optimizer->param_groups();
  if (groups.size() != 1 || groups[0].params().size() != 1 || !groups[0].params()[0].is_same(parameter)) {
    raise<ValueError>(kWhere, "the optimizer for parameter \"", name,
                      "\" has others or not this one, expected one over this parameter alone");
  }
  return optimizer;
}

// Held by the module's scheduler.
class Steps {
 public:
  void add(const at::Tensor& parameter, std::shared_ptr<Optimizer> optimizer) {
    entries_[parameter.unsafeGetTensorImpl()] = {std::move(optimizer)};
  }

  void take(const at::Tensor& parameter) {
    const auto found = entries_.find(parameter.unsafeGetTensorImpl());
    if (found == entries_.end()) return;
    auto& entry = found->second;
    const int64_t backward = torch::autograd::get_current_graph_task_id();
    if (entry.last_backward == backward) {
      raise<StateError>(kWhere, dtensor::distributed_impl(parameter)->describe(),
                        " received a second gradient in one backward and was stepped with the first, expected one; "
                        "call backward for each forward, or step after backward");
    }
    entry.last_backward = backward;
    const dtensor::ShardedRulesGuard sharded;
    entry.optimizer->step();
    parameter.mutable_grad().reset();
  }

 private:
  struct Entry {
    std::shared_ptr<Optimizer> optimizer;
    int64_t last_backward = -1;
  };
  std::unordered_map<const c10::TensorImpl*, Entry> entries_;
};

}  // namespace

std::vector<std::shared_ptr<Optimizer>> apply_optimizer_in_backward(ShardedModule& module,
                                                                    const ParameterOptimizer& make) {
  const auto scheduler = module.scheduler();
  if (scheduler->root() != &module.module()) {
    raise<StateError>(kWhere, "the module is part of a larger sharded module, expected the outermost");
  }
  std::vector<std::shared_ptr<Optimizer>> optimizers;
  const auto steps = std::make_shared<Steps>();
  for (const auto& unit : scheduler->units()) {
    for (const auto& parameter : unit->parameters()) {
      if (!parameter.tensor().requires_grad()) continue;
      optimizers.push_back(make_for(parameter.tensor(), parameter.name(), make));
      steps->add(parameter.tensor(), optimizers.back());
    }
  }
  scheduler->set_gradient_ready([steps](const at::Tensor& parameter) { steps->take(parameter); });
  return optimizers;
}

}  // namespace hsdp
