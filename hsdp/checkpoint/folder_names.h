#pragma once

#include <cstdint>
#include <string>

/// Names of folders and files in and around a checkpoint.
namespace hsdp {

/// Beside a checkpoint: one that is being written, and one that another has replaced.
constexpr auto kWritingSuffix = ".writing";
constexpr auto kReplacedSuffix = ".replaced";
constexpr auto kRemovingSuffix = ".removing";

/// Within a rank's own file: its generators, and its values of tensors that are not sharded.
constexpr auto kGeneratorPrefix = "generator.";
constexpr auto kOwnTensorPrefix = "own.";
/// One byte: ShardedModule::generators_settled.
constexpr auto kGeneratorsSettled = "generators_settled";

/// `stem-00001suffix` for rank 0.
std::string numbered(const std::string& stem, int64_t rank, const std::string& suffix);
/// Without trailing slashes.
std::string trimmed(std::string path);
/// Under another name first, so that what is half removed is nowhere taken for a checkpoint. Errors are ignored: what
/// is left has that name.
void remove_checkpoint(const std::string& path);

}  // namespace hsdp
