#include "hsdp/rank_generators.h"

#include <ATen/Context.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "dtensor/common_draws.h"
#include "dtensor/hash_bytes.h"
#include "hsdp/host.h"

namespace hsdp {
namespace {

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
  if (rank == 0) {
    // The same numbers under another name: a state begins with the seed, which the numbers to come do not depend on.
    auto named = common.clone();
    std::memcpy(named.mutable_data_ptr(), &state.mark, sizeof(state.mark));
    set_generator_state(host, named);
  }
  state.generators = std::move(generators);
  dtensor::set_common_draws(&open_common_draws);
}

std::vector<at::Generator> default_generators(c10::ArrayRef<c10::Device> devices) {
  std::vector<at::Generator> generators{host_generator()};
  const auto add = [&](const at::Generator& generator) {
    if (std::find(generators.begin(), generators.end(), generator) == generators.end()) generators.push_back(generator);
  };
  for (auto device : devices) {
    if (auto generator = generator_of(device)) add(*generator);
  }
  auto& state = parted();
  std::lock_guard lock(state.mutex);
  for (auto& one : state.generators) add(one.generator);
  return generators;
}

bool generators_are_parted() {
  auto& state = parted();
  std::lock_guard lock(state.mutex);
  return is_mark(state, host_generator().current_seed());
}

at::Tensor common_generator_state(const at::Tensor& own) {
  auto& state = parted();
  std::lock_guard lock(state.mutex);
  uint64_t seed = 0;
  std::memcpy(&seed, own.const_data_ptr(), sizeof(seed));
  return is_mark(state, seed) ? state.generators.front().common : own;
}

}  // namespace hsdp
