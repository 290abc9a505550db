#include "hsdp/checkpoint/stored_reader.h"

#include <algorithm>
#include <cstring>

#include "dtensor/error.h"

namespace hsdp {
namespace {

using dtensor::Box;

// Each keeps a descriptor and a block.
constexpr size_t kMostOpenFiles = 64;
// Shorter runs come out of a block that is read once for all of them.
constexpr uint64_t kDirectRun = 64 * 1024;
// With one call, so that they are hashed while they are in the processor's cache.
constexpr uint64_t kMostBlocks = 4;

// Row-major position of `offsets` within `box`, in elements.
int64_t position_in(const Box& box, const std::vector<int64_t>& offsets) {
  int64_t position = 0;
  for (size_t dim = 0; dim < box.sizes.size(); ++dim) {
    position = position * box.sizes[dim] + (offsets[dim] - box.offsets[dim]);
  }
  return position;
}

}  // namespace

struct StoredReader::OpenFile {
  OpenFile(const char* where, const StoredFile& source) : stored(&source), file(where, source.path) {}

  const StoredFile* stored;
  ReadableFile file;
  std::vector<char> block;  // verified
  uint64_t block_number = 0;
  uint64_t last_read = 0;
};

StoredReader::StoredReader(const char* where, const StoredTensors& tensors) : where_(where), tensors_(tensors) {}

StoredReader::~StoredReader() = default;

StoredReader::OpenFile& StoredReader::open(int64_t file) {
  auto& slot = files_[file];
  if (!slot) {
    if (files_.size() > kMostOpenFiles) {
      auto oldest = files_.end();
      for (auto entry = files_.begin(); entry != files_.end(); ++entry) {
        if (entry->second && (oldest == files_.end() || entry->second->last_read < oldest->second->last_read)) {
          oldest = entry;
        }
      }
      files_.erase(oldest);
    }
    slot = std::make_unique<OpenFile>(where_, tensors_.files()[static_cast<size_t>(file)]);
  }
  slot->last_read = ++reads_;
  return *slot;
}

void verify_block(const char* where, const std::string& path, const std::vector<uint64_t>& block_checksums,
                  uint64_t block, const void* bytes, size_t count, const std::string& subject) {
  if (block_checksums.empty()) return;
  const auto expected = block_checksums.at(block), found = checksum(bytes, count);
  if (found == expected) return;
  const auto begin = block * kChecksumBlock;
  dtensor::raise<dtensor::ValueError>(where, path, ": bytes ", begin, " to ", begin + count, ", ", subject,
                                      ", have checksum ", to_hex(found), ", expected ", to_hex(expected),
                                      "; the file is damaged: load another checkpoint");
}

// Blocks, of which the last may be short, straight to where they are wanted.
void StoredReader::read_blocks(const StoredTensor& tensor, int64_t file, uint64_t block, char* out, size_t count) {
  auto& source = open(file);
  source.file.read(block * kChecksumBlock, out, count);
  bytes_read_ += count;
  for (size_t begin = 0; begin < count; begin += kChecksumBlock, ++block) {
    verify_block(where_, source.file.path(), source.stored->block_checksums, block, out + begin,
                 std::min(kChecksumBlock, count - begin), "with values of tensor \"" + tensor.name + "\"");
  }
}

void StoredReader::read_bytes(const StoredTensor& tensor, int64_t file, uint64_t begin, char* out, uint64_t count) {
  auto& source = open(file);
  if (source.stored->block_checksums.empty() && count >= kDirectRun) {
    source.file.read(begin, out, count);
    bytes_read_ += count;
    return;
  }
  for (const uint64_t end = begin + count; begin < end;) {
    const auto block = begin / kChecksumBlock;
    const auto block_begin = block * kChecksumBlock;
    const auto block_size = std::min<uint64_t>(kChecksumBlock, source.stored->bytes - block_begin);
    auto wanted = std::min(end, block_begin + block_size) - begin;
    if (wanted == block_size) {
      wanted *= std::clamp<uint64_t>((end - begin) / kChecksumBlock, 1, kMostBlocks);
      read_blocks(tensor, file, block, out, wanted);
    } else {
      if (source.block.size() != block_size || source.block_number != block) {
        source.block.resize(block_size);
        source.block_number = block;
        try {
          read_blocks(tensor, file, block, source.block.data(), block_size);
        } catch (...) {
          source.block.clear();
          throw;
        }
      }
      std::memcpy(out, source.block.data() + (begin - block_begin), wanted);
    }
    begin += wanted;
    out += wanted;
  }
}

void StoredReader::read_part(const StoredTensor& tensor, const StoredPart& part, const Box& box, char* out) {
  const auto dims = box.sizes.size();
  Box common{std::vector<int64_t>(dims), std::vector<int64_t>(dims)};
  for (size_t dim = 0; dim < dims; ++dim) {
    const auto begin = std::max(box.offsets[dim], part.box.offsets[dim]);
    const auto end = std::min(box.offsets[dim] + box.sizes[dim], part.box.offsets[dim] + part.box.sizes[dim]);
    if (begin >= end) return;
    common.offsets[dim] = begin;
    common.sizes[dim] = end - begin;
  }
  // What is contiguous on both sides: the trailing dims that are whole in both boxes, and the one before them.
  size_t outer = dims;
  int64_t run = 1;
  while (outer > 0) {
    --outer;
    run *= common.sizes[outer];
    if (common.sizes[outer] != box.sizes[outer] || common.sizes[outer] != part.box.sizes[outer]) break;
  }
  const auto element = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  for (auto at = common.offsets;;) {
    read_bytes(tensor, part.file, part.begin + static_cast<uint64_t>(position_in(part.box, at) * element),
               out + position_in(box, at) * element, static_cast<uint64_t>(run * element));
    size_t dim = outer;
    while (dim > 0) {
      --dim;
      if (++at[dim] < common.offsets[dim] + common.sizes[dim]) break;
      at[dim] = common.offsets[dim];
      if (dim == 0) return;
    }
    if (outer == 0) return;
  }
}

void StoredReader::read(const StoredTensor& tensor, const Box& box, void* out) {
  for (const auto& part : tensor.parts) read_part(tensor, part, box, static_cast<char*>(out));
}

}  // namespace hsdp
