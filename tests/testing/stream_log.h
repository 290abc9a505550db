#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

/// What a recorded device writes down of a run: every piece of work given to a stream with the memory that it touches,
/// and everything that orders streams and host. Plain data: a test may as well write a log by hand.
namespace testing_support {

struct StreamName {
  int device = 0;
  int64_t id = 0;  // 0 is the device's default stream
  auto operator<=>(const StreamName&) const = default;
};

/// Bytes [begin, end) of one block of memory. A block is one allocation: another one at the same address has another
/// number. 0 stands for memory that is no block's, or no longer.
struct ByteRange {
  uint64_t block = 0;
  size_t begin = 0, end = 0;
  bool overlaps(const ByteRange& other) const { return block == other.block && begin < other.end && other.begin < end; }
  bool covers(const ByteRange& other) const { return block == other.block && begin <= other.begin && end >= other.end; }
};

enum class Logged {
  allocate,          // stream: the block's home, that was current; block, bytes
  release,           // block; at host time
  launch,            // stream, reads, writes
  collective,        // as a launch; call
  group_start,       // call.communicator
  group_end,         // call.communicator
  record,            // stream, event: a number of its own for each recording
  wait,              // stream, event
  host_wait_event,   // event
  host_wait_stream,  // stream
  host_wait_device,  // stream.device
  query,             // event, answer
  host_access,       // reads, writes: pinned memory, touched by the host itself
  record_stream,     // stream, block: the allocator is asked to watch the stream
  note,              // what a test says; kSteadyBegins and kSteadyEnds mean something to the checker. With a
                     // call.communicator: that communicator is made
};

inline constexpr const char* kSteadyBegins = "steady begins";
inline constexpr const char* kSteadyEnds = "steady ends";

/// What all ranks of a communicator must agree on.
struct CollectiveRecord {
  std::string communicator = {};  // the same text on its ranks, and no other's
  std::string dtype = {};
  std::string op = {};  // of a reduction
  int64_t count = 0;
  int64_t root = -1;
  bool own_stream = false;  // asynchronous: on the backend's stream, not on the current one
};

struct LogEntry {
  Logged kind = Logged::note;
  std::string name = {};   // operator, collective, or why
  std::string label = {};  // the innermost label of its thread, see LogLabel
  StreamName stream = {};
  std::vector<ByteRange> reads = {}, writes = {};
  uint64_t block = 0;
  size_t bytes = 0;
  bool pinned = false;  // of an allocation: host memory that the device reads and writes
  uint64_t event = 0;
  bool answer = false;
  CollectiveRecord call = {};
  int thread = 0;
};

using StreamLog = std::vector<LogEntry>;

const char* to_string(Logged kind);
/// "npu:0 stream 3".
std::string to_string(const StreamName& stream);
/// One line: `812 launch "aten::mm" [forward blocks.1] on npu:0 stream 0, reads 17[0,512), writes 19[0,64)`.
std::string to_string(const StreamLog& log, size_t index);
/// Entries [begin, end), a line each.
std::string to_string(const StreamLog& log, size_t begin, size_t end);

/// The bytes that a strided tensor touches, of a block of which it begins `offset` bytes behind the start. Exact where
/// that takes at most 128 stretches, such as rows of a wider buffer; otherwise from the first byte to the last, which
/// may find conflicts where there are none.
std::vector<ByteRange> byte_ranges(uint64_t block, size_t offset, const std::vector<int64_t>& sizes,
                                   const std::vector<int64_t>& strides, size_t item_size);

/// What the calling thread is about until the end of the label's life: noted in the entries that it causes.
class LogLabel {
 public:
  explicit LogLabel(std::string label);
  ~LogLabel();
  LogLabel(const LogLabel&) = delete;
  LogLabel& operator=(const LogLabel&) = delete;
  /// Empty where the thread has none.
  static std::string current();
};

}  // namespace testing_support
