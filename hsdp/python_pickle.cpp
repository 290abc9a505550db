#include "hsdp/python_pickle.h"

#include <c10/util/Exception.h>

#include <cstdint>
#include <optional>
#include <set>
#include <vector>

namespace hsdp {
namespace {

// The opcodes of protocol 2 that matter here, by their letters in Python's pickletools.
enum Opcode : uint8_t {
  kGlobal = 'c',
  kBinPut = 'q',
  kLongBinPut = 'r',
  kBinGet = 'h',
  kLongBinGet = 'j',
  kEmptyTuple = ')',
  kEmptyDict = '}',
  kReduce = 'R',
  kBuild = 'b',
  kStop = '.',
  kNewObject = 0x81,
  kTuple2 = 0x86,
};

struct Token {
  uint8_t opcode;
  size_t begin, end;
};

uint64_t little_endian(const std::string& bytes, size_t at, size_t width) {
  uint64_t value = 0;
  for (size_t i = 0; i < width; ++i) value |= uint64_t{static_cast<uint8_t>(bytes[at + i])} << (8 * i);
  return value;
}

// Cuts a pickle into its instructions; nothing where it holds one that Python's protocol 2 has not.
std::optional<std::vector<Token>> tokenize(const std::string& pickle) {
  std::vector<Token> tokens;
  const auto lines = [&](size_t at, int count) {
    for (; count > 0 && at != std::string::npos; --count) {
      at = pickle.find('\n', at);
      if (at != std::string::npos) ++at;
    }
    return at;
  };
  for (size_t at = 0; at < pickle.size();) {
    const auto opcode = static_cast<uint8_t>(pickle[at]);
    const size_t argument = at + 1;
    // Width of a length that comes before so many bytes; 0: none.
    size_t length_width = 0;
    size_t end = argument;
    switch (opcode) {
      case 0x80:
      case 'K':
      case kBinPut:
      case kBinGet:
        end += 1;
        break;
      case 'M':
        end += 2;
        break;
      case 'J':
      case kLongBinPut:
      case kLongBinGet:
        end += 4;
        break;
      case 'G':
        end += 8;
        break;
      case 'U':
      case 'C':
      case 0x8a:
      case 0x8c:
        length_width = 1;
        break;
      case 'X':
      case 'T':
      case 'B':
      case 0x8b:
        length_width = 4;
        break;
      case kGlobal:
        end = lines(argument, 2);
        break;
      case '(':
      case kEmptyTuple:
      case kEmptyDict:
      case ']':
      case 'N':
      case 't':
      case 'l':
      case 'd':
      case 'a':
      case 'e':
      case 's':
      case 'u':
      case 'Q':
      case kReduce:
      case kBuild:
      case kStop:
      case '0':
      case '2':
      case kNewObject:
      case 0x85:
      case kTuple2:
      case 0x87:
      case 0x88:
      case 0x89:
        break;
      default:
        return std::nullopt;
    }
    if (length_width > 0) {
      if (argument + length_width > pickle.size()) return std::nullopt;
      end = argument + length_width + little_endian(pickle, argument, length_width);
    }
    if (end > pickle.size()) return std::nullopt;
    tokens.push_back({opcode, at, end});
    at = end;
    if (opcode == kStop) break;
  }
  return tokens;
}

}  // namespace

std::string with_plain_dicts(const std::string& pickle) {
  const auto tokens = tokenize(pickle);
  if (!tokens) return pickle;
  const auto opcode_at = [&](size_t i) { return i < tokens->size() ? (*tokens)[i].opcode : uint8_t{kStop}; };
  const auto number = [&](const Token& token) {
    return little_endian(pickle, token.begin + 1, token.end - token.begin - 1);
  };
  std::string result;
  std::set<uint64_t> ordered_dict;  // where the pickle remembers the class
  for (size_t i = 0; i < tokens->size(); ++i) {
    const auto& token = (*tokens)[i];
    const auto text = pickle.substr(token.begin, token.end - token.begin);
    bool is_class = false;
    switch (token.opcode) {
      case kNewObject:
        return pickle;  // TorchScript's, where BUILD means something else.
      case kGlobal:
        is_class = text == "ccollections\nOrderedDict\n";
        if (is_class && (opcode_at(i + 1) == kBinPut || opcode_at(i + 1) == kLongBinPut)) {
          ordered_dict.insert(number((*tokens)[++i]));
        }
        break;
      case kBinGet:
      case kLongBinGet:
        is_class = ordered_dict.count(number(token)) != 0;
        break;
      case kBuild:
        result += static_cast<char>(kTuple2);
        continue;
      default:
        break;
    }
    if (!is_class) {
      result += text;
      continue;
    }
    if (opcode_at(i + 1) != kEmptyTuple || opcode_at(i + 2) != kReduce) return pickle;
    i += 2;
    result += static_cast<char>(kEmptyDict);
  }
  return result;
}

std::string with_string_replaced(const std::string& pickle, const std::string& from, const std::string& to) {
  const auto unicode = [](const std::string& text) {
    std::string token = "X";
    for (size_t i = 0; i < 4; ++i) token += static_cast<char>(text.size() >> (8 * i) & 0xff);
    return token + text;
  };
  const auto tokens = tokenize(pickle);
  TORCH_INTERNAL_ASSERT(tokens.has_value(), "a pickle of libtorch that cannot be followed");
  std::string result;
  int found = 0;
  for (auto& token : *tokens) {
    const auto text = pickle.substr(token.begin, token.end - token.begin);
    const bool is_it = text == unicode(from);
    found += is_it ? 1 : 0;
    result += is_it ? unicode(to) : text;
  }
  TORCH_INTERNAL_ASSERT(found == 1, "'", from, "' is ", found, " times in a pickle");
  return result;
}

}  // namespace hsdp
