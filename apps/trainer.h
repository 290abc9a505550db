#pragma once

#include <functional>
#include <memory>

#include "apps/config.h"
#include "apps/data_loader.h"
#include "apps/metrics.h"

namespace hsdp {
class Environment;
}

namespace apps {

/// Trains the configured transformer over all ranks, sharded and replicated as config.parallelism says, for
/// config.training.steps steps, and samples a text when asked. Every rank must call it with the same configuration.
/// Every rank calls `open_folder` once the options have been found to fit the model; null on ranks that log nothing.
///
/// Logged loss and gradient norm are those of the global batch, the same on all ranks. Where one of them is not finite,
/// every rank throws NonFiniteError before the optimizer's step, so that the parameters stay what they were; a gradient
/// norm that a gradient scaler's scale made infinite only skips the step.
void train(const Config& config, const hsdp::Environment& environment, const DataLoader& data,
           const std::function<std::unique_ptr<RunFolder>()>& open_folder);

}  // namespace apps
