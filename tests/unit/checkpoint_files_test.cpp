// Files that appear complete or not at all, their checksums, and reading parts of them.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <functional>
#include <limits>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "dtensor/error.h"
#include "hsdp/checkpoint/files.h"
#include "tests/testing/expect.h"
#include "tests/testing/scratch_folder.h"

namespace checkpoint_files_test {

using namespace testing_support;
using dtensor::ValueError;
using hsdp::FileWriter;
using hsdp::kChecksumBlock;
using hsdp::ReadableFile;
using hsdp::WrittenFile;
using Names = std::set<std::string>;

constexpr auto kWhere = "test";
const std::string kHint = ", expected a path in a folder that can be written, with room for the whole file";

/// Bytes without a period that a block could hide.
std::string bytes_of(size_t count) {
  std::string bytes(count, '\0');
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<char>((i * 2654435761u + i / 251) >> 7);
  return bytes;
}

WrittenFile write_file(const std::string& path, const std::string& bytes) {
  FileWriter file(kWhere, path);
  file.write(bytes.data(), bytes.size());
  return file.complete();
}

std::string temporary(const std::string& path) { return path + ".tmp" + std::to_string(::getpid()); }

/// Runs it in a process of its own, whose limits and user it may change.
void in_child(const std::function<void()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    body();
    ::_exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "the child ended with " << status;
}

// As a full disk: writes that reach beyond `bytes` fail.
void limit_file_size(size_t bytes) {
  std::signal(SIGXFSZ, SIG_IGN);
  const rlimit limit{bytes, bytes};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
}

// ---- checksums ----

TEST(Checksum, IsXxh3) {
  EXPECT_EQ(hsdp::to_hex(hsdp::checksum("", 0)), "2d06800538d394c2");
  EXPECT_EQ(hsdp::to_hex(hsdp::checksum(nullptr, 0)), "2d06800538d394c2");
  EXPECT_EQ(hsdp::to_hex(hsdp::checksum("a", 1)), "e6c632b61e964e1f");
  EXPECT_EQ(hsdp::to_hex(hsdp::checksum("abc", 3)), "78af5f94892f3950");
}

TEST(Checksum, HasSixteenDigits) {
  EXPECT_EQ(hsdp::to_hex(0), "0000000000000000");
  EXPECT_EQ(hsdp::to_hex(0x1f), "000000000000001f");
  EXPECT_EQ(hsdp::to_hex(std::numeric_limits<uint64_t>::max()), "ffffffffffffffff");
}

// ---- FileWriter ----

/// Bytes of a file, in how many parts they are written.
struct WrittenParts {
  const char* name;
  std::vector<size_t> parts;
};
std::ostream& operator<<(std::ostream& out, const WrittenParts& file) { return out << file.name; }

class FileWriterParts : public ::testing::TestWithParam<WrittenParts> {};

TEST_P(FileWriterParts, AreOneFile) {
  const ScratchFolder folder;
  size_t total = 0;
  for (const auto part : GetParam().parts) total += part;
  const auto bytes = bytes_of(total);

  FileWriter file(kWhere, folder / "file");
  size_t at = 0;
  for (const auto part : GetParam().parts) {
    // Memory that the caller uses again at once.
    std::string reused = bytes.substr(at, part);
    file.write(reused.data(), part);
    reused.assign(part, 'x');
    at += part;
  }
  const auto written = file.complete();

  EXPECT_TRUE(read_bytes(folder / "file") == bytes);
  EXPECT_EQ(written.bytes, total);
  EXPECT_EQ(written.checksum, hsdp::checksum(bytes.data(), total));
  std::vector<uint64_t> blocks;
  for (size_t begin = 0; begin < total; begin += kChecksumBlock) {
    blocks.push_back(hsdp::checksum(bytes.data() + begin, std::min(kChecksumBlock, total - begin)));
  }
  EXPECT_EQ(written.block_checksums, blocks);
  EXPECT_EQ(folder.names(), Names{"file"});

  const auto measured = hsdp::measure(ReadableFile(kWhere, folder / "file"));
  EXPECT_EQ(measured.bytes, written.bytes);
  EXPECT_EQ(measured.checksum, written.checksum);
  EXPECT_EQ(measured.block_checksums, written.block_checksums);
}

INSTANTIATE_TEST_SUITE_P(
    Files, FileWriterParts,
    ::testing::Values(WrittenParts{"None", {}}, WrittenParts{"Nothing", {0}}, WrittenParts{"OneByte", {1}},
                      WrittenParts{"OneByteAfterNothing", {0, 1, 0}},
                      WrittenParts{"AlmostABlock", {kChecksumBlock - 1}}, WrittenParts{"ABlock", {kChecksumBlock}},
                      WrittenParts{"MoreThanABlock", {kChecksumBlock + 1}},
                      WrittenParts{"TwoBlocks", {2 * kChecksumBlock}},
                      WrittenParts{"BlockByBlock", {kChecksumBlock, kChecksumBlock, kChecksumBlock}},
                      WrittenParts{"ABlockAtLast", {kChecksumBlock - 1, 1}},
                      WrittenParts{"AcrossABlock", {kChecksumBlock - 1, 2}},
                      WrittenParts{"AHeaderAndManyBlocks", {1000, 3 * kChecksumBlock, 17, 2 * kChecksumBlock - 17}},
                      WrittenParts{"ManyParts", std::vector<size_t>(3000, 1001)},
                      WrittenParts{"LargeAfterSmall", {3, 5 * kChecksumBlock + 7}}),
    [](const auto& which) { return which.param.name; });

TEST(FileWriterTest, ShowsNothingBeforeItIsComplete) {
  const ScratchFolder folder;
  const auto path = folder / "file";
  {
    FileWriter file(kWhere, path);
    const auto bytes = bytes_of(3 * kChecksumBlock);
    file.write(bytes.data(), bytes.size());
    EXPECT_FALSE(std::filesystem::exists(path));
    EXPECT_EQ(folder.names().size(), 1u);
  }
  EXPECT_EQ(folder.names(), Names{});
}

TEST(FileWriterTest, ReplacesAFormerFileWhenItIsComplete) {
  const ScratchFolder folder;
  const auto path = folder / "file";
  write_bytes(path, "former");
  {
    FileWriter file(kWhere, path);
    file.write("given up", 8);
  }
  EXPECT_EQ(read_bytes(path), "former");
  const ReadableFile former(kWhere, path);
  EXPECT_EQ(write_file(path, "new").bytes, 3u);
  EXPECT_EQ(read_bytes(path), "new");
  // Whoever has the former one open goes on reading it.
  std::string text(6, '\0');
  former.read(0, text.data(), text.size());
  EXPECT_EQ(text, "former");
  EXPECT_EQ(folder.names(), Names{"file"});
}

TEST(FileWriterTest, PassesOverWhatAKilledProcessLeft) {
  const ScratchFolder folder;
  const auto path = folder / "file";
  write_bytes(temporary(path), std::string(100, 'x'));
  write_file(path, "new");
  EXPECT_EQ(read_bytes(path), "new");
  // A link would lead to a file of somebody else.
  write_bytes(folder / "other", "other");
  std::filesystem::create_symlink(folder / "other", temporary(path));
  write_file(path, "newer");
  EXPECT_EQ(read_bytes(path), "newer");
  EXPECT_EQ(read_bytes(folder / "other"), "other");
  EXPECT_EQ(folder.names(), (Names{"file", "other"}));
}

TEST(FileWriterTest, WritesIntoTheWorkingFolder) {
  const ScratchFolder folder;
  in_child([&] {
    std::filesystem::current_path(folder.path());
    write_file("file", "bytes");
  });
  EXPECT_EQ(read_bytes(folder / "file"), "bytes");
}

TEST(FileWriterTest, RefusesPathsThatCannotBeWritten) {
  const ScratchFolder folder;
  write_bytes(folder / "file", "bytes");
  std::filesystem::create_directory(folder / "folder");
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  const auto refused = [&](const std::string& path, const std::string& reason) {
    expect_error<ValueError>([&] { FileWriter(kWhere, path); }, "[test] " + path + " " + reason + kHint);
  };
  refused(folder / "none/file", "cannot be created: No such file or directory");
  refused(folder / "file/file", "cannot be created: Not a directory");
  refused(folder / std::string(300, 'n'), "cannot be created: File name too long");
  refused(folder / "folder", "cannot be replaced: Is a directory");
  refused(folder / "pipe", "cannot be replaced: Operation not supported");
  refused("/dev/null", "cannot be replaced: Operation not supported");
  EXPECT_EQ(folder.names(), (Names{"file", "folder", "pipe"}));
  EXPECT_EQ(read_bytes(folder / "file"), "bytes");
}

TEST(FileWriterTest, RefusesAFolderOfSomebodyElse) {
  const ScratchFolder folder;
  std::filesystem::create_directory(folder / "folder");
  std::filesystem::permissions(folder.path(), std::filesystem::perms(0755));
  in_child([&] {
    ASSERT_EQ(::chmod((folder / "folder").c_str(), 0555), 0);
    // Root may write anywhere.
    if (::geteuid() == 0) {
      ASSERT_EQ(::seteuid(65534), 0);
    }
    expect_error<ValueError>([&] { FileWriter(kWhere, folder / "folder/file"); },
                             "folder/file cannot be created: Permission denied" + kHint);
  });
  std::filesystem::permissions(folder / "folder", std::filesystem::perms(0755));
}

/// Where a file that grows beyond the room there is is noticed.
struct FullDisk {
  const char* name;
  size_t room, first, second;
  bool at_complete;
};
std::ostream& operator<<(std::ostream& out, const FullDisk& disk) { return out << disk.name; }

class FileWriterFullDisk : public ::testing::TestWithParam<FullDisk> {};

TEST_P(FileWriterFullDisk, LeavesTheFormerFile) {
  const auto& disk = GetParam();
  const ScratchFolder folder;
  const auto path = folder / "file";
  write_bytes(path, "former");
  in_child([&] {
    limit_file_size(disk.room);
    const auto bytes = bytes_of(std::max(disk.first, disk.second));
    const auto refused = [&](const std::function<void()>& call) {
      expect_error<ValueError>(call, "[test] " + path + " cannot be written: File too large" + kHint);
    };
    FileWriter file(kWhere, path);
    file.write(bytes.data(), disk.first);
    if (!disk.at_complete) {
      refused([&] { file.write(bytes.data(), disk.second); });
    } else {
      file.write(bytes.data(), disk.second);
    }
    refused([&] { file.complete(); });
    // Bytes are missing, so that it does not help to have room again.
    refused([&] { file.write("x", 1); });
    refused([&] { file.complete(); });
  });
  EXPECT_EQ(read_bytes(path), "former");
  EXPECT_EQ(folder.names(), Names{"file"});
}

INSTANTIATE_TEST_SUITE_P(Files, FileWriterFullDisk,
                         ::testing::Values(FullDisk{"AtOnce", 1, 0, kChecksumBlock, false},
                                           FullDisk{"InALaterBlock", 3 * kChecksumBlock / 2, 10, 4 * kChecksumBlock,
                                                    false},
                                           FullDisk{"InTheBuffer", 4096, 0, 5000, true},
                                           FullDisk{"AtALastByte", 2 * kChecksumBlock, 2 * kChecksumBlock, 1, true}),
                         [](const auto& which) { return which.param.name; });

TEST(FileWriterTest, RefusesAFolderThatWasRemoved) {
  const ScratchFolder folder;
  std::filesystem::create_directory(folder / "folder");
  FileWriter file(kWhere, folder / "folder/file");
  file.write("bytes", 5);
  std::filesystem::remove_all(folder / "folder");
  expect_error<ValueError>([&] { file.complete(); },
                           "folder/file cannot be replaced: No such file or directory" + kHint);
}

// ---- ReadableFile ----

TEST(ReadableFileTest, ReadsAnyPart) {
  const ScratchFolder folder;
  const auto bytes = bytes_of(5000);
  write_bytes(folder / "file", bytes);
  const ReadableFile file(kWhere, folder / "file");
  EXPECT_EQ(file.path(), folder / "file");
  EXPECT_EQ(file.size(), 5000u);
  for (const auto& [offset, count] :
       std::vector<std::pair<size_t, size_t>>{{0, 5000}, {0, 1}, {4999, 1}, {1234, 2345}, {0, 0}, {5000, 0}}) {
    std::string part(count, '\0');
    file.read(offset, part.data(), count);
    EXPECT_TRUE(part == bytes.substr(offset, count)) << offset << " " << count;
  }
}

TEST(ReadableFileTest, RefusesWhatIsNotThere) {
  const ScratchFolder folder;
  write_bytes(folder / "file", "0123456789");
  const ReadableFile file(kWhere, folder / "file");
  constexpr auto kMost = std::numeric_limits<uint64_t>::max();
  std::string out(100, '\0');
  const auto refused = [&](uint64_t offset, size_t count, const std::string& end) {
    expect_error<ValueError>([&] { file.read(offset, out.data(), count); },
                             "[test] " + (folder / "file") + " ends at byte " + end + ", expected " +
                                 std::to_string(count) + " bytes from byte " + std::to_string(offset) + " on");
  };
  refused(0, 11, "10");
  refused(10, 1, "10");
  refused(11, 0, "10");
  refused(kMost, 2, "10");
  refused(kMost - 4, 10, "10");
  std::filesystem::resize_file(folder / "file", 4);
  refused(2, 8, "4");
  EXPECT_EQ(file.size(), 10u);
}

TEST(ReadableFileTest, RefusesWhatIsNoFile) {
  const ScratchFolder folder;
  write_bytes(folder / "file", "bytes");
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  std::filesystem::create_symlink(folder / "none", folder / "link");
  const auto refused = [&](const std::string& path, const std::string& reason) {
    expect_error<ValueError>([&] { ReadableFile(kWhere, path); },
                             "[test] " + path + " " + reason + ", expected the path of a file that can be read");
  };
  refused(folder / "none", "cannot be opened: No such file or directory");
  refused(folder / "link", "cannot be opened: No such file or directory");
  refused(folder / "file/file", "cannot be opened: Not a directory");
  refused("", "cannot be opened: No such file or directory");
  refused(folder.path(), "is a folder");
  // Nobody ever writes into it: to wait would be to wait for ever.
  refused(folder / "pipe", "is no regular file");
  refused("/dev/zero", "is no regular file");
}

TEST(ReadText, HasALimit) {
  const ScratchFolder folder;
  write_bytes(folder / "file", std::string("12\0\n5", 5));
  EXPECT_EQ(hsdp::read_text(kWhere, folder / "file", 5), std::string("12\0\n5", 5));
  expect_error<ValueError>([&] { hsdp::read_text(kWhere, folder / "file", 4); },
                           "[test] " + (folder / "file") + " has 5 bytes, expected at most 4");
  write_bytes(folder / "file", "");
  EXPECT_EQ(hsdp::read_text(kWhere, folder / "file", 0), "");
  expect_error<ValueError>([&] { hsdp::read_text(kWhere, folder.path(), 4); }, folder.path() + " is a folder");
}

TEST(SyncFolder, RefusesWhatIsNoFolder) {
  const ScratchFolder folder;
  write_bytes(folder / "file", "bytes");
  hsdp::sync_folder(kWhere, folder.path());
  hsdp::sync_folder(kWhere, "");
  expect_error<ValueError>([&] { hsdp::sync_folder(kWhere, folder / "file"); },
                           "[test] folder " + (folder / "file") + " cannot be synced: Not a directory");
  expect_error<ValueError>([&] { hsdp::sync_folder(kWhere, folder / "none"); },
                           "[test] folder " + (folder / "none") + " cannot be synced: No such file or directory");
}

}  // namespace checkpoint_files_test
