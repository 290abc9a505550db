// Named ranges, traces of Kineto and snapshots of memory, without a sharded model: names, nesting, files, refusals.
#include "hsdp/profiling/span.h"

#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "dtensor/error.h"
#include "hsdp/profiling.h"
#include "hsdp/profiling/memory_snapshot.h"
#include "tests/testing/expect.h"
#include "tests/testing/file_size_limit.h"
#include "tests/testing/scratch_folder.h"

namespace {

using namespace testing_support;
using dtensor::NotSupportedError;
using dtensor::StateError;
using dtensor::ValueError;
using hsdp::NamedRange;
using hsdp::Span;
using hsdp::Trace;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Strings = std::vector<std::string>;

/// Begins and ends of what a thread observes, "+name" and "-name".
Strings log;

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& range) {
  log.push_back(std::string("+") + range.name());
  return nullptr;
}
void on_end(const at::RecordFunction& range, at::ObserverContext*) { log.push_back(std::string("-") + range.name()); }

/// Observes user scopes of this thread while it lives.
class Observer {
 public:
  explicit Observer(at::RecordScope scope = at::RecordScope::USER_SCOPE) {
    log.clear();
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&on_start, &on_end).scopes({scope}));
  }
  ~Observer() { at::removeCallback(handle_); }

 private:
  at::CallbackHandle handle_;
};

// ---- spans ----

TEST(Spans, HaveTheNamesOfFsdp2) {
  const Observer observer;
  { const Span span("root_post_backward_callback"); }
  { const Span span("pre_forward", "root"); }
  { const Span span("all_gather", "blocks.3"); }
  { const Span span("all_gather_copy_out", "embedding, head"); }
  { const Span span("backward_prefetch for", "blocks.2"); }
  { const Span span("forward_prefetch for", std::string_view("blocks.12").substr(0, 8)); }
  { const NamedRange range("ProfilerStep#7"); }
  EXPECT_THAT(log, ElementsAre("+FSDP::root_post_backward_callback", "-FSDP::root_post_backward_callback",
                               "+FSDP::pre_forward", "-FSDP::pre_forward", "+FSDP::all_gather (blocks.3)",
                               "-FSDP::all_gather (blocks.3)", "+FSDP::all_gather_copy_out (embedding, head)",
                               "-FSDP::all_gather_copy_out (embedding, head)", "+FSDP::backward_prefetch for blocks.2",
                               "-FSDP::backward_prefetch for blocks.2", "+FSDP::forward_prefetch for blocks.1",
                               "-FSDP::forward_prefetch for blocks.1", "+ProfilerStep#7", "-ProfilerStep#7"));
}

TEST(Spans, NestAndEndWhenAnExceptionPasses) {
  const Observer observer;
  try {
    const NamedRange step("step");
    const Span outer("pre_forward", "a");
    const Span inner("all_gather", "a");
    throw std::runtime_error("on its way");
  } catch (const std::runtime_error&) {
    log.emplace_back("caught");
  }
  EXPECT_THAT(log, ElementsAre("+step", "+FSDP::pre_forward (a)", "+FSDP::all_gather (a)", "-FSDP::all_gather (a)",
                               "-FSDP::pre_forward (a)", "-step", "caught"));
}

TEST(Spans, AreNothingWhereNobodyObserves) {
  {
    const Observer operators_only(at::RecordScope::FUNCTION);
    const Span span("all_gather", "a");
    at::ones({1});
    EXPECT_THAT(log, ::testing::Not(::testing::Contains(HasSubstr("FSDP"))));
  }
  const Observer observer;
  {
    const at::DisableRecordFunctionGuard off;
    const Span span("all_gather", "a");
    const NamedRange range("step");
  }
  std::thread([] { const Span span("all_gather", "a"); }).join();
  EXPECT_THAT(log, IsEmpty());
}

TEST(Spans, ThatBeginBeforeSomebodyObservesStayUnseen) {
  std::optional<Span> span(std::in_place, "pre_forward", "a");
  const Observer observer;
  { const Span inner("all_gather", "a"); }
  span.reset();
  EXPECT_THAT(log, ElementsAre("+FSDP::all_gather (a)", "-FSDP::all_gather (a)"));
}

#ifdef HSDP_NVTX_RECORDER

TEST(Nvtx, ToolsSeeSpansWhileItIsOn) {
  // NVTX loads a tool at the library's first range.
  setenv("NVTX_INJECTION64_PATH", HSDP_NVTX_RECORDER, 1);
  { const Span span("all_gather", "before"); }
  EXPECT_EQ(dlopen(HSDP_NVTX_RECORDER, RTLD_NOW | RTLD_NOLOAD), nullptr);
  hsdp::set_nvtx(true);
  {
    const NamedRange step("ProfilerStep#1");
    std::optional<Span> span(std::in_place, "all_gather", "a");
    hsdp::set_nvtx(false);
    { const Span unseen("all_gather", "b"); }
    span.reset();
  }
  { const Span span("all_gather", "after"); }
  void* recorder = dlopen(HSDP_NVTX_RECORDER, RTLD_NOW | RTLD_NOLOAD);
  ASSERT_NE(recorder, nullptr);
  const auto seen = reinterpret_cast<const char* (*)()>(dlsym(recorder, "nvtx_recorder_seen"));
  ASSERT_NE(seen, nullptr);
  const std::string alone = "push ProfilerStep#1\npush FSDP::all_gather (a)\npop\npop\n";
  EXPECT_EQ(seen(), alone);
  // Beside another observer.
  hsdp::set_nvtx(true);
  const Observer observer;
  { const Span span("pre_forward", "a"); }
  hsdp::set_nvtx(false);
  EXPECT_EQ(seen(), alone + "push FSDP::pre_forward (a)\npop\n");
  EXPECT_THAT(log, ElementsAre("+FSDP::pre_forward (a)", "-FSDP::pre_forward (a)"));
}

#else

TEST(Nvtx, IsRefusedByABuildWithoutItsHeaders) {
  hsdp::set_nvtx(false);
  expect_error<NotSupportedError>([] { hsdp::set_nvtx(true); }, "[nvtx] this build of hsdp has no NVTX");
}

#endif

// ---- traces ----

nlohmann::json events_of(const std::string& path) { return nlohmann::json::parse(read_bytes(path)).at("traceEvents"); }

/// Names of ranges in the order of their beginnings.
Strings names_in(const std::string& path, const std::string& category = "user_annotation") {
  std::vector<std::pair<double, std::string>> found;
  for (const auto& event : events_of(path)) {
    if (event.value("cat", "") == category) found.emplace_back(event.at("ts"), event.at("name"));
  }
  std::sort(found.begin(), found.end());
  Strings names;
  for (const auto& [time, name] : found) names.push_back(name);
  return names;
}

TEST(Traces, HoldWhatRunsBetweenStartAndSave) {
  const ScratchFolder scratch;
  const auto path = scratch / "below/trace.json";
  Trace trace(path);
  { const Span span("all_gather", "before"); }
  EXPECT_FALSE(trace.is_started());
  trace.start();
  EXPECT_TRUE(trace.is_started());
  {
    const NamedRange step("ProfilerStep#3");
    const Span span("pre_forward", "blocks.\"0\"\n");
    at::ones({2, 3}).mul(2);
    // As threads of autograd take over what the caller is in.
    const at::ThreadLocalState state;
    std::thread([&] {
      const at::ThreadLocalStateGuard guard(state);
      const Span worker("post_backward_reduce", "worker");
    }).join();
    std::thread([] { const Span other("pre_forward", "other thread"); }).join();
  }
  trace.save();
  { const Span span("all_gather", "after"); }
  EXPECT_EQ(scratch.names(), std::set<std::string>{"below"});
  EXPECT_THAT(names_in(path),
              ElementsAre("ProfilerStep#3", "FSDP::pre_forward (blocks.'0' )", "FSDP::post_backward_reduce (worker)"));
  EXPECT_THAT(names_in(path, "cpu_op"), ::testing::Contains("aten::mul"));
  EXPECT_FALSE(nlohmann::json::parse(read_bytes(path)).contains("distributedInfo"));
}

TEST(Traces, HoldShapesAndMemoryWhereAsked) {
  const ScratchFolder scratch;
  const auto has = [&](hsdp::TraceOptions options) {
    const auto path = scratch / "trace.json";
    Trace trace(path, options);
    trace.start();
    at::ones({2, 3}).add(at::ones({3}));
    trace.save();
    bool shapes = false, memory = false;
    for (const auto& event : events_of(path)) {
      if (event.value("name", "") == "aten::add") {
        shapes = event.at("args").value("Input Dims", nlohmann::json()) == nlohmann::json::parse("[[2, 3], [3], []]");
      }
      memory = memory || event.value("name", "") == "[memory]";
    }
    return std::pair(shapes, memory);
  };
  EXPECT_EQ(has({}), std::pair(false, false));
  EXPECT_EQ(has({.record_shapes = true}), std::pair(true, false));
  EXPECT_EQ(has({.profile_memory = true}), std::pair(false, true));
}

TEST(Traces, AreDroppedUnlessSaved) {
  const ScratchFolder scratch;
  { const Trace trace(scratch / "a.json"); }
  try {
    Trace trace(scratch / "b.json");
    trace.start();
    const Span span("pre_forward", "a");
    throw std::runtime_error("on its way");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(scratch.names(), std::set<std::string>{});
  const Observer observer;
  EXPECT_THAT(log, IsEmpty());
  Trace trace(scratch / "c.json");
  trace.start();
  { const Span span("pre_forward", "c"); }
  trace.save();
  EXPECT_THAT(names_in(scratch / "c.json"), ElementsAre("FSDP::pre_forward (c)"));
}

TEST(Traces, AreOneAtATimeAndInOrder) {
  const ScratchFolder scratch;
  const auto a = scratch / "a.json";
  Trace trace(a);
  expect_error<StateError>([&] { trace.save(); }, "[trace] " + a + " is saved before its start");
  expect_error<StateError>(
      [&] { Trace(scratch / "b.json"); },
      "[trace] " + (scratch / "b.json") + " while another trace is recorded, expected one at a time");
  std::thread([&] {
    expect_error<StateError>([&] { trace.start(); }, "[trace] " + a + " is started a second time or on another thread");
    expect_error<StateError>([&] { Trace(scratch / "b.json"); }, "while another trace is recorded");
  }).join();
  trace.start();
  expect_error<StateError>([&] { trace.start(); }, "[trace] " + a + " is started a second time");
  std::thread([&] { expect_error<StateError>([&] { trace.save(); }, "or on another thread"); }).join();
  trace.save();
  expect_error<StateError>([&] { trace.save(); }, "[trace] " + a + " is saved before its start, a second time");
  expect_error<StateError>([&] { trace.start(); }, "[trace] " + a + " is started a second time");
  // One that is saved is in nobody's way while it lives.
  Trace next(scratch / "b.json");
  next.start();
  next.save();
  EXPECT_EQ(scratch.names(), (std::set<std::string>{"a.json", "b.json"}));
}

TEST(Traces, AreRefusedBesideAProfilerOfLibtorch) {
  using namespace torch::profiler::impl;
  namespace profiler = torch::autograd::profiler;
  const ScratchFolder scratch;
  const ProfilerConfig config(ProfilerState::KINETO);
  profiler::prepareProfiler(config, {ActivityType::CPU});
  profiler::enableProfiler(config, {ActivityType::CPU});
  const auto refused = [&] {
    expect_error<StateError>(
        [&] { Trace(scratch / "a.json"); },
        "[trace] " + (scratch / "a.json") + " while a profiler of libtorch is at work, expected none; stop it first");
  };
  refused();
  std::thread(refused).join();
  profiler::disableProfiler();
  Trace trace(scratch / "a.json");
  trace.start();
  trace.save();
}

TEST(Traces, PathsThatCannotBeWrittenAreRefusedAtTheBeginning) {
  const ScratchFolder scratch;
  write_bytes(scratch / "file", "text");
  const auto refused = [&](const std::string& path, const std::string& text) {
    expect_error<ValueError>([&] { Trace::check_path(path); }, text);
    expect_error<ValueError>([&] { Trace trace(path); }, text);
  };
  refused("", "[trace] the path '', expected one of a JSON file, such as trace.json");
  refused(scratch / "trace.json.gz", "expected one of a JSON file, such as trace.json; viewers read what gzip makes");
  refused(scratch / "file/trace.json", "[trace] " + (scratch / "file") + " cannot be made: Not a directory");
  refused(scratch.path(), "[trace] " + scratch.path() + " cannot be replaced: Is a directory");
  Trace::check_path(scratch / "file");
  EXPECT_EQ(read_bytes(scratch / "file"), "text");
  EXPECT_EQ(scratch.names(), std::set<std::string>{"file"});
  // What was refused is in nobody's way.
  Trace(scratch / "trace.json");
}

TEST(Traces, AFullDiskLeavesTheFormerFile) {
  const ScratchFolder scratch;
  const auto path = scratch / "trace.json";
  const auto save = [&](const std::function<void(Trace&)>& how) {
    Trace trace(path);
    trace.start();
    for (int i = 0; i < 100; ++i) at::ones({1});
    how(trace);
  };
  save([](Trace& trace) { trace.save(); });
  const auto size = std::filesystem::file_size(path);
  write_bytes(path, "former");
  // Kineto notices a full disk, except in what it writes last. Traces of the same differ by the digits of their times.
  for (const auto room : {size / 2, size - 1000}) {
    save([&](Trace& trace) {
      const FileSizeLimit full(room);
      expect_error<ValueError>(
          [&] { trace.save(); },
          "[trace] " + path + " cannot be written, expected a path in a folder that can be written");
    });
    EXPECT_EQ(read_bytes(path), "former");
    EXPECT_EQ(scratch.names(), std::set<std::string>{"trace.json"});
  }
  save([&](Trace& trace) {
    std::filesystem::remove_all(scratch.path());
    expect_error<ValueError>([&] { trace.save(); }, "[trace] " + path + " cannot be written, expected a path");
  });
}

// ---- snapshots ----

/// An allocator that runs out of memory when told.
struct FakeSource final : hsdp::memory_snapshot::Source {
  void record_history(size_t) override {}
  void stop_history() override {}
  bool is_recording() override { return true; }
  std::string snapshot() override {
    ++snapshots;
    if (snapshots == failing) throw std::runtime_error("it will not be drawn");
    if (snapshots == reentering) observer(c10::Device("meta"), 1);
    return "snapshot " + std::to_string(snapshots) + std::string(large ? 10000 : 0, '.');
  }
  void observe_out_of_memory(hsdp::memory_snapshot::OutOfMemoryObserver added) override { observer = std::move(added); }

  /// What the program says.
  std::string run_out(size_t bytes) {
    ::testing::internal::CaptureStderr();
    observer(c10::Device("meta"), bytes);
    return ::testing::internal::GetCapturedStderr();
  }

  hsdp::memory_snapshot::OutOfMemoryObserver observer;
  int snapshots = 0, failing = 0, reentering = 0;
  bool large = false;
};

TEST(Snapshots, AreWrittenWhenMemoryRunsOut) {
  const ScratchFolder scratch;
  const auto file = scratch / "a/rank3_memory_snapshot.pickle";
  FakeSource source;
  {
    hsdp::memory_snapshot::OutOfMemorySnapshots snapshots(source);
    EXPECT_EQ(source.run_out(7), "");
    snapshots.set_folder(scratch / "a", 3);
    EXPECT_EQ(source.snapshots, 0);
    EXPECT_EQ(scratch.names(), std::set<std::string>{"a"});
    EXPECT_EQ(source.run_out(1024), "hsdp: out of memory on meta, 1024 bytes asked for; snapshot in " + file + "\n");
    EXPECT_EQ(read_bytes(file), "snapshot 1");
    // A failure of its own is told, and what was there stays.
    source.failing = 2;
    EXPECT_EQ(source.run_out(2), "hsdp: out of memory on meta, 2 bytes asked for; no snapshot: it will not be drawn\n");
    EXPECT_EQ(read_bytes(file), "snapshot 1");
    source.reentering = 3;
    EXPECT_EQ(source.run_out(2), "hsdp: out of memory on meta, 2 bytes asked for; snapshot in " + file + "\n");
    EXPECT_EQ(read_bytes(file), "snapshot 3");
    {
      const FileSizeLimit full(4096);
      source.large = true;
      EXPECT_THAT(source.run_out(2), HasSubstr("no snapshot: [memory snapshot] " + file + " cannot be written"));
    }
    EXPECT_EQ(read_bytes(file), "snapshot 3");
    expect_error<ValueError>([&] { snapshots.set_folder(file, 3); }, "[memory snapshot] " + file + " cannot be made");
    source.large = false;
    EXPECT_NE(source.run_out(2), "");
    EXPECT_EQ(read_bytes(file), "snapshot 5");
    snapshots.set_folder("", 3);
    EXPECT_EQ(source.run_out(2), "");
    snapshots.set_folder(scratch / "a", 4);
  }
  EXPECT_EQ(source.run_out(2), "") << "gone";
  EXPECT_EQ(source.snapshots, 5);
}

TEST(Snapshots, OfTheHostAreRefused) {
  const c10::Device host(c10::kCPU);
  const std::string text = "[memory snapshot] of cpu, expected a device whose allocator keeps a history";
  const ScratchFolder scratch;
  expect_error<NotSupportedError>([&] { hsdp::record_memory_history(host); }, text);
  expect_error<NotSupportedError>([&] { hsdp::stop_memory_history(host); }, text);
  expect_error<NotSupportedError>([&] { hsdp::save_memory_snapshot(host, scratch / "x/a.pickle"); }, text);
  expect_error<NotSupportedError>([&] { hsdp::save_memory_snapshot_when_out_of_memory(host, scratch / "x"); }, text);
  EXPECT_EQ(scratch.names(), std::set<std::string>{});
}

}  // namespace
