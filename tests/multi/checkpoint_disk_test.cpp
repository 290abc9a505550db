// Disks that are full or fail, and paths that cannot be written: every rank throws the same ValueError, no checkpoint
// appears, one that was there is as it was, and the next save works.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <ostream>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "hsdp/hsdp.h"
#include "tests/testing/checkpointed_training.h"
#include "tests/testing/damaged_checkpoint.h"
#include "tests/testing/disk_calls.h"
#include "tests/testing/file_size_limit.h"
#include "tests/testing/multi_process.h"

namespace {

namespace fs = std::filesystem;
using namespace testing_support;

using Names = std::set<std::string>;

constexpr uint64_t kSeed = 7, kOtherSeed = 9;

enum class Mode { sync, async };

void save(Mode mode, const hsdp::TrainingState& state, const std::string& path) {
  if (mode == Mode::sync) return hsdp::save(state, path);
  auto pending = hsdp::save_async(state, path);
  try {
    pending.wait();
  } catch (...) {
    EXPECT_FALSE(pending.pending());
    throw;
  }
}

Names names_in(const std::string& folder) {
  Names names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename().string());
  return names;
}

/// A collective: no rank changes anything while another looks.
void expect_contents(RankContext& context, const std::string& folder,
                     const std::map<std::string, std::string>& expected) {
  context.environment().barrier("before looking");
  EXPECT_TRUE(contents(folder) == expected) << folder;
  context.environment().barrier("after looking");
}

void expect_loads(RankContext& context, const std::string& path, CheckpointedTraining& expected) {
  CheckpointedTraining fresh(context, kOtherSeed);
  hsdp::load(fresh.state, path);
  expect_same_values(fresh.run.values(), expected.run.values());
  EXPECT_EQ(fresh.state.progress, expected.state.progress);
  hsdp::verify_files("test", path, hsdp::read_manifest("test", path), /*checksums=*/true);
}

// ---- full ----

// How the save goes, which rank has no room (-1: none has), and after how many bytes of a file.
using Full = std::tuple<Mode, int, rlim_t>;

class FullDisk : public ::testing::TestWithParam<Full> {};

TEST_P(FullDisk, LeavesWhatWasThere) {
  on_two_ranks([](RankContext& context) {
    const auto [mode, full, bytes] = GetParam();
    const auto folder = context.directory() + "/run";
    CheckpointedTraining first(context, kSeed, 2), second(context, kSeed, 3);
    save(mode, first.state, folder + "/step-2");
    context.environment().barrier("saved");
    const auto before = contents(folder);
    {
      std::optional<FileSizeLimit> limit;
      if (full < 0 || full == context.rank()) limit.emplace(bytes);
      for (const auto* name : {"/step-3", "/step-2"}) {
        const auto text = value_error_of(context, [&] { save(mode, second.state, folder + name); });
        expect_parts(text, {"[save] " + folder + name + ".writing/", " cannot be written: File too large, expected ",
                            "with room for the whole file"});
        expect_contents(context, folder, before);
      }
    }
    expect_loads(context, folder + "/step-2", first);
    save(mode, second.state, folder + "/step-2");
    save(mode, second.state, folder + "/step-3");
    expect_loads(context, folder + "/step-2", second);
    expect_loads(context, folder + "/step-3", second);
    EXPECT_EQ(names_in(folder), (Names{"step-2", "step-3"}));
  });
}

std::string name_of_full(const ::testing::TestParamInfo<Full>& info) {
  const auto [mode, full, bytes] = info.param;
  return std::string(mode == Mode::sync ? "Sync" : "Async") + (full < 0 ? "AllRanks" : "Rank" + std::to_string(full)) +
         "Bytes" + std::to_string(bytes);
}
// No byte, some tensors, and all but the largest file.
INSTANTIATE_TEST_SUITE_P(Limits, FullDisk,
                         ::testing::Combine(::testing::Values(Mode::sync, Mode::async), ::testing::Values(0, 1, -1),
                                            ::testing::Values(0, 1500, 8000)),
                         name_of_full);

// ---- failing at any step ----

// How the save goes, which rank's disk fails, and whether a checkpoint of the same name is there.
using Failing = std::tuple<Mode, int, bool>;

class FailingDisk : public ::testing::TestWithParam<Failing> {};

/// Saves while call number `step` to this process's disk fails. Returns the error's text, none where the save went
/// well, and which call it was, none where there are not so many.
std::pair<std::string, std::string> save_with_failure(const hsdp::TrainingState& state, const std::string& path,
                                                      Mode mode, bool fails, int64_t step) {
  std::string text, failed;
  if (fails) {
    set_disk_hook([&](const std::string& call, const std::string& of_path, int64_t number) {
      if (number != step) return 0;
      failed = call + " " + of_path;
      return ENOSPC;
    });
  }
  try {
    save(mode, state, path);
  } catch (const dtensor::ValueError& error) {
    text = error.what();
  }
  set_disk_hook({});
  return {text, failed};
}

TEST_P(FailingDisk, AtAnyStepOfASave) {
  on_two_ranks([](RankContext& context) {
    const auto [mode, failing, replaces] = GetParam();
    const auto folder = context.directory() + "/run";
    const auto target = folder + (replaces ? "/step-2" : "/step-3");
    const auto said = [&, of_rank = failing](const std::string& text) {
      return hsdp::broadcast_text(*context.environment().mesh(), at::kCPU, "test", text, of_rank);
    };
    CheckpointedTraining first(context, kSeed, 2), second(context, kSeed, 3);
    hsdp::save(first.state, folder + "/step-2");
    context.environment().barrier("saved");
    const auto before = contents(folder);
    int64_t errors = 0;
    for (int64_t step = 0;; ++step) {
      const auto [text, failed] = save_with_failure(second.state, target, mode, context.rank() == failing, step);
      SCOPED_TRACE("step " + std::to_string(step) + ", " + failed + ": " + text);
      EXPECT_EQ(text, said(text));
      if (!text.empty()) {
        ++errors;
        expect_parts(text, {"[save] ", folder, "No space left on device"});
        expect_contents(context, folder, before);
        expect_loads(context, folder + "/step-2", first);
        continue;
      }
      expect_loads(context, target, second);
      // What could not be removed is in nobody's way.
      on_rank_0(context, [&] {
        for (const auto& name : names_in(folder)) {
          if (name.ends_with(".writing") || name.ends_with(".removing")) fs::remove_all(folder + "/" + name);
        }
        EXPECT_EQ(names_in(folder), replaces ? Names{"step-2"} : (Names{"step-2", "step-3"}));
      });
      if (said(failed).empty()) break;
      on_rank_0(context, [&] { fs::remove_all(target); });
      if (replaces) hsdp::save(first.state, target);
      expect_loads(context, folder + "/step-2", first);
    }
    EXPECT_GT(errors, 5);
  });
}

std::string name_of_failing(const ::testing::TestParamInfo<Failing>& info) {
  const auto [mode, failing, replaces] = info.param;
  return std::string(mode == Mode::sync ? "Sync" : "Async") + "Rank" + std::to_string(failing) +
         (replaces ? "Replacing" : "New");
}
INSTANTIATE_TEST_SUITE_P(Steps, FailingDisk,
                         ::testing::Combine(::testing::Values(Mode::sync, Mode::async), ::testing::Values(0, 1),
                                            ::testing::Bool()),
                         name_of_failing);

TEST(Disk, ThatCannotExchangeFolders) {
  on_two_ranks([](RankContext& context) {
    const auto folder = context.directory() + "/run", path = folder + "/step-2";
    CheckpointedTraining first(context, kSeed, 2), second(context, kSeed, 3);
    hsdp::save(first.state, path);
    set_disk_hook(
        [](const std::string& call, const std::string&, int64_t) { return call == "renameat2" ? EINVAL : 0; });
    hsdp::save(second.state, path);
    expect_loads(context, path, second);
    context.environment().barrier("loaded");
    EXPECT_EQ(names_in(folder), Names{"step-2"});
    context.environment().barrier("looked");
    // And where the second of the two renames fails.
    const auto before = contents(folder);
    set_disk_hook([&](const std::string& call, const std::string& from, int64_t) {
      if (call == "renameat2") return EINVAL;
      return call == "rename" && from == path + ".writing" ? EIO : 0;
    });
    expect_parts(value_error_of(context, [&] { hsdp::save(first.state, path); }),
                 {"[save] " + path + " cannot be replaced: Input/output error"});
    set_disk_hook({});
    expect_contents(context, folder, before);
    expect_loads(context, path, second);
  });
}

// ---- paths ----

TEST(Paths, ThatCannotBeWritten) {
  on_two_ranks([](RankContext& context) {
    const auto folder = context.directory() + "/run";
    on_rank_0(context, [&] {
      fs::create_directory(folder);
      write_bytes(folder + "/file", "mine");
    });
    const auto before = contents(folder);
    CheckpointedTraining training(context, kSeed, 1);
    const std::string long_name(250, 'x');
    for (const auto& [path, parts] : std::map<std::string, std::vector<std::string>>{
             {folder + "/file", {"[save] " + folder + "/file is a file, expected a folder or nothing"}},
             {folder + "/file/step-1", {"[save] " + folder + "/file/step-1.writing cannot be made: Not a directory"}},
             {folder + "/" + long_name, {"[save] " + folder + "/xxxxx", " cannot be made: File name too long"}},
             {"/proc/hsdp/step-1", {"[save] /proc/hsdp/step-1.writing cannot be made: "}},
             {"", {"[save] ", "expected "}},
         }) {
      for (const auto mode : {Mode::sync, Mode::async}) {
        SCOPED_TRACE(path);
        expect_parts(value_error_of(context, [&] { save(mode, training.state, path); }), parts);
        expect_contents(context, folder, before);
      }
    }
    EXPECT_FALSE(fs::exists(".writing"));
    const auto of_folder = [&](const std::string& path) {
      return value_error_of(context, [&] { hsdp::CheckpointFolder(context.environment(), path); });
    };
    expect_parts(of_folder(folder + "/file"), {"[checkpoints] " + folder + "/file is a file, expected a folder"});
    expect_parts(of_folder(folder + "/file/run"), {"[checkpoints] " + folder + "/file/run cannot be made: "});
    expect_parts(of_folder("/proc/hsdp/run"), {"[checkpoints] /proc/hsdp/run cannot be made: "});
    expect_parts(of_folder(""), {"[checkpoints] ", " cannot be made: "});
    expect_contents(context, folder, before);
  });
}

// What is no checkpoint is the user's.
TEST(Paths, WithSomethingElse) {
  on_two_ranks([](RankContext& context) {
    const auto folder = context.directory() + "/run";
    CheckpointedTraining training(context, kSeed, 1);
    hsdp::save(training.state, folder + "/with_notes");
    hsdp::save(training.state, folder + "/with_a_folder");
    hsdp::save(training.state, folder + "/broken");
    on_rank_0(context, [&] {
      fs::create_directories(folder + "/notes");
      write_bytes(folder + "/notes/notes.txt", "mine");
      fs::create_directories(folder + "/page");
      write_bytes(folder + "/page/manifest.json", R"({"name": "a page of the web", "icons": []})");
      write_bytes(folder + "/page/page.html", "mine");
      write_bytes(folder + "/with_notes/notes.txt", "mine");
      fs::create_directories(folder + "/with_a_folder/plots");
      write_bytes(folder + "/with_a_folder/plots/loss.png", "mine");
      write_bytes(folder + "/broken/manifest.json", "");
      fs::create_directories(folder + "/busy.writing");
      write_bytes(folder + "/busy.writing/notes.txt", "mine");
      fs::create_directories(folder + "/busy_deeper.writing/optimizer");
      write_bytes(folder + "/busy_deeper.writing/optimizer/notes.txt", "mine");
      write_bytes(folder + "/file.writing", "mine");
    });
    const auto before = contents(folder);
    for (const auto* name : {"notes", "page", "with_notes", "with_a_folder", "broken", "busy", "busy_deeper", "file"}) {
      for (const auto mode : {Mode::sync, Mode::async}) {
        SCOPED_TRACE(name);
        const auto path = folder + "/" + name;
        expect_parts(value_error_of(context, [&] { save(mode, training.state, path); }), {"[save] " + path});
        expect_contents(context, folder, before);
      }
    }
    // Notes are in no reader's way.
    expect_loads(context, folder + "/with_notes", training);
  });
}

// Between the call and the end of the writing, minutes may pass.
TEST(Paths, ThatAreTakenMeanwhile) {
  on_two_ranks([](RankContext& context) {
    const auto folder = context.directory() + "/run", path = folder + "/step-1";
    CheckpointedTraining training(context, kSeed, 1);
    auto pending = hsdp::save_async(training.state, path);
    on_rank_0(context, [&] {
      fs::create_directory(path);
      write_bytes(path + "/notes.txt", "mine");
    });
    expect_parts(value_error_of(context, [&] { pending.wait(); }), {"[save] " + path, "expected "});
    expect_contents(context, folder, {{"step-1", ""}, {"step-1/notes.txt", "mine"}});
    on_rank_0(context, [&] { fs::remove_all(path); });
    hsdp::save(training.state, path);
    expect_loads(context, path, training);
  });
}

TEST(Paths, OfAllForms) {
  on_two_ranks([](RankContext& context) {
    fs::current_path(context.directory());
    CheckpointedTraining training(context, kSeed, 1);
    for (const auto* path :
         {"relative", "of/some/folders", "./dotted/", "slashes///", "of/../odd", "with space and ü"}) {
      SCOPED_TRACE(path);
      hsdp::save(training.state, path);
      expect_loads(context, path, training);
      hsdp::save(training.state, path);
      expect_loads(context, path, training);
    }
    context.environment().barrier("saved");
    EXPECT_TRUE(names_in("of/some") == (Names{"folders"}));
  });
}

// ---- what cannot be saved ----

TEST(Unsaved, LeavesNothingBehind) {
  on_two_ranks([](RankContext& context) {
    const auto folder = context.directory() + "/run";
    CheckpointedTraining training(context, kSeed, 1);
    hsdp::save(training.state, folder + "/step-1");
    const auto before = contents(folder);
    for (const int odd : {0, 1, -1}) {
      for (const auto mode : {Mode::sync, Mode::async}) {
        SCOPED_TRACE(odd);
        auto state = training.state;
        if (odd < 0 || odd == context.rank()) state.values["text"] = "\xff";
        expect_parts(value_error_of(context, [&] { save(mode, state, folder + "/step-2"); }),
                     {"[save] ", "expected UTF-8"});
        expect_contents(context, folder, before);
        state = training.state;
        if (odd < 0 || odd == context.rank()) state.progress.step = -1;
        expect_parts(value_error_of(context, [&] { save(mode, state, folder + "/step-2"); }),
                     {"[save] ", "step", "-1", "expected "});
        expect_contents(context, folder, before);
      }
    }
  });
}

}  // namespace
