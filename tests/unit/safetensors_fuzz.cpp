// The reader of safetensors headers against files that were good and had some of their bytes changed: each is refused
// with an error of the library, or is a file whose every value can be read. Built with sanitizers, and from the
// reader's own sources alone, so that a run is short.
//
// HSDP_FUZZ_CASES says how many files. They are the same in every run.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "dtensor/error.h"
#include "hsdp/checkpoint/files.h"
#include "hsdp/checkpoint/safetensors.h"

namespace {

using c10::ScalarType;
using hsdp::SafetensorsEntry;
using hsdp::SafetensorsHeader;

constexpr uint64_t kSeed = 20240613;

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  /// Of 0 to count - 1.
  size_t below(size_t count) { return static_cast<size_t>(engine_() % count); }
  bool one_in(size_t count) { return below(count) == 0; }
  template <class Values>
  const auto& one_of(const Values& values) {
    return values[below(std::size(values))];
  }
  char byte() { return static_cast<char>(below(256)); }

 private:
  std::mt19937_64 engine_;
};

// ---- good files ----

const std::map<ScalarType, uint64_t> kElementBytes{
    {ScalarType::Double, 8},       {ScalarType::Float, 4},         {ScalarType::Half, 2},
    {ScalarType::BFloat16, 2},     {ScalarType::Long, 8},          {ScalarType::Int, 4},
    {ScalarType::Short, 2},        {ScalarType::Char, 1},          {ScalarType::Byte, 1},
    {ScalarType::Bool, 1},         {ScalarType::UInt16, 2},        {ScalarType::UInt32, 4},
    {ScalarType::UInt64, 8},       {ScalarType::Float8_e4m3fn, 1}, {ScalarType::Float8_e5m2, 1},
    {ScalarType::ComplexFloat, 8},
};

std::string good_file(Random& random) {
  const bool sharded = random.one_in(2);
  std::vector<SafetensorsEntry> entries(random.below(6));
  for (size_t i = 0; i < entries.size(); ++i) {
    auto& entry = entries[i];
    entry.name =
        random.one_of(std::vector<std::string>{"w", "layers.0.weight", "\"\\", "b\xc3\xa9", ""}) + std::to_string(i);
    entry.dtype = std::next(kElementBytes.begin(), static_cast<int>(random.below(kElementBytes.size())))->first;
    for (size_t dim = random.below(4); dim > 0; --dim) {
      entry.sizes.push_back(static_cast<int64_t>(random.below(5)));
      entry.offsets.push_back(static_cast<int64_t>(random.below(1000)));
    }
  }
  std::map<std::string, std::string> metadata;
  if (random.one_in(3)) metadata["note"] = "any \"text\"";
  auto bytes = hsdp::layout_safetensors("fuzz", entries, sharded, metadata);
  if (!entries.empty()) bytes.resize(entries.back().end, '\x5a');
  return bytes;
}

// ---- changes ----

uint64_t header_length(const std::string& bytes) {
  uint64_t length = 0;
  for (size_t i = 0; i < 8 && i < bytes.size(); ++i)
    length |= uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  return length;
}
void set_header_length(std::string& bytes, uint64_t length) {
  for (size_t i = 0; i < 8 && i < bytes.size(); ++i) bytes[i] = static_cast<char>(length >> (8 * i));
}

// Where headers of good files end; the end of the file where that was changed.
size_t header_end(const std::string& bytes) {
  const auto length = header_length(bytes);
  return bytes.size() < 8 || length > bytes.size() - 8 ? bytes.size() : 8 + static_cast<size_t>(length);
}

// Changes the JSON text; the length goes along, mostly.
void edit_text(Random& random, std::string& bytes, const std::function<void(std::string&)>& edit) {
  if (bytes.size() < 10) return;
  const auto end = header_end(bytes);
  auto text = bytes.substr(8, end - 8);
  edit(text);
  const bool follow = !random.one_in(8);
  const auto length = text.size();
  bytes = bytes.substr(0, 8) + text + bytes.substr(end);
  if (follow) set_header_length(bytes, length);
}

using Range = std::pair<size_t, size_t>;

std::vector<Range> runs_of(const std::string& text, const std::string& characters) {
  std::vector<Range> runs;
  for (size_t begin = 0; (begin = text.find_first_of(characters, begin)) != std::string::npos;) {
    const auto end = std::min(text.find_first_not_of(characters, begin), text.size());
    runs.emplace_back(begin, end - begin);
    begin = end;
  }
  return runs;
}

// What stands between quotes, with them.
std::vector<Range> quoted_texts(const std::string& text) {
  std::vector<Range> ranges;
  for (size_t begin = text.find('"'); begin != std::string::npos; begin = text.find('"', begin)) {
    const auto end = text.find('"', begin + 1);
    if (end == std::string::npos) break;
    ranges.emplace_back(begin, end + 1 - begin);
    begin = end + 1;
  }
  return ranges;
}

const std::vector<std::string> kNumbers{
    "0",
    "1",
    "2",
    "3",
    "4",
    "8",
    "16",
    "-1",
    "-0",
    "0.5",
    "1e3",
    "1e999",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "-9223372036854775808",
    "007",
    "NaN",
    "100000000000000000000000000000000000000000000",
    "null",
    "true",
    "\"1\"",
    "[1]",
    "{}",
    "",
};
const std::vector<std::string> kTexts{
    "\"dtype\"",
    "\"shape\"",
    "\"data_offsets\"",
    "\"saved_offsets\"",
    "\"__metadata__\"",
    "\"DCP_SHARDING_INFO\"",
    "\"format\"",
    "\"F64\"",
    "\"F32\"",
    "\"F16\"",
    "\"I64\"",
    "\"I8\"",
    "\"BOOL\"",
    "\"F4\"",
    "\"\"",
    "\"w0\"",
    "\"w1\"",
    "\"\\u0000\"",
    "\"\\ud800\"",
    "\"{}\"",
    "\"{\\\"w0\\\":{\\\"saved_offsets\\\":[0]}}\"",
    "null",
    "7",
    "[]",
    "{}",
};

using Change = std::function<void(Random&, std::string&)>;

// By name, for the report of a failure.
const std::vector<std::pair<std::string, Change>> kChanges{
    {"bit",
     [](Random& random, std::string& bytes) {
       if (!bytes.empty()) bytes[random.below(bytes.size())] ^= static_cast<char>(1 << random.below(8));
     }},
    {"bit of the header",
     [](Random& random, std::string& bytes) {
       if (!bytes.empty()) bytes[random.below(header_end(bytes))] ^= static_cast<char>(1 << random.below(8));
     }},
    {"bytes",
     [](Random& random, std::string& bytes) {
       for (size_t count = 1 + random.below(8); count > 0 && !bytes.empty(); --count) {
         bytes[random.below(bytes.size())] = random.byte();
       }
     }},
    {"values",
     [](Random& random, std::string& bytes) {
       const auto begin = header_end(bytes);
       if (begin < bytes.size()) bytes[begin + random.below(bytes.size() - begin)] = random.byte();
     }},
    {"cut", [](Random& random, std::string& bytes) { bytes.resize(random.below(bytes.size() + 1)); }},
    {"longer", [](Random& random, std::string& bytes) { bytes.append(1 + random.below(40), random.byte()); }},
    {"splice",
     [](Random& random, std::string& bytes) {
       const auto from = random.below(bytes.size() + 1), to = random.below(bytes.size() + 1);
       bytes.insert(to, bytes.substr(from, random.below(64)));
     }},
    {"hole", [](Random& random, std::string& bytes) { bytes.erase(random.below(bytes.size() + 1), random.below(32)); }},
    {"length",
     [](Random& random, std::string& bytes) {
       const uint64_t length = header_length(bytes);
       const std::vector<uint64_t> lengths{0,
                                           1,
                                           length - 1,
                                           length + 1,
                                           length + 8,
                                           bytes.size(),
                                           bytes.size() - 8,
                                           bytes.size() - 7,
                                           100'000'000,
                                           100'000'001,
                                           uint64_t{1} << 63,
                                           ~uint64_t{0},
                                           ~uint64_t{0} - 7,
                                           length << 32};
       set_header_length(bytes, random.one_of(lengths));
     }},
    {"number",
     [](Random& random, std::string& bytes) {
       edit_text(random, bytes, [&](std::string& text) {
         const auto runs = runs_of(text, "0123456789");
         if (runs.empty()) return;
         const auto [begin, count] = random.one_of(runs);
         text.replace(begin, count, random.one_of(kNumbers));
       });
     }},
    {"number by one",
     [](Random& random, std::string& bytes) {
       edit_text(random, bytes, [&](std::string& text) {
         const auto runs = runs_of(text, "0123456789");
         if (runs.empty()) return;
         const auto [begin, count] = random.one_of(runs);
         if (count > 6) return;
         text.replace(begin, count, std::to_string(std::stoi(text.substr(begin, count)) + (random.one_in(2) ? 1 : -1)));
       });
     }},
    {"text",
     [](Random& random, std::string& bytes) {
       edit_text(random, bytes, [&](std::string& text) {
         const auto ranges = quoted_texts(text);
         if (ranges.empty()) return;
         const auto [begin, count] = random.one_of(ranges);
         text.replace(begin, count, random.one_of(kTexts));
       });
     }},
    {"text of another place",
     [](Random& random, std::string& bytes) {
       edit_text(random, bytes, [&](std::string& text) {
         const auto ranges = quoted_texts(text);
         if (ranges.empty()) return;
         const auto [from, from_count] = random.one_of(ranges);
         const auto [begin, count] = random.one_of(ranges);
         text.replace(begin, count, text.substr(from, from_count));
       });
     }},
    {"part twice",
     [](Random& random, std::string& bytes) {
       edit_text(random, bytes, [&](std::string& text) {
         const auto commas = runs_of(text, ",");
         if (commas.empty()) return;
         const auto begin = random.one_of(commas).first;
         const auto end = text.find_first_of(random.one_in(2) ? "}" : ",]", begin + 1);
         if (end != std::string::npos) text.insert(begin, text.substr(begin, end - begin));
       });
     }},
    // Both ends of a tensor's bytes, and the file's end with them: a hole, or an overlap.
    {"range",
     [](Random& random, std::string& bytes) {
       const int by = random.one_of(std::vector<int>{-8, -1, 1, 8});
       bool found = false;
       edit_text(random, bytes, [&](std::string& text) {
         const std::string key = "\"data_offsets\":[";
         std::vector<size_t> places;
         for (auto at = text.find(key); at != std::string::npos; at = text.find(key, at + 1)) places.push_back(at);
         if (places.empty()) return;
         const auto begin = random.one_of(places) + key.size();
         const auto end = text.find(']', begin);
         unsigned first = 0, second = 0;
         if (end == std::string::npos || std::sscanf(&text[begin], "%u,%u", &first, &second) != 2) return;
         text.replace(begin, end - begin, std::to_string(first + by) + "," + std::to_string(second + by));
         found = true;
       });
       if (found && (by > 0 || bytes.size() >= 8)) bytes.resize(bytes.size() + by, '\x5a');
     }},
    {"structure",
     [](Random& random, std::string& bytes) {
       edit_text(random, bytes, [&](std::string& text) {
         const auto runs = runs_of(text, "{}[],:\"\\");
         if (runs.empty()) return;
         const auto [begin, count] = random.one_of(runs);
         const auto at = begin + random.below(count);
         const std::string characters = "{}[],:\"\\ ";
         const auto character = characters[random.below(characters.size())];
         if (random.one_in(3)) {
           text.erase(at, 1);
         } else if (random.one_in(2)) {
           text[at] = character;
         } else {
           text.insert(at, 1, character);
         }
       });
     }},
    {"nesting",
     [](Random& random, std::string& bytes) {
       edit_text(random, bytes, [&](std::string& text) {
         text.insert(random.below(text.size() + 1), 1 + random.below(2000), random.one_in(2) ? '[' : '{');
       });
     }},
    {"spaces",
     [](Random& random, std::string& bytes) {
       edit_text(random, bytes, [&](std::string& text) {
         const auto runs = runs_of(text, ",:}");
         if (!runs.empty()) text.insert(random.one_of(runs).first, 1, random.one_of(std::string(" \n\t\r\f\0", 6)));
       });
     }},
};

// ---- what must hold ----

/// A file in memory under a path.
class MemoryFile {
 public:
  MemoryFile() : descriptor_(::memfd_create("safetensors", MFD_CLOEXEC)) {
    if (descriptor_ < 0) throw std::runtime_error("no file in memory can be made");
  }
  ~MemoryFile() { ::close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  std::string path() const { return "/proc/self/fd/" + std::to_string(descriptor_); }
  void set(const std::string& bytes) {
    ASSERT_EQ(::ftruncate(descriptor_, 0), 0);
    ASSERT_EQ(::pwrite(descriptor_, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  }

 private:
  int descriptor_;
};

// Of a header that was accepted, told without what the reader itself computes with.
void check_accepted(const SafetensorsHeader& header, const hsdp::ReadableFile& file, const std::string& bytes) {
  uint64_t next = 8 + header_length(bytes);
  std::set<std::string> names;
  for (const auto& entry : header.entries) {
    ASSERT_TRUE(names.insert(entry.name).second) << entry.name;
    ASSERT_EQ(entry.begin, next) << entry.name;
    ASSERT_LE(entry.begin, entry.end) << entry.name;
    ASSERT_LE(entry.end, bytes.size()) << entry.name;
    next = entry.end;
    __int128 size = kElementBytes.at(entry.dtype);
    for (const auto dim : entry.sizes) ASSERT_GE(dim, 0) << entry.name;
    for (const auto dim : entry.sizes) {
      // Elsewhere it may be too large even for 128 bits.
      size = dim == 0 || size == 0 ? 0 : std::min(size * dim, __int128{1} << 62);
    }
    ASSERT_TRUE(size == static_cast<__int128>(entry.end - entry.begin)) << entry.name;
    ASSERT_EQ(entry.offsets.size(), entry.sizes.size()) << entry.name;
    for (size_t dim = 0; dim < entry.sizes.size(); ++dim) {
      ASSERT_GE(entry.offsets[dim], 0) << entry.name;
      int64_t end = 0;
      ASSERT_FALSE(__builtin_add_overflow(entry.offsets[dim], entry.sizes[dim], &end)) << entry.name;
      ASSERT_TRUE(header.sharded || entry.offsets[dim] == 0) << entry.name;
    }
    std::string values(entry.end - entry.begin, '\0');
    file.read(entry.begin, values.data(), values.size());
    ASSERT_TRUE(values == bytes.substr(entry.begin, values.size())) << entry.name;
  }
  ASSERT_EQ(next, bytes.size());
}

std::string hex(const std::string& bytes) {
  std::string text;
  for (const char byte : bytes) {
    for (const int shift : {4, 0}) text += "0123456789abcdef"[static_cast<unsigned char>(byte) >> shift & 15];
  }
  return text;
}

// Which file it is, where the process that reads it may end at any moment and another one then wants to know.
class SharedNote {
 public:
  SharedNote()
      : text_(static_cast<char*>(::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
    if (text_ == MAP_FAILED) throw std::runtime_error("no shared memory");
  }
  ~SharedNote() { ::munmap(text_, kBytes); }
  SharedNote(const SharedNote&) = delete;
  SharedNote& operator=(const SharedNote&) = delete;

  void set(const std::string& text) { text_[text.copy(text_, kBytes - 1)] = '\0'; }
  std::string get() const { return text_; }

 private:
  static constexpr size_t kBytes = 1 << 20;
  char* text_;
};

void read_cases(long cases, SharedNote& note) {
  MemoryFile memory;
  long accepted = 0, refused = 0;
  for (long i = 0; i < cases; ++i) {
    Random random(kSeed + static_cast<uint64_t>(i));
    auto bytes = good_file(random);
    std::string changes;
    // Some stay good.
    for (size_t count = random.one_in(50) ? 0 : 1 + random.below(3); count > 0; --count) {
      const auto& [name, change] = random.one_of(kChanges);
      change(random, bytes);
      changes += (changes.empty() ? "" : ", ") + name;
    }
    note.set("case " + std::to_string(i) + " of seed " + std::to_string(kSeed) + ", changes: " + changes +
             ", bytes: " + hex(bytes));
    memory.set(bytes);
    try {
      const hsdp::ReadableFile file("fuzz", memory.path());
      const auto header = hsdp::read_safetensors_header("fuzz", file);
      check_accepted(header, file, bytes);
      ++accepted;
    } catch (const dtensor::ValueError& error) {
      EXPECT_FALSE(changes.empty()) << "a good file was refused: " << error.what();
      ++refused;
    } catch (const dtensor::NotSupportedError&) {
      ++refused;
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(accepted, 0);
  EXPECT_GT(refused, 0);
  std::printf("%ld files: %ld accepted, %ld refused\n", cases, accepted, refused);
}

TEST(SafetensorsFuzz, IsRefusedOrReadable) {
  const char* wanted = std::getenv("HSDP_FUZZ_CASES");
  const long cases = wanted == nullptr ? 20000 : std::atol(wanted);
  ASSERT_GT(cases, 0) << "HSDP_FUZZ_CASES";
  SharedNote note;
  std::fflush(nullptr);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    read_cases(cases, note);
    // Not _exit: sanitizers look for leaks when a process ends.
    std::exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << note.get();
}

}  // namespace
