#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/testing/stream_log.h"

/// Whether what a log tells is right whatever the speeds of streams and host: by vector clocks, so that a wait that is
/// missing is found although the recorded run happened to come out well.
namespace testing_support {

/// What is known to have happened, by stream. Line 0 is the host, of whose threads one timeline is made: they are taken
/// to be ordered as the log has them.
class Clocks {
 public:
  using Clock = std::vector<uint32_t>;
  /// A place on a line, and all that comes before it.
  struct Stamp {
    size_t line = 0;
    uint32_t tick = 0;
    Clock clock;
  };
  static constexpr size_t kHost = 0;

  Clocks() : now_(1) {}

  size_t line_of(const StreamName& stream);
  const Clock& at(const StreamName& stream) { return now_[line_of(stream)]; }
  const Clock& host() const { return now_[kHost]; }

  Stamp launch(const StreamName& stream);
  Stamp host_access();
  void record(const StreamName& stream, uint64_t event);
  /// Null for an event that was never recorded.
  const Clock* recorded(uint64_t event) const;
  /// Whether the wait orders anything that was not ordered before. `event` was recorded.
  bool wait(const StreamName& stream, uint64_t event);
  void host_wait(const Clock& clock) { join(now_[kHost], clock); }
  void host_wait_device(int device);

  static uint32_t tick(const Clock& clock, size_t line) { return line < clock.size() ? clock[line] : 0; }
  static bool covers(const Clock& later, const Clock& earlier);

 private:
  static void join(Clock& clock, const Clock& other);
  Clock& enter(const StreamName& stream);

  std::map<StreamName, size_t> lines_;
  std::deque<Clock> now_;  // whose entries stay where they are
  std::map<uint64_t, Clock> events_;
};

enum class Rule {
  race,           // two accesses of overlapping bytes, one a write, that nothing orders
  early_use,      // on another stream than the block's home, not ordered behind the home's position at the allocation
  early_release,  // the block goes back to its home while another stream may still be at work on it
  use_after_release,
  unrecorded_event,  // a wait for an event that was never recorded
  group,             // start and end that do not pair, an empty group, or what does not belong between them
  // Between kSteadyBegins and kSteadyEnds the host waits for what it does not know to have ended, or asks about it
  // twice with nothing given to the device in between.
  host_wait,
  record_stream,  // the allocator is asked to watch a stream, which keeps memory longer than needed
};
const char* to_string(Rule rule);

struct Violation {
  Rule rule;
  size_t first = 0, second = 0;  // entries of the log; equal where one is at fault by itself
  std::string text;              // names both with their streams, and says what is missing
};

/// One rank's log, checked. The log must outlive it.
///
/// Memory is that of a caching allocator ordered by streams: a released block may be handed out at once to its home
/// stream. Pinned memory is exempt from the rules on allocation and release, because its allocator remembers the
/// streams of copies. Members of a group count as launched when the group ends.
class HappensBefore {
 public:
  explicit HappensBefore(const StreamLog& log);

  /// The first hundred.
  const std::vector<Violation>& violations() const { return violations_; }
  /// Empty when nothing is wrong; otherwise the first few, a line each.
  std::string report() const;
  /// Whether entry `first` (a launch, a collective or an access of the host) has ended before `second` begins, by what
  /// the log guarantees.
  bool is_ordered(size_t first, size_t second) const;
  /// Entries that wait, and whether that ordered anything that was not ordered already.
  struct Wait {
    size_t entry;
    bool needed;
  };
  const std::vector<Wait>& waits() const { return waits_; }

 private:
  struct Access {
    ByteRange range;
    bool writes;
    size_t line;
    uint32_t tick;
    size_t entry;
  };
  struct Block {
    std::optional<size_t> allocated, released;
    size_t home = Clocks::kHost;
    uint32_t home_tick = 0;
    std::vector<Access> accesses;
  };
  struct Group {
    size_t start;
    std::vector<size_t> members;
  };

  void step(size_t index);
  void query(size_t index);
  void touch(size_t index, Clocks::Stamp stamp);
  void touch(size_t index, const Clocks::Stamp& stamp, const ByteRange& range, bool writes);
  void release(size_t index);
  void check_between(size_t index);
  void join_group(size_t index, Group& group);
  void end_group(size_t index);
  void add(Rule rule, size_t first, size_t second, const std::string& why);

  const StreamLog& log_;
  Clocks clocks_;
  std::map<uint64_t, Block> blocks_;
  std::map<std::string, Group> groups_;  // open, by communicator
  std::map<size_t, Clocks::Stamp> stamps_;
  std::vector<Wait> waits_;
  std::optional<size_t> steady_;
  std::map<std::pair<int, uint64_t>, size_t> unanswered_;  // queries since the last launch, by thread and event
  std::vector<Violation> violations_;
};

/// What the ranks of each communicator have to do alike, in order: pairs of communicator and call, groups included.
using CollectiveSequence = std::vector<std::pair<std::string, std::string>>;
CollectiveSequence collective_sequence(const StreamLog& log);
/// Empty when every communicator's calls are the same on all ranks that have it; otherwise the first difference. Every
/// rank that takes part in a communicator appears in `ranks`.
std::string compare_collectives(const std::vector<CollectiveSequence>& ranks);

}  // namespace testing_support
