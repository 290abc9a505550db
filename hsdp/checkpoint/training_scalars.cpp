// Scalars of a training state, taken and given back.
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "dtensor/error.h"
#include "hsdp/checkpoint/training_state_json.h"

namespace hsdp {
namespace {

using dtensor::raise;
using dtensor::ValueError;
using Plateau = torch::optim::ReduceLROnPlateauScheduler;

/// The step count that LRScheduler keeps protected.
struct LrSchedulerAccess : torch::optim::LRScheduler {
  static unsigned& step_count(torch::optim::LRScheduler& scheduler) {
    const auto member = &LrSchedulerAccess::step_count_;
    return scheduler.*member;
  }
};

// ReduceLROnPlateauScheduler keeps its progress private and has no function that saves it. The standard lets the
// arguments of an explicit instantiation name private members ([temp.spec.general]): each of these defines the function
// `member_of` of its tag, which returns a pointer to that member.
template <class Tag, typename Tag::Pointer kMember>
struct Opened {
  friend typename Tag::Pointer member_of(Tag) { return kMember; }
};

struct CooldownCounter {
  using Pointer = int Plateau::*;
  friend Pointer member_of(CooldownCounter);
};
struct Best {
  using Pointer = float Plateau::*;
  friend Pointer member_of(Best);
};
struct LastEpoch {
  using Pointer = int Plateau::*;
  friend Pointer member_of(LastEpoch);
};
struct BadEpochs {
  using Pointer = int Plateau::*;
  friend Pointer member_of(BadEpochs);
};
template struct Opened<CooldownCounter, &Plateau::cooldown_counter>;
template struct Opened<Best, &Plateau::best>;
template struct Opened<LastEpoch, &Plateau::last_epoch>;
template struct Opened<BadEpochs, &Plateau::num_bad_epochs>;

void visit_numbers(torch::optim::LRScheduler& scheduler, const auto& visit) {
  visit("step_count", LrSchedulerAccess::step_count(scheduler));
}

void visit_numbers(Plateau& scheduler, const auto& visit) {
  visit("best", scheduler.*member_of(Best{}));
  visit("cooldown_counter", scheduler.*member_of(CooldownCounter{}));
  visit("last_epoch", scheduler.*member_of(LastEpoch{}));
  visit("num_bad_epochs", scheduler.*member_of(BadEpochs{}));
}

/// Calls `visit(name, number)` for each number that the schedule keeps.
void visit_numbers(const LrScheduler& scheduler, const auto& visit) {
  std::visit([&](auto* each) { visit_numbers(*each, visit); }, scheduler);
}

void check_not_null(const char* where, const std::vector<LrScheduler>& schedulers) {
  for (size_t i = 0; i < schedulers.size(); ++i) {
    if (std::visit([](const auto* each) { return each == nullptr; }, schedulers[i])) {
      raise<ValueError>(where, "learning-rate schedule ", i, " is null, expected a schedule");
    }
  }
}

template <class Number>
bool holds(double value) {
  if constexpr (std::is_integral_v<Number>) {
    return value >= double{std::numeric_limits<Number>::min()} && value <= double{std::numeric_limits<Number>::max()} &&
           value == std::trunc(value);
  } else {
    return std::isnan(value) || std::isinf(value) || double{static_cast<Number>(value)} == value;
  }
}

void check_scheduler(const char* where, size_t place, const LrScheduler& scheduler,
                     const std::map<std::string, double>& numbers) {
  std::vector<std::string> known, found;
  visit_numbers(scheduler, [&](const char* name, const auto&) { known.emplace_back(name); });
  for (const auto& [name, value] : numbers) found.push_back(name);
  // Both are in the order of their names.
  if (known != found) {
    raise<ValueError>(where, "learning-rate schedule ", place, " comes with ",
                      found.empty() ? "no numbers" : c10::Join(", ", found), ", expected ", c10::Join(", ", known),
                      " of a ", scheduler.index() == 0 ? "LRScheduler" : "ReduceLROnPlateauScheduler");
  }
  visit_numbers(scheduler, [&]<class Number>(const char* name, const Number&) {
    if (holds<Number>(numbers.at(name))) return;
    raise<ValueError>(where, "learning-rate schedule ", place, " comes with ", name, " ", numbers.at(name),
                      ", expected ", std::is_integral_v<Number> ? "a whole number from " : "a float from ",
                      std::numeric_limits<Number>::lowest(), " to ", std::numeric_limits<Number>::max());
  });
}

}  // namespace

TrainingScalars scalars_of(const TrainingState& state, const ParameterNames& names) {
  check_not_null("save", state.lr_schedulers);
  TrainingScalars scalars{state.progress, state.values, {}, std::nullopt, optimizer_states(state.optimizers, names)};
  for (const auto& scheduler : state.lr_schedulers) {
    auto& numbers = scalars.lr_schedulers.emplace_back();
    visit_numbers(scheduler, [&](const char* name, const auto& value) { numbers[name] = static_cast<double>(value); });
  }
  if (state.grad_scaler != nullptr) scalars.grad_scaler = state.grad_scaler->state();
  return scalars;
}

void check_restorable(const char* where, const TrainingState& state, const TrainingScalars& scalars) {
  check_not_null(where, state.lr_schedulers);
  const auto count = state.lr_schedulers.size(), saved = scalars.lr_schedulers.size();
  if (count != saved) {
    raise<ValueError>(where, "the checkpoint has ", saved, " learning-rate schedules, expected ", count,
                      " as in the program");
  }
  for (size_t i = 0; i < count; ++i) check_scheduler(where, i, state.lr_schedulers[i], scalars.lr_schedulers[i]);
  if ((state.grad_scaler != nullptr) != scalars.grad_scaler.has_value()) {
    raise<ValueError>(where, "the checkpoint has ", scalars.grad_scaler ? "a" : "no",
                      " gradient scaler and the program ", state.grad_scaler != nullptr ? "one" : "none",
                      ", expected both or neither");
  }
}

void restore(TrainingState& state, const TrainingScalars& scalars) {
  for (size_t i = 0; i < state.lr_schedulers.size(); ++i) {
    visit_numbers(state.lr_schedulers[i], [&]<class Number>(const char* name, Number& number) {
      number = static_cast<Number>(scalars.lr_schedulers[i].at(name));
    });
  }
  if (state.grad_scaler != nullptr) state.grad_scaler->load_state(*scalars.grad_scaler);
  state.progress = scalars.progress;
  state.values = scalars.values;
}

}  // namespace hsdp
