#include "hsdp/checkpoint/file_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "dtensor/error.h"

namespace hsdp {
namespace {

using dtensor::raise;
using dtensor::ValueError;

std::string holder(int descriptor) {
  std::array<char, 512> text{};
  const auto count = ::pread(descriptor, text.data(), text.size() - 1, 0);
  return count > 0 ? std::string(text.data(), static_cast<size_t>(count)) : "another process";
}

}  // namespace

FileLock::FileLock(const char* where, const std::string& path)
    : descriptor_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)) {
  if (descriptor_ < 0) {
    raise<ValueError>(where, path, " cannot be opened: ", std::strerror(errno),
                      ", expected a folder that can be written");
  }
  if (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    const auto text = holder(descriptor_);
    ::close(descriptor_);
    raise<ValueError>(where, path, " is held by ", text,
                      ", expected nobody else to write here; wait for that run to end, or choose another folder");
  }
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  const auto text = c10::str("process ", ::getpid(), " on ", host.data());
  // Only for messages: what cannot be written is missing there.
  if (::ftruncate(descriptor_, 0) == 0) (void)!::pwrite(descriptor_, text.data(), text.size(), 0);
}

FileLock::~FileLock() { ::close(descriptor_); }

}  // namespace hsdp
