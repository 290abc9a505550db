#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace apps {

/// How the tokens lie in a file, little-endian.
enum class TokenFormat {
  bytes,   ///< one token a byte, no header
  uint16,  ///< two bytes a token, no header (nanoGPT)
  llmc,    ///< 256 x int32 header: magic, version, number of tokens; then uint16 (20240520, 1) or uint32 (20240801, 7)
};

/// A read-only file of tokens, mapped into memory: pages are loaded as they are read and shared by the processes of a
/// host. Copies share the mapping; the last one unmaps it. Reads may run on several threads. The file must not shrink
/// while it is mapped.
class TokenFile {
 public:
  /// Throws dtensor::ValueError, naming path and values, when the path is missing, unreadable, a folder or no regular
  /// file, and when the content is empty, no whole number of tokens, or does not fit the header.
  TokenFile(const std::string& path, TokenFormat format);

  const std::string& path() const { return path_; }
  /// Number of tokens, at least 1.
  int64_t size() const { return size_; }
  /// Writes tokens [begin, begin + count) to `out`. The range must lie in the file.
  void read(int64_t begin, int64_t count, int64_t* out) const;

 private:
  /// Takes offset and width from the header of a mapped llmc file, and checks the file's size against it.
  void read_header(int64_t bytes);

  std::string path_;
  std::shared_ptr<const std::byte> mapping_;
  int64_t offset_ = 0;
  int64_t width_ = 0;
  int64_t size_ = 0;
};

}  // namespace apps
