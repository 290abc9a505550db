#pragma once

#include <signal.h>

namespace apps {

/// Notes SIGTERM and SIGUSR1, which schedulers of clusters send some time before they kill, instead of ending by them:
/// once or many times, whichever thread they interrupt. As long as it lives; one at a time in a process.
class StopSignal {
 public:
  StopSignal();
  /// The signals do again what they did before.
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  /// Whether one has come to this process.
  bool received() const;

 private:
  struct sigaction former_term_, former_usr1_;
};

}  // namespace apps
