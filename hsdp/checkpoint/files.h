#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace hsdp {

/// Files are checksummed in blocks of this many bytes, so that a part of one can be read and still be verified.
constexpr size_t kChecksumBlock = size_t{1} << 20;

/// XXH3 of 64 bits, as `xxhsum -H3` prints it.
uint64_t checksum(const void* bytes, size_t count);
/// 16 digits, lower case.
std::string to_hex(uint64_t checksum);

/// What was written to a file.
struct WrittenFile {
  uint64_t bytes = 0;
  uint64_t checksum = 0;                  // of all bytes
  std::vector<uint64_t> block_checksums;  // of each kChecksumBlock bytes, the last block may be short
};

/// A file that appears under its name complete and on disk, or not at all: bytes go to a temporary file beside it.
/// Checksums are taken on the way. One thread at a time. `where` names the caller in messages and must outlive it.
class FileWriter {
 public:
  /// Throws ValueError naming path and reason, as all its functions do.
  FileWriter(const char* where, std::string path);
  /// Removes the temporary file unless complete() was called.
  ~FileWriter();
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  void write(const void* bytes, size_t count);
  /// Writes what is buffered, syncs, renames, and syncs the folder.
  WrittenFile complete();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// A file open for reading at any offset. Any number of threads.
class ReadableFile {
 public:
  /// Throws ValueError naming the path where it is missing, a folder or cannot be opened.
  ReadableFile(const char* where, std::string path);
  ~ReadableFile();
  ReadableFile(const ReadableFile&) = delete;
  ReadableFile& operator=(const ReadableFile&) = delete;

  const std::string& path() const { return path_; }
  /// In bytes, when it was opened.
  uint64_t size() const { return size_; }
  /// Exactly `count` bytes from `offset` on. Throws ValueError where the file ends before, or the disk fails.
  void read(uint64_t offset, void* out, size_t count) const;

 private:
  const char* where_;
  std::string path_;
  int descriptor_;
  uint64_t size_;
};

/// What a file holds, read from beginning to end: what FileWriter returned when it wrote it. Throws ValueError as
/// read().
WrittenFile measure(const ReadableFile& file);

/// The whole text of a file of at most `most_bytes`. Throws ValueError.
std::string read_text(const char* where, const std::string& path, size_t most_bytes);

/// Makes a folder and those above it that are missing, on disk. Throws ValueError.
void make_folders(const char* where, const std::string& path);

/// Makes names in a folder (files created, renamed, removed) survive a crash of the host. Throws ValueError.
void sync_folder(const char* where, const std::string& path);

}  // namespace hsdp
