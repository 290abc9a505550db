#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <span>

#include "hsdp/construction/tape.h"

namespace hsdp {

/// Receives a value at full size, on the host. It may keep the tensor: nothing else does. Values on one piece of memory
/// (views of each other) arrive one after another, as views of one storage.
using ReplaySink = std::function<void(ValueId value, const at::Tensor& full)>;

/// Repeats the recorded construction on the host, from the generator state at its start, and hands each value of
/// `wanted` to `sink` once, as soon as no later operator touches its memory; everything else is dropped when it has
/// been read for the last time, and what no wanted value depends on is not computed, except that every random number is
/// drawn. The values are those of plain construction, bit for bit, and the default generator ends where plain
/// construction would have left it, unless somebody seeded it or drew from it since construction: then it stays as it
/// was. Can be repeated. If an operator or the sink throws, the generator is as it was before the call. Returns whether
/// the generator stands where plain construction leaves it.
bool replay(const Tape& tape, std::span<const ValueId> wanted, const ReplaySink& sink);

/// The same for values that do not depend on random numbers, without touching the generator: only what leads to them
/// is computed.
void evaluate(const Tape& tape, std::span<const ValueId> wanted, const ReplaySink& sink);

}  // namespace hsdp
