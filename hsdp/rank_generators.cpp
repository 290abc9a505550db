#include "hsdp/rank_generators.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "dtensor/common_draws.h"
#include "dtensor/error.h"
#include "dtensor/hash_bytes.h"
#include "hsdp/host.h"

namespace hsdp {
namespace {

using dtensor::raise;
using dtensor::ValueError;

constexpr auto kHostName = "host";
constexpr auto kDevicePrefix = "device.", kCommonPrefix = "common.", kMarkPrefix = "mark.";

void set_seed(at::Generator& generator, uint64_t seed) {
  std::lock_guard lock(generator.mutex());
  generator.set_current_seed(seed);
}

// splitmix64
uint64_t mixed(uint64_t value, uint64_t with) {
  value += with * 0x9e3779b97f4a7c15ull;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

// A state of the host's generator begins with the seed, which the numbers to come do not depend on.
uint64_t seed_in(const at::Tensor& state) {
  uint64_t seed = 0;
  std::memcpy(&seed, state.const_data_ptr(), sizeof(seed));
  return seed;
}

// The same numbers under another name.
at::Tensor with_seed(const at::Tensor& state, uint64_t seed) {
  auto named = state.clone();
  std::memcpy(named.mutable_data_ptr(), &seed, sizeof(seed));
  return named;
}

// A device whose operators draw on the host has no generator of its own, and says so by an error.
std::optional<at::Generator> generator_of(c10::Device device) {
  if (device.type() == kHost) return std::nullopt;
  try {
    return at::globalContext().defaultGenerator(device);
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

struct Parted {
  struct One {
    at::Generator generator;
    at::Tensor common;
    uint64_t own_seed = 0;  // since the parting; a program's seed is another
  };
  std::mutex mutex;
  uint64_t mark = 0;            // seed of the host's generator since; torch::manual_seed sets another
  std::vector<One> generators;  // the host's first; none before the first parting
};

Parted& parted() {
  static auto* instance = new Parted;
  return *instance;
}

bool is_mark(const Parted& state, uint64_t seed) { return !state.generators.empty() && seed == state.mark; }

/// Puts the common states in place of the ranks' own for as long as it lives.
class CommonDraws {
 public:
  CommonDraws() : lock_(parted().mutex) {
    for (auto& one : parted().generators) {
      own_.push_back(generator_state(one.generator));
      set_generator_state(one.generator, one.common);
    }
  }
  ~CommonDraws() {
    for (size_t i = 0; i < own_.size(); ++i) {
      auto& one = parted().generators[i];
      one.common = generator_state(one.generator);
      set_generator_state(one.generator, own_[i]);
    }
  }
  CommonDraws(const CommonDraws&) = delete;
  CommonDraws& operator=(const CommonDraws&) = delete;

 private:
  std::lock_guard<std::mutex> lock_;
  std::vector<at::Tensor> own_;
};

std::shared_ptr<void> open_common_draws() {
  if (!generators_are_parted()) return nullptr;
  return std::make_shared<CommonDraws>();
}

// default_generators under the lock of `state`.
std::vector<at::Generator> known_generators(const Parted& state, c10::ArrayRef<c10::Device> devices) {
  std::vector<at::Generator> generators{host_generator()};
  const auto add = [&](const at::Generator& generator) {
    if (std::find(generators.begin(), generators.end(), generator) == generators.end()) generators.push_back(generator);
  };
  for (auto device : devices) {
    if (auto generator = generator_of(device)) add(*generator);
  }
  for (auto& one : state.generators) add(one.generator);
  return generators;
}

struct NamedGenerator {
  std::string name;
  at::Generator generator;
};

std::vector<NamedGenerator> named_generators(const Parted& state, c10::ArrayRef<c10::Device> devices) {
  std::vector<NamedGenerator> named;
  for (auto& generator : known_generators(state, devices)) {
    const auto type = c10::DeviceTypeName(generator.device().type(), /*lower_case=*/true);
    named.push_back({named.empty() ? kHostName : c10::str(kDevicePrefix, type, ".", named.size() - 1), generator});
  }
  return named;
}

const Parted::One* find(const Parted& state, const at::Generator& generator) {
  for (auto& one : state.generators) {
    if (one.generator == generator) return &one;
  }
  return nullptr;
}

/// What was captured of one generator. `common` and `mark` go together.
struct CapturedGenerator {
  at::Tensor own, common;
  std::optional<uint64_t> mark;
};

/// By the generator's name. Throws for names that capture_generators does not give, and for incomplete ones.
std::map<std::string, CapturedGenerator> captured_generators(const char* where, const GeneratorStates& states) {
  std::map<std::string, CapturedGenerator> captured;
  std::map<std::string, at::Tensor> marks;
  for (const auto& [label, tensor] : states) {
    auto name = label;
    const auto take = [&](const std::string& prefix) {
      if (!name.starts_with(prefix)) return false;
      name.erase(0, prefix.size());
      return true;
    };
    const bool is_common = take(kCommonPrefix), is_mark = !is_common && take(kMarkPrefix);
    if (name != kHostName && !name.starts_with(kDevicePrefix)) {
      raise<ValueError>(where, "generator state \"", label,
                        "\", expected one of \"host\" and \"device.<type>.<number>\", ",
                        "which common. or mark. may precede");
    }
    auto& place = is_mark ? marks[name] : is_common ? captured[name].common : captured[name].own;
    if (place.defined()) raise<ValueError>(where, "generator state \"", label, "\" is there twice, expected it once");
    const auto dtype = is_mark ? at::kLong : at::kByte;
    if (tensor.scalar_type() != dtype || tensor.dim() != 1 || (is_mark && tensor.numel() != 1) ||
        tensor.device().type() != kHost) {
      raise<ValueError>(where, "generator state \"", label, "\" has dtype ", tensor.scalar_type(), " and sizes ",
                        tensor.sizes(), ", expected ", is_mark ? "one " : "a list of ", dtype, " on the host");
    }
    place = tensor.contiguous();
    if (is_mark) captured[name].mark = static_cast<uint64_t>(*place.const_data_ptr<int64_t>());
  }
  for (const auto& [name, one] : captured) {
    if (one.own.defined() && one.common.defined() == one.mark.has_value()) continue;
    raise<ValueError>(where, "generator \"", name, "\" has ", one.own.defined() ? "a" : "no", " state, ",
                      one.common.defined() ? "a" : "no", " common one and ", one.mark ? "a" : "no",
                      " mark, expected a state, and a mark where there is a common one");
  }
  const auto host = captured.find(kHostName);
  if (host == captured.end()) raise<ValueError>(where, "no generator state \"host\", expected it");
  for (const auto& [name, one] : captured) {
    if (!one.common.defined() || host->second.common.defined()) continue;
    raise<ValueError>(where, "generator \"", name,
                      "\" has a common state and \"host\" has none, expected both to be parted");
  }
  return captured;
}

void check_sizes(const char* where, const std::vector<NamedGenerator>& generators,
                 const std::map<std::string, CapturedGenerator>& captured) {
  for (const auto& [name, generator] : generators) {
    const auto found = captured.find(name);
    if (found == captured.end()) continue;
    const auto sizes = generator_state(generator).sizes().vec();
    for (const auto& tensor : {found->second.own, found->second.common}) {
      if (!tensor.defined() || tensor.sizes() == sizes) continue;
      raise<ValueError>(where, "generator \"", name, "\" comes with a state of sizes ", tensor.sizes(), ", expected ",
                        c10::IntArrayRef(sizes));
    }
  }
}

uint64_t seed_from(const at::Tensor& state, const std::string& name, int64_t rank) {
  const auto hash = dtensor::hash_bytes(state.const_data_ptr(), state.nbytes());
  return mixed(dtensor::hash_bytes(name.data(), name.size(), hash), static_cast<uint64_t>(rank) + 1);
}

/// What a generator is to become: `own`, unless that is undefined, and then seeded, where a seed is given. It is parted
/// where it has a common state, by `mark` or else by the seed that it ends with.
struct NextGenerator {
  at::Generator generator;
  at::Tensor own, common;
  std::optional<uint64_t> seed, mark;
};

NextGenerator newly_seeded(const Parted& state, const NamedGenerator& named, uint64_t seed) {
  const auto* known = find(state, named.generator);
  return {named.generator, {}, known != nullptr ? known->common : generator_state(named.generator), seed, {}};
}

/// All or nothing, under the lock of `state`. The host's comes first.
void set_generators(const char* where, Parted& state, const std::vector<NextGenerator>& next) {
  std::vector<at::Tensor> former;
  for (auto& one : next) former.push_back(generator_state(one.generator));
  std::vector<Parted::One> generators;
  uint64_t mark = 0;
  try {
    for (auto one : next) {
      // All of them, to see on all ranks alike that they are states.
      if (one.common.defined()) set_generator_state(one.generator, one.common);
      if (one.own.defined()) set_generator_state(one.generator, one.own);
      if (one.seed) set_seed(one.generator, *one.seed);
      if (!one.common.defined()) continue;
      const auto seed = one.mark.value_or(one.generator.current_seed());
      const bool is_host = generators.empty();
      if (is_host) mark = seed;
      generators.push_back({one.generator, one.common.clone(), is_host ? 0 : seed});
    }
  } catch (const c10::Error& error) {
    for (size_t i = 0; i < next.size(); ++i) set_generator_state(next[i].generator, former[i]);
    raise<ValueError>(where, "a generator refuses its state: ", error.what_without_backtrace(),
                      ", expected what capture_generators gave");
  }
  state.mark = mark;
  state.generators = std::move(generators);
  if (!state.generators.empty()) dtensor::set_common_draws(&open_common_draws);
}

}  // namespace

void part_generators(int64_t rank, c10::Device device) {
  auto& state = parted();
  std::lock_guard lock(state.mutex);
  std::vector<Parted::One> generators;
  auto host = host_generator();
  generators.push_back({host, generator_state(host), 0});
  if (auto generator = generator_of(device)) {
    Parted::One one{*generator, generator_state(*generator),
                    mixed(generator->current_seed(), static_cast<uint64_t>(rank) + 1)};
    // Parted before and not seeded since: what it stands at is this rank's own.
    for (auto& known : state.generators) {
      if (known.generator == *generator && known.own_seed == generator->current_seed()) one.common = known.common;
    }
    set_seed(*generator, one.own_seed);
    generators.push_back(std::move(one));
  }
  const auto& common = generators.front().common;
  state.mark = mixed(dtensor::hash_bytes(common.const_data_ptr(), common.nbytes()), static_cast<uint64_t>(rank) + 1);
  set_seed(host, state.mark);
  if (rank == 0) set_generator_state(host, with_seed(common, state.mark));
  state.generators = std::move(generators);
  dtensor::set_common_draws(&open_common_draws);
}

std::vector<at::Generator> default_generators(c10::ArrayRef<c10::Device> devices) {
  auto& state = parted();
  std::lock_guard lock(state.mutex);
  return known_generators(state, devices);
}

bool generators_are_parted() {
  auto& state = parted();
  std::lock_guard lock(state.mutex);
  return is_mark(state, host_generator().current_seed());
}

at::Tensor common_generator_state(const at::Tensor& own) {
  auto& state = parted();
  std::lock_guard lock(state.mutex);
  return is_mark(state, seed_in(own)) ? state.generators.front().common : own;
}

GeneratorStates capture_generators(c10::ArrayRef<c10::Device> devices) {
  auto& state = parted();
  std::lock_guard lock(state.mutex);
  GeneratorStates states;
  for (const auto& [name, generator] : named_generators(state, devices)) {
    states.emplace_back(name, generator_state(generator));
    const auto* one = find(state, generator);
    if (one == nullptr) continue;
    states.emplace_back(kCommonPrefix + name, one->common.clone());
    const auto mark = name == kHostName ? state.mark : one->own_seed;
    states.emplace_back(kMarkPrefix + name,
                        at::full({1}, static_cast<int64_t>(mark), at::TensorOptions(kHost).dtype(at::kLong)));
  }
  return states;
}

void restore_generators(const GeneratorStates& states, c10::ArrayRef<c10::Device> devices) {
  constexpr auto kWhere = "restore_generators";
  const auto captured = captured_generators(kWhere, states);
  const auto& host = captured.at(kHostName);
  auto& state = parted();
  std::lock_guard lock(state.mutex);
  const auto generators = named_generators(state, devices);
  check_sizes(kWhere, generators, captured);
  std::vector<NextGenerator> next;
  for (const auto& named : generators) {
    if (const auto found = captured.find(named.name); found != captured.end()) {
      const auto& one = found->second;
      next.push_back({named.generator, one.own, one.common, {}, one.mark});
    } else if (host.common.defined()) {
      // Of a run on another device. The host's own state is another one on each rank.
      next.push_back(newly_seeded(state, named, seed_from(host.own, named.name, 0)));
    }
  }
  set_generators(kWhere, state, next);
}

void reseed_generators(const GeneratorStates& rank_0_states, int64_t rank, c10::ArrayRef<c10::Device> devices) {
  constexpr auto kWhere = "reseed_generators";
  const auto captured = captured_generators(kWhere, rank_0_states);
  const auto& host = captured.at(kHostName);
  auto& state = parted();
  std::lock_guard lock(state.mutex);
  const auto generators = named_generators(state, devices);
  check_sizes(kWhere, generators, captured);
  // Where they were not, or the program has seeded since, they part now, as in part_generators.
  const bool were_parted = host.mark && *host.mark == seed_in(host.own);
  std::vector<NextGenerator> next;
  for (const auto& named : generators) {
    const auto found = captured.find(named.name);
    if (found == captured.end()) {
      next.push_back(newly_seeded(state, named, seed_from(host.own, named.name, rank)));
      continue;
    }
    const auto& one = found->second;
    const auto seed = seed_from(one.own, named.name, rank);
    NextGenerator result{named.generator, one.own, were_parted && one.common.defined() ? one.common : one.own, {}, {}};
    if (rank > 0) {
      result.seed = seed;
    } else if (named.name == kHostName && !were_parted) {
      result.own = with_seed(one.own, seed);
    }
    next.push_back(std::move(result));
  }
  set_generators(kWhere, state, next);
}

}  // namespace hsdp
