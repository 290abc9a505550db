#include "hsdp/checkpoint/safetensors.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>

#include "dtensor/error.h"

namespace hsdp {
namespace {

using dtensor::raise;
using dtensor::ValueError;
using Json = nlohmann::json;

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMostHeaderBytes = 100'000'000;
// Values begin at a multiple of it.
constexpr uint64_t kAlignment = 8;
// Sizes and offsets are int64 everywhere else.
constexpr uint64_t kMost = std::numeric_limits<int64_t>::max();

constexpr auto kMetadata = "__metadata__";
constexpr auto kShardingInfo = "DCP_SHARDING_INFO";
constexpr auto kSavedOffsets = "saved_offsets";

constexpr std::pair<c10::ScalarType, const char*> kDtypes[] = {
    {c10::ScalarType::Double, "F64"},
    {c10::ScalarType::Float, "F32"},
    {c10::ScalarType::Half, "F16"},
    {c10::ScalarType::BFloat16, "BF16"},
    {c10::ScalarType::Long, "I64"},
    {c10::ScalarType::Int, "I32"},
    {c10::ScalarType::Short, "I16"},
    {c10::ScalarType::Char, "I8"},
    {c10::ScalarType::Byte, "U8"},
    {c10::ScalarType::Bool, "BOOL"},
    {c10::ScalarType::UInt16, "U16"},
    {c10::ScalarType::UInt32, "U32"},
    {c10::ScalarType::UInt64, "U64"},
    {c10::ScalarType::Float8_e4m3fn, "F8_E4M3"},
    {c10::ScalarType::Float8_e5m2, "F8_E5M2"},
    {c10::ScalarType::ComplexFloat, "C64"},
};

std::string dtype_names() {
  std::string names;
  for (const auto& [dtype, name] : kDtypes) names += (names.empty() ? "" : ", ") + std::string(name);
  return names;
}

// For messages: any bytes, as one quoted line of readable length.
std::string shown(const std::string& text) {
  constexpr size_t kMostShown = 200;
  return Json(text.substr(0, kMostShown)).dump(-1, ' ', false, Json::error_handler_t::replace) +
         (text.size() > kMostShown ? "..." : "");
}

template <class Integer>
std::string shown(const std::vector<Integer>& numbers) {
  constexpr size_t kMostShown = 32;
  std::string text = "[";
  for (size_t i = 0; i < std::min(numbers.size(), kMostShown); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(numbers[i]);
  }
  return text + (numbers.size() > kMostShown ? ", ...]" : "]");
}

// Throws about one file.
class Complaint {
 public:
  Complaint(const char* where, const std::string& path) : where_(where), path_(path) {}
  template <class... Parts>
  [[noreturn]] void operator()(const Parts&... parts) const {
    raise<ValueError>(where_, path_, ": ", parts...);
  }

 private:
  const char* where_;
  const std::string& path_;
};

std::string label(const std::string& name) { return name == kMetadata ? name : "tensor " + shown(name); }

using Numbers = std::vector<uint64_t>;
using Field = std::variant<std::string, Numbers>;
using Fields = std::map<std::string, Field>;

// What headers and sharding information are in JSON: {name: {field: "text" or [whole numbers]}}. All else is refused
// where it begins, so that no text takes much more memory than it has bytes.
class NestedTable : public nlohmann::json_sax<Json> {
 public:
  using Take = std::function<void(const std::string& name, Fields& fields)>;

  /// `what` names the text. Calls `take` for one name after another; names and fields do not repeat.
  static void parse(const std::string& text, const char* what, const Complaint& complain, const Take& take) {
    // The parser would pass over a byte order mark and stop at a zero byte.
    if (!text.starts_with('{')) complain(what, " begins with ", shown(text.substr(0, 1)), ", expected \"{\"");
    if (const auto zero = text.find('\0'); zero != std::string::npos) {
      complain(what, " is no JSON at byte ", zero, ": a zero byte, expected text");
    }
    NestedTable table(what, complain, take);
    TORCH_INTERNAL_ASSERT(Json::sax_parse(text, &table));
  }

  bool null() override { refuse("null"); }
  bool boolean(bool value) override { refuse(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override { refuse("the negative number " + std::to_string(value)); }
  bool number_unsigned(number_unsigned_t value) override {
    if (depth_ != Depth::list || value > kMost) refuse("the number " + std::to_string(value));
    std::get<Numbers>(*field_).push_back(value);
    return true;
  }
  bool number_float(number_float_t, const std::string& text) override { refuse("the number " + text.substr(0, 40)); }
  bool string(std::string& value) override {
    if (depth_ != Depth::fields) refuse("the text " + shown(value));
    *field_ = std::move(value);
    return true;
  }
  bool binary(Json::binary_t&) override { refuse("binary data"); }

  bool start_object(size_t) override {
    if (depth_ != Depth::nothing && depth_ != Depth::names) refuse("an object");
    depth_ = depth_ == Depth::nothing ? Depth::names : Depth::fields;
    return true;
  }
  bool key(std::string& value) override {
    if (depth_ == Depth::names) {
      if (!names_.insert(value).second) complain_(what_, " has ", label(value), " twice, expected it once");
      name_ = std::move(value);
      fields_.clear();
    } else {
      const auto [place, is_new] = fields_.try_emplace(value);
      if (!is_new) complain_(what_, ": ", label(name_), " has ", shown(value), " twice, expected it once");
      field_name_ = std::move(value);
      field_ = &place->second;
    }
    return true;
  }
  bool end_object() override {
    if (depth_ == Depth::fields) take_(name_, fields_);
    depth_ = depth_ == Depth::fields ? Depth::names : Depth::nothing;
    return true;
  }
  bool start_array(size_t) override {
    if (depth_ != Depth::fields) refuse("a list");
    *field_ = Numbers();
    depth_ = Depth::list;
    return true;
  }
  bool end_array() override {
    depth_ = Depth::fields;
    return true;
  }
  bool parse_error(size_t position, const std::string&, const Json::exception& error) override {
    // Without the parser's preface and without what it read last, which may be any bytes.
    std::string reason = error.what();
    reason.resize(std::min(reason.size(), reason.find("; last read")));
    if (const auto at = reason.rfind("] "); at != std::string::npos) reason.erase(0, at + 2);
    complain_(what_, " is no JSON at byte ", position, ": ", reason.substr(0, 200));
  }

 private:
  enum class Depth { nothing, names, fields, list };

  NestedTable(const char* what, const Complaint& complain, const Take& take)
      : what_(what), complain_(complain), take_(take) {}

  [[noreturn]] void refuse(const std::string& value) const {
    switch (depth_) {
      case Depth::nothing:
        complain_(what_, " is ", value, ", expected an object");
      case Depth::names:
        complain_(what_, ": ", label(name_), " is ", value, ", expected an object");
      case Depth::fields:
        complain_(what_, ": ", label(name_), " has ", value, " as ", shown(field_name_),
                  ", expected a text or a list of whole numbers");
      case Depth::list:
        break;
    }
    complain_(what_, ": ", label(name_), " has ", value, " in ", shown(field_name_),
              ", expected whole numbers from 0 to ", kMost);
  }

  const char* what_;
  const Complaint& complain_;
  const Take& take_;
  Depth depth_ = Depth::nothing;
  std::unordered_set<std::string> names_;
  std::string name_, field_name_;
  Fields fields_;
  Field* field_ = nullptr;  // in fields_
};

template <class Value>
Value& field(const Complaint& complain, const std::string& name, Fields& fields, const char* field_name) {
  constexpr bool kText = std::is_same_v<Value, std::string>;
  const auto found = fields.find(field_name);
  if (found == fields.end()) complain(label(name), " lacks ", field_name);
  auto* value = std::get_if<Value>(&found->second);
  if (value == nullptr) {
    complain(label(name), " has ", kText ? "a list" : "a text", " as ", field_name, ", expected ",
             kText ? "a text" : "a list of whole numbers");
  }
  return *value;
}

void check_fields(const Complaint& complain, const std::string& name, const Fields& fields,
                  const std::vector<std::string>& known) {
  for (const auto& entry : fields) {
    if (std::find(known.begin(), known.end(), entry.first) == known.end()) {
      complain(label(name), " has ", shown(entry.first), ", expected nothing but ", c10::Join(", ", known));
    }
  }
}

SafetensorsEntry parse_entry(const Complaint& complain, const std::string& name, Fields& fields) {
  check_fields(complain, name, fields, {"dtype", "shape", "data_offsets"});
  const auto& dtype_name = field<std::string>(complain, name, fields, "dtype");
  const auto& shape = field<Numbers>(complain, name, fields, "shape");
  const auto& range = field<Numbers>(complain, name, fields, "data_offsets");
  const auto dtype = safetensors_dtype(dtype_name);
  if (!dtype) complain(label(name), " has dtype ", shown(dtype_name), ", expected one of ", dtype_names());
  SafetensorsEntry entry{name, *dtype, {shape.begin(), shape.end()}, std::vector<int64_t>(shape.size(), 0)};
  const auto bytes = tensor_bytes(entry.sizes, *dtype);
  if (!bytes) {
    complain(label(name), " has shape ", shown(shape), " of ", dtype_name, ", expected at most ", kMost, " bytes");
  }
  if (range.size() != 2 || range[0] > range[1]) {
    complain(label(name), " has data_offsets ", shown(range), ", expected its beginning and its end");
  }
  if (range[1] - range[0] != *bytes) {
    complain(label(name), " has data_offsets ", shown(range), ", expected ", *bytes, " bytes for shape ", shown(shape),
             " of ", dtype_name);
  }
  entry.begin = range[0];
  entry.end = range[1];
  return entry;
}

// Gives entries their offsets.
void parse_sharding_info(const Complaint& complain, const std::string& text, std::vector<SafetensorsEntry>& entries) {
  std::unordered_map<std::string, SafetensorsEntry*> missing;
  for (auto& entry : entries) missing[entry.name] = &entry;
  NestedTable::parse(text, kShardingInfo, complain, [&](const std::string& name, Fields& fields) {
    const auto found = missing.find(name);
    if (found == missing.end()) complain(kShardingInfo, " has ", label(name), ", expected names of the header");
    check_fields(complain, name, fields, {kSavedOffsets});
    const auto& offsets = field<Numbers>(complain, name, fields, kSavedOffsets);
    auto& entry = *found->second;
    bool fits = offsets.size() == entry.sizes.size();
    for (size_t dim = 0; fits && dim < offsets.size(); ++dim) {
      fits = offsets[dim] <= kMost - static_cast<uint64_t>(entry.sizes[dim]);
    }
    if (!fits) {
      complain(label(name), " has saved_offsets ", shown(offsets), ", expected one a dim of shape ", shown(entry.sizes),
               ", with a sum of at most ", kMost);
    }
    entry.offsets.assign(offsets.begin(), offsets.end());
    missing.erase(found);
  });
  for (const auto& entry : entries) {
    if (missing.contains(entry.name)) complain(kShardingInfo, " lacks ", label(entry.name));
  }
}

// Sorts entries by their bytes, which become those of the file. Values are [begin, end) there.
void check_ranges(const Complaint& complain, std::vector<SafetensorsEntry>& entries, uint64_t begin, uint64_t end) {
  std::sort(entries.begin(), entries.end(), [](const SafetensorsEntry& first, const SafetensorsEntry& second) {
    return std::tie(first.begin, first.end, first.name) < std::tie(second.begin, second.end, second.name);
  });
  uint64_t next = 0;
  const SafetensorsEntry* before = nullptr;
  for (const auto& entry : entries) {
    if (entry.begin != next) {
      complain(label(entry.name), " begins at byte ", entry.begin, " of the values, expected ", next, ", ",
               before == nullptr ? std::string("the first") : "where " + label(before->name) + " ends",
               entry.begin < next ? "; they overlap" : "; there is a hole");
    }
    next = entry.end;
    before = &entry;
  }
  if (next != end - begin) {
    complain("has ", end - begin, " bytes of values, expected ", next,
             next < end - begin ? "; what follows the last one is of no tensor" : "; it was truncated");
  }
  for (auto& entry : entries) {
    entry.begin += begin;
    entry.end += begin;
  }
}

std::string quoted(const char* where, const std::string& text) {
  try {
    return Json(text).dump();
  } catch (const Json::type_error&) {
    raise<ValueError>(where, "name ", shown(text), " cannot be stored, expected UTF-8");
  }
}

std::string list(const std::vector<int64_t>& numbers) { return "[" + c10::Join(",", numbers) + "]"; }

std::string sharding_info(const char* where, const std::vector<SafetensorsEntry>& entries) {
  std::string text;
  for (const auto& entry : entries) {
    TORCH_INTERNAL_ASSERT(entry.offsets.size() == entry.sizes.size(), entry.name);
    text += (text.empty() ? "{" : ",") + quoted(where, entry.name) + ":{\"saved_offsets\":" + list(entry.offsets) + "}";
  }
  return text.empty() ? "{}" : text + "}";
}

}  // namespace

const char* safetensors_name(c10::ScalarType dtype) {
  for (const auto& [known, name] : kDtypes) {
    if (known == dtype) return name;
  }
  return nullptr;
}

std::optional<c10::ScalarType> safetensors_dtype(const std::string& name) {
  for (const auto& [dtype, known] : kDtypes) {
    if (known == name) return dtype;
  }
  return std::nullopt;
}

std::optional<uint64_t> tensor_bytes(const std::vector<int64_t>& sizes, c10::ScalarType dtype) {
  auto bytes = static_cast<int64_t>(c10::elementSize(dtype));
  bool empty = false;
  for (const auto size : sizes) {
    empty |= size == 0;
    if (size < 0 || (size > 0 && __builtin_mul_overflow(bytes, size, &bytes))) return std::nullopt;
  }
  return empty ? 0 : static_cast<uint64_t>(bytes);
}

SafetensorsHeader read_safetensors_header(const char* where, const ReadableFile& file) {
  const Complaint complain(where, file.path());
  if (file.size() < kLengthBytes) complain("has ", file.size(), " bytes, expected a safetensors file, of 10 or more");
  unsigned char bytes[kLengthBytes];
  file.read(0, bytes, kLengthBytes);
  uint64_t length = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) length |= uint64_t{bytes[i]} << (8 * i);
  if (length > kMostHeaderBytes) {
    complain("has a header of ", length, " bytes, expected at most ", kMostHeaderBytes, "; it is no safetensors file");
  }
  const auto begin = kLengthBytes + length;
  if (begin > file.size()) {
    complain("has a header of ", length, " bytes in a file of ", file.size(), ", expected it to end in the file; it ",
             "was truncated or is no safetensors file");
  }
  std::string text(length, '\0');
  file.read(kLengthBytes, text.data(), text.size());

  SafetensorsHeader header;
  NestedTable::parse(text, "header", complain, [&](const std::string& name, Fields& fields) {
    if (name != kMetadata) {
      header.entries.push_back(parse_entry(complain, name, fields));
      return;
    }
    for (const auto& entry : fields) {
      header.metadata[entry.first] = std::move(field<std::string>(complain, name, fields, entry.first.c_str()));
    }
  });
  check_ranges(complain, header.entries, begin, file.size());
  if (const auto info = header.metadata.extract(kShardingInfo)) {
    header.sharded = true;
    parse_sharding_info(complain, info.mapped(), header.entries);
  }
  return header;
}

std::string layout_safetensors(const char* where, std::vector<SafetensorsEntry>& entries, bool sharded,
                               const std::map<std::string, std::string>& metadata) {
  auto placed = entries;
  std::sort(placed.begin(), placed.end(), [](const SafetensorsEntry& first, const SafetensorsEntry& second) {
    const auto first_size = c10::elementSize(first.dtype), second_size = c10::elementSize(second.dtype);
    return first_size != second_size ? first_size > second_size : first.name < second.name;
  });

  std::unordered_set<std::string> names{kMetadata};
  std::string text;
  uint64_t bytes = 0;
  for (auto& entry : placed) {
    const auto* dtype = safetensors_name(entry.dtype);
    if (dtype == nullptr) {
      raise<dtensor::NotSupportedError>(where, label(entry.name), " is ", c10::toString(entry.dtype),
                                        ", expected one of ", dtype_names(), "; convert it");
    }
    if (!names.insert(entry.name).second) {
      raise<ValueError>(where, "name ", shown(entry.name), " is taken, expected each name once");
    }
    const auto size = tensor_bytes(entry.sizes, entry.dtype);
    if (!size || *size > kMost - bytes) {
      raise<ValueError>(where, label(entry.name), " has shape ", shown(entry.sizes), " of ", dtype,
                        ", expected a file of at most ", kMost, " bytes");
    }
    entry.begin = std::exchange(bytes, bytes + *size);
    entry.end = bytes;
    text += c10::str(",", quoted(where, entry.name), ":{\"dtype\":\"", dtype, "\",\"shape\":", list(entry.sizes),
                     ",\"data_offsets\":[", entry.begin, ",", entry.end, "]}");
  }

  auto all_metadata = metadata;
  all_metadata["format"] = "pt";
  if (sharded) {
    all_metadata["DCP_VERSION"] = "1.0";
    all_metadata[kShardingInfo] = sharding_info(where, placed);
  }
  std::string metadata_text;
  for (const auto& [key, value] : all_metadata) {
    metadata_text += (metadata_text.empty() ? "" : ",") + quoted(where, key) + ":" + quoted(where, value);
  }
  text = c10::str("{\"", kMetadata, "\":{", metadata_text, "}", text, "}");
  text.resize((text.size() + kAlignment - 1) / kAlignment * kAlignment, ' ');
  if (text.size() > kMostHeaderBytes) {
    raise<ValueError>(where, "the header of ", placed.size(), " tensors has ", text.size(), " bytes, expected at most ",
                      kMostHeaderBytes, "; write them to several files");
  }

  std::string first_bytes(kLengthBytes, '\0');
  for (size_t i = 0; i < kLengthBytes; ++i) first_bytes[i] = static_cast<char>(text.size() >> (8 * i));
  first_bytes += text;
  for (auto& entry : placed) {
    entry.begin += first_bytes.size();
    entry.end += first_bytes.size();
  }
  entries = std::move(placed);
  return first_bytes;
}

}  // namespace hsdp
