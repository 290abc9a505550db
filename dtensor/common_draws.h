#pragma once

#include <memory>

namespace dtensor {

/// What a distributed tensor is filled with is drawn for the whole tensor on every rank, so all ranks must draw the
/// same numbers, also where their default generators go their own ways. Whoever parts the generators says how to open
/// a scope in which they are one again; it lasts as long as the returned object (null: they are).
using OpenCommonDraws = std::shared_ptr<void> (*)();
/// For the process, once.
void set_common_draws(OpenCommonDraws open);
std::shared_ptr<void> open_common_draws();

}  // namespace dtensor
