#pragma once

#include <string>

namespace hsdp {

/// The first host of a list in Slurm's notation: names separated by commas, each with any number of brackets that hold
/// numbers and ranges: `n[08-11,15]`, `a,b`, `rack[1-2]n[3,5]`. Numbers keep their width. Throws ValueError, naming the
/// environment variable that the list came from, for anything else anywhere in the list, and for ranges that run
/// backwards or that Slurm would not make.
std::string first_slurm_node(const char* variable, const std::string& list);

}  // namespace hsdp
