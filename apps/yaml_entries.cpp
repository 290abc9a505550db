#include "apps/yaml_entries.h"

#include <c10/util/StringUtil.h>
#include <yaml-cpp/depthguard.h>
#include <yaml-cpp/yaml.h>

namespace apps {
namespace {

std::string place_of(const std::string& name, const YAML::Mark& mark) {
  // yaml-cpp counts from 0, editors from 1; a null mark means that the parser knew no place.
  return mark.is_null() ? name : c10::str(name, ":", mark.line + 1, ":", mark.column + 1);
}

YamlEntry::Kind kind_of(const YAML::Node& node) {
  switch (node.Type()) {
    case YAML::NodeType::Scalar:
      return node.Tag() == "?" ? YamlEntry::Kind::plain : YamlEntry::Kind::quoted;
    case YAML::NodeType::Sequence:
      return YamlEntry::Kind::list;
    case YAML::NodeType::Map:
      return YamlEntry::Kind::map;
    case YAML::NodeType::Null:
    case YAML::NodeType::Undefined:
      return YamlEntry::Kind::nothing;
  }
  return YamlEntry::Kind::nothing;
}

std::string on_one_line(const YAML::Node& list) {
  YAML::Emitter emitter;
  emitter.SetSeqFormat(YAML::Flow);
  emitter.SetMapFormat(YAML::Flow);
  // An item in quotes stays text, whatever it looks like.
  emitter << YAML::BeginSeq;
  for (const auto& item : list) {
    if (item.IsScalar() && item.Tag() != "?") {
      emitter << YAML::DoubleQuoted << item.Scalar();
    } else {
      emitter << item;
    }
  }
  emitter << YAML::EndSeq;
  return emitter.c_str();
}

class Reader {
 public:
  Reader(std::string name, YamlEntries& result) : name_(std::move(name)), result_(result) {}

  void read(const YAML::Node& document) {
    if (document.IsNull()) return;
    if (!document.IsMap()) {
      problem(document.Mark(), "expected sections such as 'model:' at the top level");
      return;
    }
    // yaml-cpp keeps repeated keys as further pairs of the map and looks up the first, so they show only here.
    for (const auto& pair : document) {
      const auto section = key(pair.first, result_.sections, "");
      if (section.empty() || pair.second.IsNull()) continue;
      if (!pair.second.IsMap()) {
        problem(pair.second.Mark(), c10::str(section, ": expected a section with keys below it"));
        continue;
      }
      read_section(section, pair.second);
    }
  }

  void problem(const YAML::Mark& mark, const std::string& what) {
    result_.problems.push_back(c10::str(place_of(name_, mark), ": ", what));
  }

 private:
  void read_section(const std::string& section, const YAML::Node& node) {
    std::map<std::string, std::string> keys;
    for (const auto& pair : node) {
      const auto name = key(pair.first, keys, section + ".");
      if (name.empty()) continue;
      YamlEntry entry;
      entry.kind = kind_of(pair.second);
      if (pair.second.IsScalar()) entry.text = pair.second.Scalar();
      if (pair.second.IsSequence()) entry.text = on_one_line(pair.second);
      entry.key_place = place_of(name_, pair.first.Mark());
      // The place of an empty value is that of the next token, lines away.
      entry.value_place = pair.second.IsNull() ? entry.key_place : place_of(name_, pair.second.Mark());
      result_.entries[section + "." + name] = std::move(entry);
    }
  }

  /// The key's text, or empty after reporting that it repeats one of `seen` or is no word.
  std::string key(const YAML::Node& node, std::map<std::string, std::string>& seen, const std::string& prefix) {
    if (!node.IsScalar() || node.Scalar().empty()) {
      problem(node.Mark(), c10::str(prefix, "?: expected a word as key"));
      return {};
    }
    const auto [first, inserted] = seen.emplace(node.Scalar(), place_of(name_, node.Mark()));
    if (inserted) return node.Scalar();
    problem(node.Mark(), c10::str(prefix, node.Scalar(), ": duplicate key, first given at ", first->second));
    return {};
  }

  std::string name_;
  YamlEntries& result_;
};

}  // namespace

YamlEntries read_yaml_entries(const std::string& text, const std::string& name) {
  YamlEntries result;
  Reader reader(name, result);
  try {
    const auto documents = YAML::LoadAll(text);
    for (const auto& document : documents) {
      if (&document != &documents.front()) {
        reader.problem(document.Mark(), "a second YAML document, expected one");
        break;
      }
      reader.read(document);
    }
  } catch (const YAML::DeepRecursion& error) {
    reader.problem(error.mark, "not valid YAML: nested too deeply");
  } catch (const YAML::Exception& error) {
    reader.problem(error.mark, "not valid YAML: " + error.msg);
  }
  return result;
}

}  // namespace apps
