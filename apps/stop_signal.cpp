#include "apps/stop_signal.h"

#include <c10/util/Exception.h>

#include <atomic>

namespace apps {
namespace {

// All that a handler may touch.
std::atomic<bool> g_received{false};
static_assert(std::atomic<bool>::is_always_lock_free);

void note(int /*signal*/) { g_received.store(true, std::memory_order_relaxed); }

}  // namespace

StopSignal::StopSignal() {
  g_received = false;
  struct sigaction action {};
  action.sa_handler = note;
  // System calls that the signal interrupts go on by themselves, in code that does not expect signals.
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  TORCH_INTERNAL_ASSERT(sigaction(SIGTERM, &action, &former_term_) == 0);
  TORCH_INTERNAL_ASSERT(sigaction(SIGUSR1, &action, &former_usr1_) == 0);
}

StopSignal::~StopSignal() {
  sigaction(SIGTERM, &former_term_, nullptr);
  sigaction(SIGUSR1, &former_usr1_, nullptr);
}

bool StopSignal::received() const { return g_received.load(std::memory_order_relaxed); }

}  // namespace apps
