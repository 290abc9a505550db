#include "apps/stop_signal.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <unistd.h>

#include <csignal>
#include <ctime>
#include <thread>

namespace apps {
namespace stop_signal_test {

TEST(StopSignal, IsNotedAndEndsNothingHoweverOftenItComes) {
  for (const int number : {SIGTERM, SIGUSR1}) {
    const StopSignal stop;
    EXPECT_FALSE(stop.received());
    for (int i = 0; i < 100; ++i) raise(number);
    EXPECT_TRUE(stop.received());
  }
}

TEST(StopSignal, InterruptsNoReadInAnyThread) {
  const StopSignal stop;
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  char byte = 0;
  ssize_t count = 0;
  std::thread reader([&] { count = read(ends[0], &byte, 1); });
  while (!stop.received()) pthread_kill(reader.native_handle(), SIGTERM);
  // It has the time to be in the call.
  for (int i = 0; i < 20; ++i) {
    const timespec pause{.tv_sec = 0, .tv_nsec = 1'000'000};
    nanosleep(&pause, nullptr);
    pthread_kill(reader.native_handle(), SIGUSR1);
  }
  ASSERT_EQ(write(ends[1], "x", 1), 1);
  reader.join();
  EXPECT_EQ(count, 1);
  EXPECT_EQ(byte, 'x');
  close(ends[0]);
  close(ends[1]);
}

TEST(StopSignal, DoesAgainWhatItDidBefore) {
  struct sigaction ignored {}, now {};
  ignored.sa_handler = SIG_IGN;
  struct sigaction former {};
  ASSERT_EQ(sigaction(SIGUSR1, &ignored, &former), 0);
  {
    const StopSignal stop;
    raise(SIGUSR1);
    EXPECT_TRUE(stop.received());
  }
  ASSERT_EQ(sigaction(SIGUSR1, nullptr, &now), 0);
  EXPECT_EQ(now.sa_handler, SIG_IGN);
  ASSERT_EQ(sigaction(SIGTERM, nullptr, &now), 0);
  EXPECT_EQ(now.sa_handler, SIG_DFL);
  ASSERT_EQ(sigaction(SIGUSR1, &former, nullptr), 0);
  // Another one knows nothing of the signals of the first.
  EXPECT_FALSE(StopSignal().received());
}

}  // namespace stop_signal_test
}  // namespace apps
