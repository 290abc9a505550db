#pragma once

#include <cstdint>

namespace apps {

enum class LrDecay { constant, cosine, linear };

struct LrScheduleConfig {
  /// Steps over which the learning rate rises linearly from lr / warmup_steps to lr. A shorter run ends on the way.
  int64_t warmup_steps = 0;
  /// How it falls over the steps after the warmup.
  LrDecay decay = LrDecay::cosine;
  /// What is left at the end, as a part of lr, 0 to 1.
  double min_lr_factor = 0.0;
};

/// Factor on the configured learning rate for `step` (0 <= step < steps). With w warmup steps: (step + 1) / w before w;
/// afterwards min_lr_factor + (1 - min_lr_factor) * f(p) with p = (step - w) / (steps - w) and f = 1 - p (linear),
/// (1 + cos(pi p)) / 2 (cosine) or 1 for the whole factor (constant). p stays below 1: no step is trained with lr 0.
double lr_factor(const LrScheduleConfig& schedule, int64_t step, int64_t steps);

}  // namespace apps
