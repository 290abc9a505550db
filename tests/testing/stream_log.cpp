#include "tests/testing/stream_log.h"

#include <algorithm>
#include <numeric>
#include <sstream>
#include <utility>

namespace testing_support {
namespace {

thread_local std::vector<std::string> labels;

void append(std::ostringstream& text, const char* verb, const std::vector<ByteRange>& ranges) {
  if (ranges.empty()) return;
  text << ", " << verb;
  constexpr size_t most = 4;
  for (size_t i = 0; i < std::min(ranges.size(), most); ++i) {
    text << ' ' << ranges[i].block << '[' << ranges[i].begin << ',' << ranges[i].end << ')';
  }
  if (ranges.size() > most) text << " and " << ranges.size() - most << " more";
}

}  // namespace

const char* to_string(Logged kind) {
  switch (kind) {
    case Logged::allocate:
      return "allocate";
    case Logged::release:
      return "release";
    case Logged::launch:
      return "launch";
    case Logged::collective:
      return "collective";
    case Logged::group_start:
      return "group_start";
    case Logged::group_end:
      return "group_end";
    case Logged::record:
      return "record";
    case Logged::wait:
      return "wait";
    case Logged::host_wait_event:
      return "host_wait_event";
    case Logged::host_wait_stream:
      return "host_wait_stream";
    case Logged::host_wait_device:
      return "host_wait_device";
    case Logged::query:
      return "query";
    case Logged::host_access:
      return "host_access";
    case Logged::record_stream:
      return "record_stream";
    case Logged::note:
      return "note";
  }
  return "?";
}

std::string to_string(const StreamName& stream) {
  return "npu:" + std::to_string(stream.device) + " stream " + std::to_string(stream.id);
}

std::string to_string(const StreamLog& log, size_t index) {
  const LogEntry& entry = log.at(index);
  std::ostringstream text;
  text << index << ' ' << to_string(entry.kind);
  if (!entry.name.empty()) text << " \"" << entry.name << '"';
  if (!entry.label.empty()) text << " [" << entry.label << ']';
  switch (entry.kind) {
    case Logged::allocate:
      text << " block " << entry.block << ", " << entry.bytes << " bytes"
           << (entry.pinned ? ", pinned" : ", home " + to_string(entry.stream));
      break;
    case Logged::release:
      text << " block " << entry.block;
      break;
    case Logged::record:
    case Logged::wait:
      text << " event " << entry.event << " on " << to_string(entry.stream);
      break;
    case Logged::host_wait_event:
      text << " event " << entry.event;
      break;
    case Logged::query:
      text << " event " << entry.event << (entry.answer ? ": complete" : ": not yet");
      break;
    case Logged::host_access:
    case Logged::note:
      break;
    case Logged::group_start:
    case Logged::group_end:
      text << " of " << entry.call.communicator;
      break;
    case Logged::record_stream:
      text << " block " << entry.block << " on " << to_string(entry.stream);
      break;
    case Logged::collective:
      text << " of " << entry.call.communicator << ", " << entry.call.count << ' ' << entry.call.dtype << ' '
           << entry.call.op;
      [[fallthrough]];
    case Logged::launch:
    case Logged::host_wait_stream:
    case Logged::host_wait_device:
      text << " on " << to_string(entry.stream);
      break;
  }
  append(text, "reads", entry.reads);
  append(text, "writes", entry.writes);
  return text.str();
}

std::string to_string(const StreamLog& log, size_t begin, size_t end) {
  std::string text;
  for (size_t i = begin; i < std::min(end, log.size()); ++i) text += to_string(log, i) + '\n';
  return text;
}

std::vector<ByteRange> byte_ranges(uint64_t block, size_t offset, const std::vector<int64_t>& sizes,
                                   const std::vector<int64_t>& strides, size_t item_size) {
  constexpr int64_t most = 128;
  struct Dim {
    int64_t size, stride;
  };
  std::vector<Dim> dims;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) return {};
    if (sizes[d] > 1 && strides[d] != 0) dims.push_back({sizes[d], strides[d]});
  }
  std::sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) { return a.stride < b.stride; });
  // The inner dims that lie without gaps are one stretch.
  int64_t stretch = 1;
  size_t outer = 0;
  while (outer < dims.size() && dims[outer].stride <= stretch) {
    stretch = (dims[outer].size - 1) * dims[outer].stride + stretch;
    ++outer;
  }
  int64_t stretches = 1, last = stretch;
  for (size_t d = outer; d < dims.size(); ++d) {
    stretches = stretches > most ? stretches : stretches * dims[d].size;
    last += (dims[d].size - 1) * dims[d].stride;
  }
  const auto bytes = [&](int64_t elements) { return static_cast<size_t>(elements) * item_size; };
  if (stretches > most) return {{block, offset, offset + bytes(last)}};
  std::vector<ByteRange> ranges{{block, offset, offset + bytes(stretch)}};
  for (size_t d = outer; d < dims.size(); ++d) {
    const size_t inner = ranges.size();
    for (int64_t i = 1; i < dims[d].size; ++i) {
      for (size_t k = 0; k < inner; ++k) {
        const size_t shift = bytes(i * dims[d].stride);
        ranges.push_back({block, ranges[k].begin + shift, ranges[k].end + shift});
      }
    }
  }
  return ranges;
}

LogLabel::LogLabel(std::string label) { labels.push_back(std::move(label)); }
LogLabel::~LogLabel() { labels.pop_back(); }
std::string LogLabel::current() { return labels.empty() ? std::string() : labels.back(); }

}  // namespace testing_support
