#pragma once

#include "apps/config.h"
#include "apps/data_loader.h"
#include "apps/metrics.h"

namespace hsdp {
class Environment;
}

namespace apps {

/// Trains the configured transformer, fully sharded over all ranks, for config.training.steps steps, and samples a text
/// when asked. Every rank must call it with the same configuration; `folder` is given on rank 0 and null on the others.
///
/// Logged loss and gradient norm are those of the global batch, the same on all ranks. Where one of them is not finite,
/// every rank throws NonFiniteError before the optimizer's step, so that the parameters stay what they were.
void train(const Config& config, const hsdp::Environment& environment, const DataLoader& data, RunFolder* folder);

}  // namespace apps
