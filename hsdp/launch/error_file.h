#pragma once

#include <string>
#include <string_view>

namespace hsdp {

/// Writes a failure in the form that torchrun shows as the root cause: JSON with the text `type: text` and the time.
/// Never throws, since it reports another failure; returns whether the file was written.
bool write_error_file(const std::string& path, std::string_view type, std::string_view text) noexcept;

/// The same to the file named by TORCHELASTIC_ERROR_FILE; returns false when the launcher asks for none.
bool report_failure(std::string_view type, std::string_view text) noexcept;

}  // namespace hsdp
