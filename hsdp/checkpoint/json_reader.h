#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "dtensor/error.h"

/// For sources only: nlohmann's types stay out of the headers that programs include.
namespace hsdp {

/// As one line of readable length, for messages; bytes that are no UTF-8 are replaced.
std::string shown(const nlohmann::json& value);

/// Takes the text of one of a checkpoint's JSON files apart. All functions throw ValueError, saying which file it is,
/// what it should be and which entry is wrong; `entry` is that entry's name. What the constructor gets must outlive it.
class JsonReader {
 public:
  using Json = nlohmann::json;

  /// `what` the file should be: "a manifest".
  JsonReader(const char* where, const std::string& path, const char* what) : where_(where), path_(path), what_(what) {}

  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    dtensor::raise<dtensor::ValueError>(where_, path_, " is not ", what_, ": ", parts...);
  }
  /// An object whose "format" and "version" are these. No object in it has a key twice, and none is nested deeper than
  /// `deepest`.
  Json parse(const std::string& text, const char* format, int64_t version, int deepest) const;

  /// It is an object of these names and no others.
  void check_object(const Json& value, const std::string& entry, const std::vector<std::string>& names) const;
  /// It is an object, of any names.
  void check_object(const Json& value, const std::string& entry) const;
  void check_list(const Json& value, const std::string& entry) const;
  int64_t integer(const Json& value, const std::string& entry) const;
  const std::string& text(const Json& value, const std::string& entry) const;

 private:
  const char* where_;
  const std::string& path_;
  const char* what_;
};

}  // namespace hsdp
