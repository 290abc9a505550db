#pragma once

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <exception>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <vector>

namespace testing_support {

/// Expects that `call` throws exactly an `E` (or a class derived from it) whose text contains every given part, and is
/// one line (of libtorch's own errors, without the stack trace). Reports what was thrown otherwise.
template <class E, class Call, class... Parts>
void expect_error(Call&& call, const Parts&... parts) {
  std::string text;
  try {
    call();
    ADD_FAILURE() << "expected " << typeid(E).name() << ", nothing was thrown";
    return;
  } catch (const E& error) {
    if constexpr (std::is_same_v<E, c10::Error>) {
      text = error.what_without_backtrace();
    } else {
      text = error.what();
    }
  } catch (const std::exception& error) {
    ADD_FAILURE() << "expected " << typeid(E).name() << ", caught " << typeid(error).name() << ": " << error.what();
    return;
  }
  for (const std::string& part : std::vector<std::string>{parts...}) {
    EXPECT_NE(text.find(part), std::string::npos) << "missing '" << part << "' in: " << text;
  }
  EXPECT_EQ(text.find('\n'), std::string::npos) << "more than one line: " << text;
}

}  // namespace testing_support
