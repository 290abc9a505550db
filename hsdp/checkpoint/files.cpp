#include "hsdp/checkpoint/files.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include "dtensor/error.h"

namespace hsdp {

using dtensor::raise;
using dtensor::ValueError;

uint64_t checksum(const void* bytes, size_t count) { return XXH3_64bits(bytes, count); }

std::string to_hex(uint64_t checksum) {
  char digits[17];
  std::snprintf(digits, sizeof(digits), "%016" PRIx64, checksum);
  return digits;
}

struct FileWriter::State {
  State(const char* caller, std::string target)
      : where(caller),
        path(std::move(target)),
        temporary(path + ".tmp" + std::to_string(::getpid())),
        buffer(std::make_unique_for_overwrite<char[]>(kChecksumBlock)) {
    XXH3_64bits_reset(&sum);
    // Found here, and not after all has been written. A device would be replaced by the rename.
    struct stat status {};
    if (::stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
      fail("cannot be replaced", S_ISDIR(status.st_mode) ? EISDIR : ENOTSUP);
    }
    // Of a killed process that had the same number.
    ::unlink(temporary.c_str());
    descriptor = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor < 0) fail("cannot be created", errno);
  }
  ~State() {
    if (descriptor >= 0) ::close(descriptor);
    if (!renamed) ::unlink(temporary.c_str());
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  // What has failed once stays failed: bytes may be missing in between.
  [[noreturn]] void fail(const char* what, int number) {
    failure = number;
    raise<ValueError>(where, path, " ", what, ": ", std::strerror(number),
                      ", expected a path in a folder that can be written, with room for the whole file");
  }
  void check() {
    TORCH_INTERNAL_ASSERT(!renamed, path, " is complete");
    if (failure != 0) fail("cannot be written", failure);
  }

  // Blocks, of which the last of the file may be short, with one call for all of them: calls cost more than they should
  // on some systems.
  void write_blocks(const char* bytes, size_t count) {
    for (size_t begin = 0; begin < count; begin += kChecksumBlock) {
      const auto size = std::min(kChecksumBlock, count - begin);
      XXH3_64bits_update(&sum, bytes + begin, size);
      written.block_checksums.push_back(checksum(bytes + begin, size));
    }
    written.bytes += count;
    for (size_t done = 0; done < count;) {
      const auto part = ::write(descriptor, bytes + done, count - done);
      if (part > 0) {
        done += static_cast<size_t>(part);
      } else if (part == 0 || errno != EINTR) {
        fail("cannot be written", part == 0 ? ENOSPC : errno);
      }
    }
  }

  const char* where;
  std::string path, temporary;
  std::unique_ptr<char[]> buffer;
  size_t buffered = 0;
  int descriptor = -1;
  int failure = 0;
  bool renamed = false;
  XXH3_state_t sum;
  WrittenFile written;
};

FileWriter::FileWriter(const char* where, std::string path) : state_(std::make_unique<State>(where, std::move(path))) {}
FileWriter::~FileWriter() = default;

void FileWriter::write(const void* bytes, size_t count) {
  auto& state = *state_;
  state.check();
  const auto* next = static_cast<const char*>(bytes);
  while (count > 0) {
    constexpr size_t kMostBlocks = 8;
    auto part = std::min(count, kChecksumBlock - state.buffered);
    if (part == kChecksumBlock) {
      part *= std::min(count / kChecksumBlock, kMostBlocks);
      state.write_blocks(next, part);
    } else {
      std::memcpy(state.buffer.get() + state.buffered, next, part);
      state.buffered += part;
      if (state.buffered == kChecksumBlock) state.write_blocks(state.buffer.get(), std::exchange(state.buffered, 0));
    }
    next += part;
    count -= part;
  }
}

WrittenFile FileWriter::complete() {
  auto& state = *state_;
  state.check();
  if (state.buffered > 0) state.write_blocks(state.buffer.get(), std::exchange(state.buffered, 0));
  state.written.checksum = XXH3_64bits_digest(&state.sum);
  if (::fsync(state.descriptor) != 0) state.fail("cannot be written", errno);
  if (::close(std::exchange(state.descriptor, -1)) != 0) state.fail("cannot be written", errno);
  if (std::rename(state.temporary.c_str(), state.path.c_str()) != 0) state.fail("cannot be replaced", errno);
  state.renamed = true;
  sync_folder(state.where, std::filesystem::path(state.path).parent_path().string());
  return std::move(state.written);
}

ReadableFile::ReadableFile(const char* where, std::string path)
    : where_(where), path_(std::move(path)), descriptor_(-1), size_(0) {
  constexpr auto kExpected = ", expected the path of a file that can be read";
  // Opening a pipe would else wait for somebody to write into it.
  descriptor_ = ::open(path_.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  struct stat status {};
  if (descriptor_ < 0 || ::fstat(descriptor_, &status) != 0) {
    const auto number = errno;
    if (descriptor_ >= 0) ::close(descriptor_);
    raise<ValueError>(where_, path_, " cannot be opened: ", std::strerror(number), kExpected);
  }
  if (!S_ISREG(status.st_mode)) {
    ::close(descriptor_);
    raise<ValueError>(where_, path_, S_ISDIR(status.st_mode) ? " is a folder" : " is no regular file", kExpected);
  }
  size_ = static_cast<uint64_t>(status.st_size);
}

ReadableFile::~ReadableFile() { ::close(descriptor_); }

void ReadableFile::read(uint64_t offset, void* out, size_t count) const {
  const auto fail_at_end = [&](uint64_t end) {
    raise<ValueError>(where_, path_, " ends at byte ", end, ", expected ", count, " bytes from byte ", offset,
                      " on; it was truncated or is still being written");
  };
  if (offset > size_ || count > size_ - offset) fail_at_end(size_);
  for (size_t done = 0; done < count;) {
    const auto part =
        ::pread(descriptor_, static_cast<char*>(out) + done, count - done, static_cast<off_t>(offset + done));
    if (part > 0) {
      done += static_cast<size_t>(part);
    } else if (part == 0) {
      fail_at_end(offset + done);
    } else if (errno != EINTR) {
      raise<ValueError>(where_, path_, " cannot be read at byte ", offset + done, ": ", std::strerror(errno),
                        ", expected a disk that works");
    }
  }
}

WrittenFile measure(const ReadableFile& file) {
  WrittenFile result;
  result.bytes = file.size();
  const auto block = std::make_unique_for_overwrite<char[]>(kChecksumBlock);
  XXH3_state_t sum;
  XXH3_64bits_reset(&sum);
  for (uint64_t begin = 0; begin < file.size(); begin += kChecksumBlock) {
    const auto count = std::min<uint64_t>(kChecksumBlock, file.size() - begin);
    file.read(begin, block.get(), count);
    XXH3_64bits_update(&sum, block.get(), count);
    result.block_checksums.push_back(checksum(block.get(), count));
  }
  result.checksum = XXH3_64bits_digest(&sum);
  return result;
}

std::string read_text(const char* where, const std::string& path, size_t most_bytes) {
  const ReadableFile file(where, path);
  if (file.size() > most_bytes) {
    raise<ValueError>(where, path, " has ", file.size(), " bytes, expected at most ", most_bytes,
                      "; it is not what its name says");
  }
  std::string text(file.size(), '\0');
  file.read(0, text.data(), text.size());
  return text;
}

void make_folders(const char* where, const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  std::vector<fs::path> parents;
  for (fs::path folder = path; !folder.empty() && !fs::exists(folder, error); folder = folder.parent_path()) {
    parents.push_back(folder.parent_path());
  }
  fs::create_directories(path, error);
  if (error) {
    raise<ValueError>(where, path, " cannot be made: ", error.message(), ", expected a folder that can be written");
  }
  for (const auto& parent : parents) sync_folder(where, parent.string());
}

void sync_folder(const char* where, const std::string& path) {
  const std::string name = path.empty() ? "." : path;
  const int descriptor = ::open(name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  // Some file systems have no sync of folders, and say so by EINVAL.
  const bool failed = descriptor < 0 || (::fsync(descriptor) != 0 && errno != EINVAL);
  const auto number = errno;
  if (descriptor >= 0) ::close(descriptor);
  if (failed) {
    raise<ValueError>(where, "folder ", name, " cannot be synced: ", std::strerror(number),
                      ", expected a folder that can be read, on a disk that works");
  }
}

}  // namespace hsdp
