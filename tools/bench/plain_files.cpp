#include "tools/bench/plain_files.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <stdexcept>

namespace bench {
namespace {

constexpr size_t kBlock = size_t{8} << 20;

class Descriptor {
 public:
  Descriptor(std::string path, int flags) : path_(std::move(path)), number_(::open(path_.c_str(), flags, 0666)) {
    check(number_ >= 0);
  }
  ~Descriptor() { ::close(number_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int number() const { return number_; }
  void check(bool fine) const {
    if (!fine) throw std::runtime_error(path_ + ": " + std::strerror(errno));
  }

  /// `transfer(number, bytes, count)` is read or write.
  template <class Bytes, class Transfer>
  void move(Bytes bytes, size_t count, const Transfer& transfer) const {
    while (count > 0) {
      const auto part = transfer(number_, bytes, std::min(count, kBlock));
      check(part >= 0);
      if (part == 0) throw std::runtime_error(path_ + " ends early");
      bytes += part;
      count -= static_cast<size_t>(part);
    }
  }

 private:
  std::string path_;
  int number_;
};

}  // namespace

void write_plain(const std::string& path, const std::vector<at::Tensor>& tensors) {
  const Descriptor file(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC);
  for (const auto& tensor : tensors) {
    file.move(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes(), ::write);
  }
  file.check(::fsync(file.number()) == 0);
  const Descriptor folder(std::filesystem::path(path).parent_path(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  folder.check(::fsync(folder.number()) == 0);
}

std::vector<at::Tensor> read_plain(const std::string& path, const std::vector<at::Tensor>& like) {
  const Descriptor file(path, O_RDONLY | O_CLOEXEC);
  std::vector<at::Tensor> tensors;
  for (const auto& tensor : like) {
    tensors.push_back(at::empty_like(tensor));
    file.move(static_cast<char*>(tensors.back().mutable_data_ptr()), tensor.nbytes(), ::read);
  }
  return tensors;
}

void drop_cache(const std::string& folder) {
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    const Descriptor file(entry.path(), O_RDONLY | O_CLOEXEC);
    errno = ::posix_fadvise(file.number(), 0, 0, POSIX_FADV_DONTNEED);
    file.check(errno == 0);
  }
}

}  // namespace bench
