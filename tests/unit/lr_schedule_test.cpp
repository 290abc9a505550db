#include "apps/lr_schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

namespace apps {
namespace lr_schedule_test {

TEST(LrSchedule, WarmupRisesLinearlyAndReachesTheFullRate) {
  const LrScheduleConfig schedule{.warmup_steps = 4, .decay = LrDecay::constant};
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 0, 10), 0.25);
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 1, 10), 0.50);
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 3, 10), 1.00);
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 4, 10), 1.00);
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 9, 10), 1.00);
}

TEST(LrSchedule, LinearDecayFallsInEqualStepsAndNeverToZero) {
  const LrScheduleConfig schedule{.warmup_steps = 2, .decay = LrDecay::linear};
  for (int64_t step = 2; step < 10; ++step) EXPECT_DOUBLE_EQ(lr_factor(schedule, step, 10), 1.0 - double(step - 2) / 8);
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 9, 10), 0.125);
}

TEST(LrSchedule, CosineDecayIsHalfWayInTheMiddle) {
  const LrScheduleConfig schedule{.warmup_steps = 0, .decay = LrDecay::cosine};
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 0, 8), 1.0);
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 4, 8), 0.5);
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 2, 8), 0.5 * (1.0 + std::sqrt(0.5)));
  EXPECT_GT(lr_factor(schedule, 7, 8), 0.0);
}

TEST(LrSchedule, MinimumIsWhatDecayEndsAt) {
  for (const LrDecay decay : {LrDecay::linear, LrDecay::cosine}) {
    const LrScheduleConfig schedule{.warmup_steps = 0, .decay = decay, .min_lr_factor = 0.2};
    EXPECT_DOUBLE_EQ(lr_factor(schedule, 0, 10), 1.0);
    EXPECT_DOUBLE_EQ(lr_factor(schedule, 5, 10), 0.6);
    EXPECT_NEAR(lr_factor(schedule, 999999, 1000000), 0.2, 1e-5);
  }
}

TEST(LrSchedule, WarmupOverTheWholeRunHasNoDecay) {
  const LrScheduleConfig schedule{.warmup_steps = 5, .decay = LrDecay::cosine};
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 4, 5), 1.0);
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 2, 3), 0.6);
}

}  // namespace lr_schedule_test
}  // namespace apps
