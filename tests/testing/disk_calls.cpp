// Functions of the C library under their own names: a program's come before those of the libraries that it links, and
// the library under test calls these.
#include "tests/testing/disk_calls.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <mutex>
#include <utility>

namespace testing_support {
namespace {

struct Hooked {
  std::mutex mutex;
  std::shared_ptr<DiskHook> hook;
  int64_t calls = 0;
};

// Files are removed at the very end of a process, too.
Hooked& hooked() {
  static auto* instance = new Hooked;
  return *instance;
}

// Whether the call is to fail; errno says why.
bool fails(const char* call, const char* path) {
  auto& state = hooked();
  std::shared_ptr<DiskHook> hook;
  int64_t number = 0;
  {
    std::lock_guard lock(state.mutex);
    hook = state.hook;
    number = state.calls++;
  }
  const int error = hook ? (*hook)(call, path, number) : 0;
  if (error != 0) errno = error;
  return error != 0;
}

int done(int64_t result) { return static_cast<int>(result); }

}  // namespace

void set_disk_hook(DiskHook hook) {
  auto& state = hooked();
  std::lock_guard lock(state.mutex);
  state.hook = hook ? std::make_shared<DiskHook>(std::move(hook)) : nullptr;
  state.calls = 0;
}

}  // namespace testing_support

#define SEEN_BY_LIBRARIES extern "C" __attribute__((visibility("default")))
using testing_support::done;
using testing_support::fails;

SEEN_BY_LIBRARIES int fsync(int file) { return fails("fsync", "") ? -1 : done(syscall(SYS_fsync, file)); }

SEEN_BY_LIBRARIES int mkdir(const char* path, mode_t mode) noexcept {
  return fails("mkdir", path) ? -1 : done(syscall(SYS_mkdirat, AT_FDCWD, path, mode));
}

SEEN_BY_LIBRARIES int rename(const char* from, const char* to) noexcept {
  return fails("rename", from) ? -1 : done(syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}

SEEN_BY_LIBRARIES int renameat2(int from_folder, const char* from, int to_folder, const char* to,
                                unsigned flags) noexcept {
  return fails("renameat2", from) ? -1 : done(syscall(SYS_renameat2, from_folder, from, to_folder, to, flags));
}

SEEN_BY_LIBRARIES int unlink(const char* path) noexcept {
  return fails("unlink", path) ? -1 : done(syscall(SYS_unlinkat, AT_FDCWD, path, 0));
}

SEEN_BY_LIBRARIES int unlinkat(int folder, const char* path, int flags) noexcept {
  return fails("unlinkat", path) ? -1 : done(syscall(SYS_unlinkat, folder, path, flags));
}
