#include "hsdp/checkpoint/folder_names.h"

#include <array>
#include <cstdio>
#include <filesystem>
#include <system_error>

namespace hsdp {

std::string numbered(const std::string& stem, int64_t rank, const std::string& suffix) {
  std::array<char, 32> digits{};
  std::snprintf(digits.data(), digits.size(), "-%05lld", static_cast<long long>(rank + 1));
  return stem + digits.data() + suffix;
}

std::string trimmed(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

void remove_checkpoint(const std::string& path) {
  std::error_code error;
  const auto removing = path.ends_with(kWritingSuffix) ? path : path + kRemovingSuffix;
  if (removing != path) std::filesystem::rename(path, removing, error);
  if (!error) std::filesystem::remove_all(removing, error);
}

}  // namespace hsdp
