#include "hsdp/checkpoint/target_folder.h"

#include <fcntl.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "dtensor/error.h"
#include "hsdp/checkpoint/files.h"
#include "hsdp/checkpoint/folder_names.h"
#include "hsdp/checkpoint/manifest.h"

namespace hsdp {
namespace {

namespace fs = std::filesystem;
using dtensor::raise;
using dtensor::ValueError;

bool is_folder_of_checkpoint(const std::string& name) {
  return name == kOptimizerFolder || name == kRanksFolder || name == kRecordsFolder;
}

bool is_file_of_checkpoint(std::string name) {
  // While FileWriter writes it.
  if (const auto temporary = name.rfind(".tmp"); temporary != std::string::npos) name.resize(temporary);
  if (name == kLockFile || name == kManifestFile || name == kTrainingStateFile) return true;
  return (name.starts_with("shard-") && name.ends_with(".safetensors")) ||
         (name.starts_with("rank-") && (name.ends_with(".safetensors") || name.ends_with(".json")));
}

// Something below the folder that no save writes.
std::optional<std::string> foreign_entry(const std::string& folder) {
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const auto name = entry.path().filename().string();
    const auto type = entry.symlink_status().type();
    if (type == fs::file_type::directory ? is_folder_of_checkpoint(name)
                                         : type == fs::file_type::regular && is_file_of_checkpoint(name)) {
      continue;
    }
    return entry.path().lexically_relative(folder).string();
  }
  return std::nullopt;
}

// Renames that are taken back unless all have succeeded.
class Renames {
 public:
  Renames(const char* where, const std::string& path) : where_(where), path_(path) {}
  ~Renames() {
    for (auto done = done_.rbegin(); done != done_.rend(); ++done) {
      if (done->exchanged) {
        ::renameat2(AT_FDCWD, done->to.c_str(), AT_FDCWD, done->from.c_str(), RENAME_EXCHANGE);
      } else {
        std::rename(done->to.c_str(), done->from.c_str());
      }
    }
  }
  Renames(const Renames&) = delete;
  Renames& operator=(const Renames&) = delete;

  void rename(const std::string& from, const std::string& to) {
    if (std::rename(from.c_str(), to.c_str()) != 0) {
      raise<ValueError>(where_, path_, " cannot be replaced: ", std::strerror(errno),
                        ", expected a folder that can be written");
    }
    done_.push_back({from, to, false});
  }
  // False where the file system has no such thing.
  bool exchange(const std::string& from, const std::string& to) {
    if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) != 0) return false;
    done_.push_back({from, to, true});
    return true;
  }
  void keep() { done_.clear(); }

 private:
  struct Done {
    std::string from, to;
    bool exchanged;
  };
  const char* where_;
  const std::string& path_;
  std::vector<Done> done_;
};

}  // namespace

void with_paths(const char* where, const std::function<void()>& work) {
  try {
    work();
  } catch (const fs::filesystem_error& error) {
    raise<ValueError>(where, error.path1().string(), " cannot be used: ", error.code().message(),
                      ", expected a folder that can be read and written");
  }
}

void check_target(const char* where, const std::string& path) {
  if (path.empty()) raise<ValueError>(where, "the path is empty, expected that of a folder to be made");
  std::error_code error;
  const auto status = fs::status(path, error);
  if (!fs::exists(status)) return;
  if (!fs::is_directory(status)) raise<ValueError>(where, path, " is a file, expected a folder or nothing");
  if (fs::is_empty(path)) return;
  if (const auto foreign = foreign_entry(path)) {
    raise<ValueError>(where, path, " is a folder with other contents, such as ", *foreign,
                      ", expected a complete checkpoint, which would be replaced, or nothing; choose another path");
  }
  read_manifest(where, path);
}

std::unique_ptr<FileLock> make_writing_folder(const char* where, const std::string& path) {
  std::error_code ignored;
  const bool is_new = !fs::exists(path, ignored);
  std::unique_ptr<FileLock> lock;
  try {
    make_folders(where, path);
    if (const auto foreign = foreign_entry(path)) {
      raise<ValueError>(where, path, " has ", *foreign,
                        ", expected nothing, or what a save that was killed has left; move it away");
    }
    lock = std::make_unique<FileLock>(where, (fs::path(path) / kLockFile).string());
    for (const auto& entry : fs::directory_iterator(path)) {
      if (entry.path().filename() != kLockFile) fs::remove_all(entry.path());
    }
    for (const auto* folder : {kOptimizerFolder, kRanksFolder, kRecordsFolder}) {
      fs::create_directory(fs::path(path) / folder);
    }
  } catch (...) {
    if (lock) {
      fs::remove_all(path, ignored);
    } else if (is_new) {
      fs::remove(path, ignored);  // unless another process has put something there
    }
    throw;
  }
  return lock;
}

void publish_folder(const char* where, const std::string& from, const std::string& path) {
  check_target(where, path);
  auto former = from;
  Renames renames(where, path);
  if (!fs::exists(path) || fs::is_empty(path)) {
    renames.rename(from, path);
    former.clear();
  } else if (!renames.exchange(from, path)) {
    // find_checkpoints knows the other name, too.
    former = path + kReplacedSuffix;
    fs::remove_all(former);
    renames.rename(path, former);
    renames.rename(from, path);
  }
  sync_folder(where, fs::path(path).parent_path().string());
  renames.keep();
  if (!former.empty()) remove_checkpoint(former);
}

}  // namespace hsdp
