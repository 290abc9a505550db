#pragma once

#include <cstdint>

namespace hsdp {

/// The seed of this process's default generator, as rank 0 offers it to the others.
uint64_t offered_seed();

/// A program that never calls torch::manual_seed gets random seeds, another on every rank, and its ranks could not
/// agree on initial values. Gives such a process the seed of rank 0; where the program has seeded, nothing changes (and
/// replay_init refuses seeds that differ).
void adopt_seed_if_never_seeded(uint64_t seed);

}  // namespace hsdp
