// Plants one mistake into an unchanged program, to see that a regression case fails because of it:
//   HSDP_MISTAKE=scale_gradients LD_PRELOAD=build/release/tests/libhsdp_mistakes.so hsdp_train --config ...
// Functions of libhsdp.so that are called through its dynamic symbols are taken over here; those under them do the
// work. A name that is not known ends the program at once, and a program into which nothing was planted ends with an
// error. Programs that do not use libhsdp.so themselves, such as a launcher in between, are left alone.
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dtensor/communicator.h"
#include "hsdp/kernels/gradient_kernels.h"
#include "hsdp/storage_memory.h"
#include "hsdp/transport.h"
#include "hsdp/unit.h"

namespace {

enum class Mistake {
  none,
  /// Reduced gradients are 0.1 % too large. Not in bfloat16, which has no such number.
  scale_gradients,
  /// In every step one unit's gradients are not reduced: each rank keeps its own.
  skip_reduce_scatter,
  /// Where shards are uneven the padding of gradients lies before the elements instead of behind them.
  drop_padding,
  /// What is gathered has the parts of ranks 0 and 1 exchanged.
  swap_shards,
  /// The memory of one unit is never given back: one more of it is alive each time that the unit is freed.
  leak_unit,
};

const std::map<std::string, Mistake> kMistakes = {{"scale_gradients", Mistake::scale_gradients},
                                                  {"skip_reduce_scatter", Mistake::skip_reduce_scatter},
                                                  {"drop_padding", Mistake::drop_padding},
                                                  {"swap_shards", Mistake::swap_shards},
                                                  {"leak_unit", Mistake::leak_unit}};
constexpr int kWrongName = 64, kNothingPlanted = 65;

/// Whether the program itself was linked with the library, rather than having it through this one.
bool uses_hsdp() {
  void* program = dlopen(nullptr, RTLD_LAZY);
  link_map* map = nullptr;
  if (program == nullptr || dlinfo(program, RTLD_DI_LINKMAP, &map) != 0) return true;
  const char* names = nullptr;
  for (const auto* entry = map->l_ld; entry->d_tag != DT_NULL; ++entry) {
    if (entry->d_tag == DT_STRTAB) names = reinterpret_cast<const char*>(entry->d_un.d_ptr);
  }
  for (const auto* entry = map->l_ld; names != nullptr && entry->d_tag != DT_NULL; ++entry) {
    if (entry->d_tag == DT_NEEDED && std::string_view(names + entry->d_un.d_val).starts_with("libhsdp.so")) return true;
  }
  return false;
}

class Plan {
 public:
  Plan() {
    if (!uses_hsdp()) return;
    const char* name = std::getenv("HSDP_MISTAKE");
    const auto found = kMistakes.find(name == nullptr ? "" : name);
    if (found == kMistakes.end()) {
      std::string names;
      for (const auto& [known, mistake] : kMistakes) names += (names.empty() ? "" : ", ") + known;
      std::cerr << "[mistakes] HSDP_MISTAKE is '" << (name == nullptr ? "" : name) << "', expected one of " << names
                << std::endl;
      _exit(kWrongName);
    }
    mistake_ = found->second;
    name_ = found->first;
    std::atexit([] { instance().check(); });
  }

  static Plan& instance() {
    // Never freed: it is asked at exit.
    static auto* const plan = new Plan;
    return *plan;
  }

  /// Whether this mistake is to be made.
  bool is(Mistake mistake) const { return mistake_ == mistake; }
  /// It was.
  void note() { planted_ = true; }

 private:
  void check() const {
    if (planted_) return;
    std::cerr << "[mistakes] " << name_ << " was not planted: the program never came where it could be; expected "
              << "training on several ranks" << (is(Mistake::drop_padding) ? " with uneven shards" : "") << std::endl;
    std::fflush(nullptr);
    _exit(kNothingPlanted);
  }

  Mistake mistake_ = Mistake::none;
  std::string name_;
  std::atomic<bool> planted_{false};
};

// Before main, so that a wrong name is told before anything happens.
const Plan& plan_at_start = Plan::instance();

/// The library's own function under the one that is called.
template <class Function>
Function* next(const char* mangled) {
  auto* function = dlsym(RTLD_NEXT, mangled);
  if (function == nullptr) {
    std::cerr << "[mistakes] libhsdp.so has no " << mangled << ", expected the function that is taken over"
              << std::endl;
    _exit(kNothingPlanted);
  }
  return reinterpret_cast<Function*>(function);
}

/// Does something more once a collective is done.
class WorkAndMore final : public dtensor::Work {
 public:
  WorkAndMore(std::shared_ptr<dtensor::Work> work, std::function<void()> more)
      : work_(std::move(work)), more_(std::move(more)) {}
  void wait() override {
    work_->wait();
    if (const auto more = std::exchange(more_, nullptr)) more();
  }
  bool is_completed() override { return work_->is_completed(); }

 private:
  std::shared_ptr<dtensor::Work> work_;
  std::function<void()> more_;
};

class FaultyTransport final : public hsdp::Transport {
 public:
  explicit FaultyTransport(std::shared_ptr<hsdp::Transport> transport) : transport_(std::move(transport)) {}

  std::shared_ptr<dtensor::Work> all_gather(c10::ArrayRef<hsdp::TensorPair> pairs,
                                            dtensor::OperationName name) override {
    auto work = transport_->all_gather(pairs, name);
    if (!plan().is(Mistake::swap_shards)) return work;
    return std::make_shared<WorkAndMore>(std::move(work), [pairs = pairs.vec()] {
      for (const auto& [full, shard] : pairs) {
        const auto length = shard.numel();
        const auto first = full.narrow(0, 0, length), second = full.narrow(0, length, length);
        const auto former = first.clone();
        first.copy_(second);
        second.copy_(former);
      }
      plan().note();
    });
  }

  std::shared_ptr<dtensor::Work> reduce_scatter(c10::ArrayRef<hsdp::TensorPair> pairs,
                                                dtensor::OperationName name) override {
    if (plan().is(Mistake::skip_reduce_scatter)) {
      if (skipped_.empty()) skipped_ = name.subject;
      if (name.subject == skipped_) {
        const auto rank = communicator().rank();
        for (const auto& [full, shard] : pairs) {
          shard.copy_(full.narrow(0, rank * shard.numel(), shard.numel()));
        }
        plan().note();
        return std::make_shared<Done>();
      }
    }
    auto work = transport_->reduce_scatter(pairs, name);
    if (!plan().is(Mistake::scale_gradients)) return work;
    return std::make_shared<WorkAndMore>(std::move(work), [pairs = pairs.vec()] {
      for (const auto& pair : pairs) pair.shard.mul_(1.001);
      plan().note();
    });
  }

  bool packs() const override { return transport_->packs(); }
  dtensor::Communicator& communicator() const override { return transport_->communicator(); }

 private:
  struct Done final : dtensor::Work {
    void wait() override {}
    bool is_completed() override { return true; }
  };

  static Plan& plan() { return Plan::instance(); }

  std::shared_ptr<hsdp::Transport> transport_;
  std::string skipped_;  // the unit that comes first in backward
};

// While the leaking unit is freed: where its memory goes.
thread_local std::vector<c10::DataPtr>* leaked = nullptr;

}  // namespace

namespace hsdp {

std::shared_ptr<Transport> make_transport(std::shared_ptr<dtensor::Communicator> communicator) {
  static auto* const real =
      next<decltype(make_transport)>("_ZN4hsdp14make_transportESt10shared_ptrIN7dtensor12CommunicatorEE");
  auto transport = real(std::move(communicator));
  if (transport->communicator().size() == 1) return transport;
  return std::make_shared<FaultyTransport>(std::move(transport));
}

void kernels::pack_gradients(c10::ArrayRef<Packing> packings, double divisor) {
  static auto* const real =
      next<decltype(kernels::pack_gradients)>("_ZN4hsdp7kernels14pack_gradientsEN3c108ArrayRefINS0_7PackingEEEd");
  real(packings, divisor);
  for (const auto& [whole, rows] : packings) {
    const auto padding = rows.numel() - whole.numel();
    if (!Plan::instance().is(Mistake::drop_padding) || padding == 0) continue;
    rows.copy_(rows.reshape({-1}).roll(padding).view(rows.sizes()));
    Plan::instance().note();
  }
}

void free_memory(const at::Tensor& tensor) {
  static auto* const real = next<decltype(free_memory)>("_ZN4hsdp11free_memoryERKN2at6TensorE");
  if (leaked != nullptr) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    leaked->push_back(storage->set_data_ptr(c10::DataPtr(nullptr, storage->device())));
  }
  real(tensor);
}

void Unit::reshard() {
  static auto* const real = next<void(Unit*)>("_ZN4hsdp4Unit7reshardEv");
  static const Unit* leaking = nullptr;
  static auto* const memory = new std::vector<c10::DataPtr>;
  if (!Plan::instance().is(Mistake::leak_unit) || !is_gathered()) return real(this);
  if (leaking == nullptr) leaking = this;
  if (leaking != this) return real(this);
  leaked = memory;
  real(this);
  leaked = nullptr;
  Plan::instance().note();
}

}  // namespace hsdp
