#pragma once

#include <string>

namespace dtensor {

/// Where this thread is, for the message of a failure: the library function that waits and the program's functions
/// that led to it, innermost first, with file and line where the program has debug information and with object and
/// offset (for addr2line) where it has not. Begins with "; called in ". Empty on a thread that the program did not
/// enter, and where stacks cannot be read. Takes milliseconds to seconds: for failures only.
std::string call_site();

}  // namespace dtensor
