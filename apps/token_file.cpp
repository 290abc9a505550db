#include "apps/token_file.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "dtensor/error.h"

namespace apps {
namespace {

static_assert(std::endian::native == std::endian::little, "token files are little-endian and read in place");

constexpr int64_t kHeaderBytes = 256 * 4;
constexpr int32_t kMagicUint16 = 20240520, kVersionUint16 = 1;
constexpr int32_t kMagicUint32 = 20240801, kVersionUint32 = 7;

template <class... Parts>
[[noreturn]] void refuse(const std::string& path, const Parts&... parts) {
  dtensor::raise<dtensor::ValueError>("data", path, ": ", parts...);
}

/// Closes the descriptor when the constructor is left, also by an exception.
struct Descriptor {
  int value;
  ~Descriptor() {
    if (value >= 0) close(value);
  }
};

template <class Token>
void widen(const std::byte* from, int64_t count, int64_t* out) {
  Token token;
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(&token, from + i * int64_t(sizeof(Token)), sizeof(Token));
    out[i] = int64_t(token);
  }
}

}  // namespace

TokenFile::TokenFile(const std::string& path, TokenFormat format) : path_(path) {
  // O_NONBLOCK: opening a named pipe would wait for a writer instead of being refused below.
  const Descriptor file{open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.value < 0) {
    const int error = errno;
    std::error_code ignored;
    const std::string folder = std::filesystem::current_path(ignored).string();
    refuse(path, "cannot be opened: ", std::strerror(error), ", expected a token file; data.path is relative to ",
           folder, "; tools/prepare_data.py writes data/quickstart.bin");
  }
  struct stat status {};
  if (fstat(file.value, &status) != 0) refuse(path, "cannot be examined: ", std::strerror(errno));
  if (S_ISDIR(status.st_mode)) refuse(path, "is a folder, expected a token file");
  if (!S_ISREG(status.st_mode)) refuse(path, "is not a regular file, expected a token file that can be mapped");
  const int64_t bytes = status.st_size;
  if (bytes == 0) refuse(path, "is empty, expected tokens");

  void* mapping = mmap(nullptr, size_t(bytes), PROT_READ, MAP_SHARED, file.value, 0);
  if (mapping == MAP_FAILED) refuse(path, "cannot be mapped: ", std::strerror(errno));
  mapping_ = std::shared_ptr<const std::byte>(static_cast<const std::byte*>(mapping), [bytes](const std::byte* start) {
    munmap(const_cast<std::byte*>(start), size_t(bytes));
  });

  switch (format) {
    case TokenFormat::bytes:
      width_ = 1;
      break;
    case TokenFormat::uint16:
      width_ = 2;
      break;
    case TokenFormat::llmc:
      read_header(bytes);
      break;
  }
  if ((bytes - offset_) % width_ != 0) {
    refuse(path, "has ", bytes, " bytes, expected a multiple of ", width_, " (data.format uint16)");
  }
  size_ = (bytes - offset_) / width_;
  if (size_ == 0) refuse(path, "has a header and no tokens, expected tokens");
}

void TokenFile::read_header(int64_t bytes) {
  if (bytes < kHeaderBytes) {
    refuse(path_, "has ", bytes, " bytes, expected a header of ", kHeaderBytes, " bytes (data.format llmc)");
  }
  int32_t header[3];
  std::memcpy(header, mapping_.get(), sizeof(header));
  const bool is_uint16 = header[0] == kMagicUint16 && header[1] == kVersionUint16;
  const bool is_uint32 = header[0] == kMagicUint32 && header[1] == kVersionUint32;
  if (!is_uint16 && !is_uint32) {
    refuse(path_, "has magic ", header[0], " and version ", header[1], ", expected ", kMagicUint16, " and ",
           kVersionUint16, " (uint16 tokens) or ", kMagicUint32, " and ", kVersionUint32,
           " (uint32 tokens); files without a header are data.format bytes or uint16");
  }
  width_ = is_uint16 ? 2 : 4;
  offset_ = kHeaderBytes;
  const int64_t tokens = uint32_t(header[2]);
  if (bytes != kHeaderBytes + tokens * width_) {
    refuse(path_, "has ", bytes, " bytes and its header says ", tokens, " tokens, expected ",
           kHeaderBytes + tokens * width_, " bytes; the file may be cut short");
  }
}

void TokenFile::read(int64_t begin, int64_t count, int64_t* out) const {
  TORCH_INTERNAL_ASSERT(begin >= 0 && count >= 0 && begin <= size_ - count, "tokens [", begin, ", ", begin + count,
                        ") of ", size_);
  const std::byte* from = mapping_.get() + offset_ + begin * width_;
  switch (width_) {
    case 1:
      return widen<uint8_t>(from, count, out);
    case 2:
      return widen<uint16_t>(from, count, out);
    default:
      return widen<uint32_t>(from, count, out);
  }
}

}  // namespace apps
