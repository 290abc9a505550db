#include "hsdp/checkpoint/json_reader.h"

#include <algorithm>
#include <limits>
#include <set>

namespace hsdp {

std::string shown(const nlohmann::json& value) {
  constexpr size_t kMostShown = 200;
  auto text = value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  if (text.size() <= kMostShown) return text;
  // Not within a character of several bytes.
  size_t end = kMostShown;
  while ((static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  return text.substr(0, end) + "...";
}

JsonReader::Json JsonReader::parse(const std::string& text, const char* format, int64_t version, int deepest) const {
  // The parser would keep the last of repeated keys, and stop at a zero byte.
  if (const auto zero = text.find('\0'); zero != std::string::npos) refuse("it is no JSON at byte ", zero);
  std::vector<std::set<std::string>> keys;
  const auto check = [&](int depth, Json::parse_event_t event, Json& value) {
    if (depth > deepest) refuse("it is nested more than ", deepest, " deep, expected less");
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second) {
      refuse("it has ", shown(value), " twice in one object, expected it once");
    }
    return true;
  };
  Json json;
  try {
    json = Json::parse(text, check);
  } catch (const Json::parse_error& error) {
    refuse("it is no JSON at byte ", error.byte, " of ", text.size());
  } catch (const Json::out_of_range&) {
    refuse("it has a number that no floating-point number reaches");
  }
  check_object(json, "it");
  const auto found = json.find("format"), found_version = json.find("version");
  if (found == json.end() || *found != format) {
    refuse("its format is ", found == json.end() ? "missing" : shown(*found), ", expected \"", format, "\"");
  }
  if (found_version == json.end() || *found_version != version) {
    refuse("its version is ", found_version == json.end() ? "missing" : shown(*found_version), ", expected ", version,
           "; another release of the library wrote it");
  }
  return json;
}

void JsonReader::check_object(const Json& value, const std::string& entry,
                              const std::vector<std::string>& names) const {
  check_object(value, entry);
  for (const auto& name : names) {
    if (!value.contains(name)) refuse(entry, " lacks \"", name, "\"");
  }
  for (const auto& item : value.items()) {
    if (std::find(names.begin(), names.end(), item.key()) == names.end()) {
      refuse(entry, " has ", shown(item.key()), ", expected nothing but ", c10::Join(", ", names));
    }
  }
}

void JsonReader::check_object(const Json& value, const std::string& entry) const {
  if (!value.is_object()) refuse(entry, " is ", shown(value), ", expected an object");
}

void JsonReader::check_list(const Json& value, const std::string& entry) const {
  if (!value.is_array()) refuse(entry, " is ", shown(value), ", expected a list");
}

int64_t JsonReader::integer(const Json& value, const std::string& entry) const {
  constexpr auto kLeast = std::numeric_limits<int64_t>::min(), kMost = std::numeric_limits<int64_t>::max();
  const bool fits = !value.is_number_unsigned() || value.get<uint64_t>() <= uint64_t{kMost};
  if (!value.is_number_integer() || !fits) {
    refuse(entry, " is ", shown(value), ", expected a whole number from ", kLeast, " to ", kMost);
  }
  return value.get<int64_t>();
}

const std::string& JsonReader::text(const Json& value, const std::string& entry) const {
  if (!value.is_string()) refuse(entry, " is ", shown(value), ", expected a text");
  return value.get_ref<const std::string&>();
}

}  // namespace hsdp
