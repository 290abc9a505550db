#pragma once

#include <c10/util/StringUtil.h>

#include <stdexcept>
#include <string>

namespace dtensor {

/// Base of everything that a user of the library can cause and may want to catch. The text is always
/// `[where] what, values, expected; hint`. Faults of the library itself are TORCH_INTERNAL_ASSERTs, never this type.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A value that is out of range or does not fit the others (shape, size, name, configuration entry).
class ValueError : public Error {
 public:
  using Error::Error;
};

/// Something that has a meaning but that this library does not do; the text names what to write instead.
class NotSupportedError : public Error {
 public:
  using Error::Error;
};

/// A right call at the wrong time: a forward before the values exist, raw access to a sharded parameter, ...
class StateError : public Error {
 public:
  using Error::Error;
};

/// A collective that failed or timed out; the text names operation, group and bytes. Other ranks may have failed too.
class CommunicationError : public Error {
 public:
  using Error::Error;
};

/// Throws `E` with the text `[where] ` followed by the concatenated parts (anything that streams).
template <class E, class... Parts>
[[noreturn]] void raise(const char* where, const Parts&... parts) {
  throw E(c10::str("[", where, "] ", parts...));
}

}  // namespace dtensor
