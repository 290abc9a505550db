#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tests/testing/happens_before.h"
#include "tests/testing/stream_log.h"

/// What the log of training steps has to show beside being in order, and mistakes planted into such a log that have to
/// be found.
namespace testing_support {

/// Begins the note that a step begins with, followed by its number; kSteadyEnds ends it.
inline constexpr const char* kStep = "step ";

/// What a setting makes of a step of training. Layers: "blocks.0" to "blocks.3", units each, and the root.
struct StepSetting {
  bool shards = true;       // over more than one rank
  bool replicates = false;  // over a second axis
  bool casts = false, clips = false, offloads = false;
  size_t scatters = 5;
};

/// Entries [begin, end) of one step of training.
std::pair<size_t, size_t> step_of(const StreamLog& log, int64_t step);

/// What is wrong with the streams on which the step communicates and copies, a line each; empty where nothing is.
/// Gathers with their casts, reductions and all-reduces have a stream each, of high priority.
std::string wrong_streams(const StepSetting& setting, const StreamLog& log, int64_t step);

/// Whether the gather of the next unit and the reduction of the last one can run beside the computing of this one.
void expect_overlap(const StreamLog& log, const HappensBefore& check, int64_t step);
/// Whether shards can come from the host, and gradients go there, beside it.
void expect_copies_overlap(const StreamLog& log, const HappensBefore& check, int64_t step);

/// Mistakes of many kinds, one at a time, in step `step` of a log that has one more behind it: each is found.
void expect_every_mistake_found(const StepSetting& setting, const StreamLog& log, int64_t step);

/// What a library says to a communicator.
struct GroupCall {
  enum Kind { start, member, end } kind;
  std::string operation = {}, subject = {};  // of a member
};
/// What is wrong with the groups among these calls: ones that nest, never end, end without a start, or have members of
/// several units or kinds. Empty where nothing is.
std::string wrong_groups(const std::vector<GroupCall>& calls);

}  // namespace testing_support
