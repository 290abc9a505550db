#include "apps/lr_schedule.h"

#include <cmath>
#include <numbers>

namespace apps {

double lr_factor(const LrScheduleConfig& schedule, int64_t step, int64_t steps) {
  if (step < schedule.warmup_steps) return double(step + 1) / double(schedule.warmup_steps);
  if (schedule.decay == LrDecay::constant) return 1.0;
  const double progress = double(step - schedule.warmup_steps) / double(steps - schedule.warmup_steps);
  const double remaining =
      schedule.decay == LrDecay::linear ? 1.0 - progress : 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  return schedule.min_lr_factor + (1.0 - schedule.min_lr_factor) * remaining;
}

}  // namespace apps
