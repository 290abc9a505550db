#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "apps/config.h"
#include "apps/data_loader.h"
#include "apps/metrics.h"
#include "apps/stop_signal.h"

namespace hsdp {
class Environment;
}

namespace apps {

/// Opens the run folder of a run that goes on from a step, 0 where it begins anew; null on ranks that log nothing.
using OpenRunFolder = std::function<std::unique_ptr<RunFolder>(int64_t resumed_step)>;

/// Trains the configured transformer over all ranks, sharded and replicated as config.parallelism says, until
/// config.training.steps steps are done, and samples a text when asked. Goes on from a checkpoint, and saves some, as
/// config.checkpoint says (checkpointing.h). Every rank must call it with the same configuration. Every rank calls
/// `open_folder` once the model has its values.
///
/// A step after which `stop` has received a signal on any rank is the last: a checkpoint is saved, and it returns. Null
/// where no checkpoints are saved.
///
/// Logged loss and gradient norm are those of the global batch, the same on all ranks. Where one of them is not finite,
/// every rank throws NonFiniteError before the optimizer's step, so that the parameters stay what they were; a gradient
/// norm that a gradient scaler's scale made infinite only skips the step.
void train(const Config& config, const hsdp::Environment& environment, const DataLoader& data,
           const OpenRunFolder& open_folder, const StopSignal* stop);

}  // namespace apps
