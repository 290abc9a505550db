#include "hsdp/launch/error_file.h"

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

namespace hsdp {

bool write_error_file(const std::string& path, std::string_view type, std::string_view text) noexcept {
  try {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(now).count();
    const nlohmann::json content = {{"message",
                                     {{"message", std::string(type) + ": " + std::string(text)},
                                      {"extraInfo", {{"timestamp", std::to_string(seconds)}}}}}};
    // Texts may quote bytes of a broken file: those that are no UTF-8 are replaced.
    const std::string json = content.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    std::ofstream file(path, std::ios::trunc);
    file << json << '\n';
    file.close();
    return file.good();
  } catch (...) {
    return false;
  }
}

bool report_failure(std::string_view type, std::string_view text) noexcept {
  const char* path = std::getenv("TORCHELASTIC_ERROR_FILE");
  return path && *path && write_error_file(path, type, text);
}

}  // namespace hsdp
