#include "apps/data_loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "dtensor/error.h"

namespace apps {
namespace data_loader_test {

using ::testing::HasSubstr;

/// A uint16 file whose token i is i, so that every token names its place.
class DataLoaderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(::testing::TempDir()) / ("data_loader_" + std::to_string(getpid()));
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  TokenFile numbered_tokens(int64_t count) {
    const std::string path = (folder_ / std::to_string(count)).string();
    // Loaders of one test share the file: one that is mapped must not be written again.
    if (!std::filesystem::exists(path)) {
      std::ofstream file(path, std::ios::binary);
      for (int64_t i = 0; i < count; ++i) {
        const auto token = uint16_t(i);
        file.write(reinterpret_cast<const char*>(&token), sizeof(token));
      }
    }
    return TokenFile(path, TokenFormat::uint16);
  }

  DataLoader loader(int64_t tokens, int64_t batch, int64_t length, int64_t rank = 0, int64_t ranks = 1,
                    int64_t seed = 1) {
    return DataLoader(numbered_tokens(tokens), {.global_batch_size = batch,
                                                .sequence_length = length,
                                                .vocab_size = 65536,
                                                .seed = seed,
                                                .rank = rank,
                                                .ranks = ranks});
  }

  template <class Work>
  std::string refusal(const Work& work) {
    try {
      work();
    } catch (const dtensor::ValueError& error) {
      return error.what();
    }
    ADD_FAILURE() << "nothing was refused";
    return "";
  }

  std::filesystem::path folder_;
};

/// First tokens of the rows of a batch.
std::vector<int64_t> starts(const Batch& batch) {
  std::vector<int64_t> result;
  for (int64_t row = 0; row < batch.inputs.size(0); ++row) result.push_back(batch.inputs[row][0].item<int64_t>());
  return result;
}

TEST_F(DataLoaderTest, TargetsAreTheInputsOneTokenAhead) {
  const DataLoader data = loader(100, 3, 7);
  for (int64_t step = 0; step < data.steps_per_epoch(); ++step) {
    const Batch batch = data.batch(step);
    ASSERT_EQ(batch.inputs.sizes(), (std::vector<int64_t>{3, 7}));
    ASSERT_EQ(batch.inputs.scalar_type(), torch::kInt64);
    EXPECT_TRUE(batch.targets.equal(batch.inputs + 1));
    for (const int64_t start : starts(batch)) {
      EXPECT_EQ(start % 7, 0);
      EXPECT_LE(start + 7, 99);
    }
  }
}

TEST_F(DataLoaderTest, TheLastTargetNeedsOneTokenMoreThanTheWindows) {
  EXPECT_EQ(loader(21, 1, 7).windows(), 2);
  EXPECT_EQ(loader(22, 1, 7).windows(), 3);
}

TEST_F(DataLoaderTest, AnEpochUsesEveryWindowOnce) {
  const DataLoader data = loader(6 * 4 * 5 + 1, 6, 5);
  ASSERT_EQ(data.windows(), 24);
  ASSERT_EQ(data.steps_per_epoch(), 4);
  std::vector<std::vector<int64_t>> epochs;
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    auto& order = epochs.emplace_back();
    for (int64_t step = 0; step < 4; ++step) {
      for (const int64_t start : starts(data.batch(epoch * 4 + step))) order.push_back(start);
    }
    EXPECT_EQ(std::set<int64_t>(order.begin(), order.end()).size(), 24u);
  }
  EXPECT_NE(epochs[0], epochs[1]);
  EXPECT_NE(epochs[1], epochs[2]);
}

TEST_F(DataLoaderTest, WindowsThatFillNoBatchAreLeftOutOfTheEpoch) {
  const DataLoader data = loader(11 * 5 + 1, 4, 5);
  ASSERT_EQ(data.steps_per_epoch(), 2);
  std::set<int64_t> first_epoch;
  for (int64_t step = 0; step < 2; ++step) {
    for (const int64_t start : starts(data.batch(step))) first_epoch.insert(start);
  }
  EXPECT_EQ(first_epoch.size(), 8u);
}

TEST_F(DataLoaderTest, TheGlobalBatchIsTheSameAtAnyNumberOfRanks) {
  const DataLoader alone = loader(1000, 12, 8);
  for (const int64_t ranks : {1, 2, 3, 4, 6, 12}) {
    for (const int64_t step : {int64_t(0), int64_t(3), alone.steps_per_epoch() - 1, alone.steps_per_epoch() + 2}) {
      std::vector<torch::Tensor> rows;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        rows.push_back(loader(1000, 12, 8, rank, ranks).batch(step).inputs);
        EXPECT_EQ(rows.back().size(0), 12 / ranks);
      }
      EXPECT_TRUE(torch::cat(rows).equal(alone.batch(step).inputs)) << ranks << " ranks, step " << step;
    }
  }
}

TEST_F(DataLoaderTest, RanksNeverShareAWindow) {
  const int64_t ranks = 4;
  for (int64_t step = 0; step < 20; ++step) {
    std::set<int64_t> seen;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      for (const int64_t start : starts(loader(1000, 12, 8, rank, ranks).batch(step))) {
        EXPECT_TRUE(seen.insert(start).second) << "window " << start << " twice in step " << step;
      }
    }
  }
}

TEST_F(DataLoaderTest, TheSeedChoosesTheOrder) {
  const auto order = [&](int64_t seed) { return starts(loader(1000, 100, 8, 0, 1, seed).batch(0)); };
  EXPECT_EQ(order(1), order(1));
  EXPECT_NE(order(1), order(2));
}

TEST_F(DataLoaderTest, RefusesABatchThatTheRanksCannotShareEvenly) {
  EXPECT_THAT(refusal([&] { loader(1000, 10, 8, 0, 4); }), HasSubstr("global_batch_size 10 over 4 ranks"));
  const DataLoaderOptions thirds{.global_batch_size = 8, .sequence_length = 10, .ranks = 2, .micro_batches = 3};
  EXPECT_THAT(refusal([&] { DataLoader(numbered_tokens(1000), thirds); }),
              HasSubstr("global_batch_size 8 over 2 ranks, expected a multiple of the ranks times "
                        "training.gradient_accumulation 3"));
}

TEST_F(DataLoaderTest, RefusesAFileShorterThanOneBatch) {
  EXPECT_THAT(refusal([&] { loader(24, 3, 8); }), HasSubstr("24 tokens are 2 windows of 8"));
  EXPECT_EQ(loader(25, 3, 8).steps_per_epoch(), 1);
}

TEST_F(DataLoaderTest, EveryRankRefusesATokenOutsideTheVocabulary) {
  // Token 40 lies in one window, so in the rows of one rank only.
  for (int64_t rank = 0; rank < 2; ++rank) {
    const DataLoader data(
        numbered_tokens(41),
        {.global_batch_size = 4, .sequence_length = 10, .vocab_size = 40, .seed = 1, .rank = rank, .ranks = 2});
    const std::string message = refusal([&] { data.batch(0); });
    EXPECT_THAT(message, HasSubstr("token 40 is 40"));
    EXPECT_THAT(message, HasSubstr("below model.vocab_size 40"));
  }
}

TEST(Permuted, IsABijectionForEverySize) {
  for (int64_t size = 1; size <= 300; ++size) {
    std::set<int64_t> images;
    for (int64_t index = 0; index < size; ++index) {
      const int64_t image = permuted(index, size, /*key=*/uint64_t(size) * 7919);
      ASSERT_GE(image, 0);
      ASSERT_LT(image, size);
      images.insert(image);
    }
    ASSERT_EQ(int64_t(images.size()), size);
  }
}

TEST(Permuted, SpreadsTheFirstIndicesEvenly) {
  // Mean of the images of 1000 of a million indices: 500 000, give or take 9 100 (one standard deviation).
  for (uint64_t key = 0; key < 20; ++key) {
    double sum = 0;
    for (int64_t index = 0; index < 1000; ++index) sum += double(permuted(index, 1000000, key));
    EXPECT_NEAR(sum / 1000, 500000, 5 * 9100) << "key " << key;
  }
}

TEST(Permuted, TakesSizesBeyondThirtyTwoBits) {
  const int64_t size = (int64_t(1) << 40) + 1;
  for (const int64_t index : {int64_t(0), size / 2, size - 1}) {
    const int64_t image = permuted(index, size, 3);
    EXPECT_GE(image, 0);
    EXPECT_LT(image, size);
  }
}

}  // namespace data_loader_test
}  // namespace apps
