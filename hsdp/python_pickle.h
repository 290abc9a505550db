#pragma once

#include <string>

/// Small changes to pickles, instruction by instruction.
namespace hsdp {

/// A pickle that Python's torch.save wrote, such that libtorch's unpickler can follow it: that one takes every
/// OrderedDict for None, and module.state_dict() is one. Each becomes a dict; one that has attributes of its own
/// becomes the pair of the dict and them. Anything else, a TorchScript pickle for example, is returned as it is.
std::string with_plain_dicts(const std::string& pickle);

/// A pickle in which the string `from` is `to`. It must be there once: pickles refer back to strings that come again.
std::string with_string_replaced(const std::string& pickle, const std::string& from, const std::string& to);

}  // namespace hsdp
