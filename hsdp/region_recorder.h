#pragma once

namespace hsdp {

/// Activation checkpointing of units whose modules know nothing of it. Between these two calls, which count, this
/// thread is in forwards of modules with checkpointed units: the first operator that reads such a unit with grad mode
/// on begins a recompute region, and a unit that does not lie within it ends the region, as do the end of the forward,
/// a backward, a checkpoint() and operators that cannot be run twice. Inside checkpoint() and its second run no region
/// begins.
void enter_checkpointed_forward();
void leave_checkpointed_forward() noexcept;

/// Ends the region that this thread records, if there is one.
void end_recompute_region() noexcept;

}  // namespace hsdp
