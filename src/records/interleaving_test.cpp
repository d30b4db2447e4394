#include "records/interleaving.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

namespace trunkline::records {
namespace {

std::vector<std::uint64_t> order_of(const InterleavingOptions& options, std::uint64_t samples) {
  const Interleaving interleaving(options, samples);
  std::vector<std::uint64_t> order(samples);
  for (std::uint64_t position = 0; position < samples; ++position) order[position] = interleaving(position);
  return order;
}

TEST(Interleaving, ReadsFilesSideBySide) {
  using Order = std::vector<std::uint64_t>;
  // Two files of three samples.
  EXPECT_EQ(order_of({.file_samples = 3, .files = 2}, 6), (Order{0, 3, 1, 4, 2, 5}));
  // Two samples of each at a time; the third comes alone.
  EXPECT_EQ(order_of({.file_samples = 3, .files = 2, .chunk = 2}, 6), (Order{0, 1, 3, 4, 2, 5}));
  // Files 0 and 2, which may be in two directories, then 1 and 3.
  EXPECT_EQ(order_of({.file_samples = 2, .files = 2}, 8), (Order{0, 4, 1, 5, 2, 6, 3, 7}));
  // Five files, two side by side: the first run has three.
  EXPECT_EQ(order_of({.file_samples = 1, .files = 2}, 5), (Order{0, 3, 1, 4, 2}));
  // A last file that is shorter.
  EXPECT_EQ(order_of({.file_samples = 2, .files = 2}, 5), (Order{0, 2, 1, 3, 4}));
  // Not more files than there are.
  EXPECT_EQ(order_of({.file_samples = 2, .files = 9}, 4), (Order{0, 2, 1, 3}));
  EXPECT_EQ(order_of({}, 3), (Order{0, 1, 2}));
  EXPECT_EQ(order_of({.file_samples = 3, .files = 1}, 3), (Order{0, 1, 2}));
}

TEST(Interleaving, HasEverySampleOnce) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 500; ++round) {
    const std::uint64_t samples = 1 + random() % 200;
    const InterleavingOptions options{
        .file_samples = random() % 20, .files = 1 + random() % 12, .chunk = 1 + random() % 25};
    auto order = order_of(options, samples);
    std::ranges::sort(order);
    std::vector<std::uint64_t> all(samples);
    std::iota(all.begin(), all.end(), 0);
    ASSERT_EQ(order, all) << samples << " samples, " << options.file_samples << " in a file, "
                          << options.files << " files, chunks of " << options.chunk;
  }
}

}  // namespace
}  // namespace trunkline::records
