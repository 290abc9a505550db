#pragma once

#include <string>

namespace hsdp {

/// An exclusive lock on a file, made where needed, that the system releases when the process ends, however it ends. The
/// file says which process of which host holds it. On file systems without locks it locks nothing.
class FileLock {
 public:
  /// Throws ValueError naming the path, and the holder where another has it; it does not wait.
  FileLock(const char* where, const std::string& path);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int descriptor_;
};

}  // namespace hsdp
