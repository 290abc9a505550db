#pragma once

#include <functional>
#include <memory>
#include <string>

#include "hsdp/checkpoint/file_lock.h"

/// Where a checkpoint comes to lie: what is there before, the folder that it is written in, and its name at the end.
/// For one rank; no communication.
namespace hsdp {

/// Within the folder while it is written: the lock, and what ranks leave for rank 0.
constexpr auto kLockFile = ".lock";
constexpr auto kRecordsFolder = ".records";

/// Runs `work`; what the standard library throws about paths becomes ValueError.
void with_paths(const char* where, const std::function<void()>& work);

/// Throws ValueError unless `path` is free or has a checkpoint and nothing else, which can be replaced.
void check_target(const char* where, const std::string& path);

/// Makes `path`, empties it of what a run that was killed has left, and makes the folders in it. Nobody else writes
/// there while the lock lives. Throws ValueError where it cannot be made, has anything that no save writes, which is
/// not touched, or where another process has the lock; nothing is left then.
std::unique_ptr<FileLock> make_writing_folder(const char* where, const std::string& path);

/// Gives the folder `from` the name `path`, on disk; the checkpoint that was there is complete until then, and removed
/// after. Throws ValueError where that fails; then both are as they were.
void publish_folder(const char* where, const std::string& from, const std::string& path);

}  // namespace hsdp
