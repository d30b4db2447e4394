#include "os/listing_pace.h"

#include <gtest/gtest.h>

namespace trunkline::os {
namespace {

struct stat directory(ino_t inode) {
  struct stat status{};
  status.st_dev = 1;
  status.st_ino = inode;
  return status;
}

TEST(ListingPace, ListsADirectoryOfManyFilesForAHundredthOfTheTime) {
  ListingPace pace;
  EXPECT_TRUE(pace.is_due(directory(7), 1000));
  pace.listed(directory(7), 100'000, 1000, 1500);
  EXPECT_FALSE(pace.is_due(directory(7), 1500));
  EXPECT_FALSE(pace.is_due(directory(7), 1500 + 100 * 500 - 1));
  EXPECT_TRUE(pace.is_due(directory(7), 1500 + 100 * 500));
}

TEST(ListingPace, ListsADirectoryOfFewFilesEachTime) {
  ListingPace pace;
  pace.listed(directory(7), ListingPace::kFewNames, 1000, 1500);
  EXPECT_TRUE(pace.is_due(directory(7), 1501));
  // Also once it has few.
  pace.listed(directory(7), ListingPace::kFewNames + 1, 2000, 2500);
  EXPECT_FALSE(pace.is_due(directory(7), 2501));
  pace.listed(directory(7), ListingPace::kFewNames, 60'000, 60'500);
  EXPECT_TRUE(pace.is_due(directory(7), 60'501));
}

TEST(ListingPace, OneDirectoryDoesNotDelayAnother) {
  ListingPace pace;
  pace.listed(directory(1), 100'000, 1000, 1500);
  for (ino_t inode = 2; inode < 2000; ++inode) EXPECT_TRUE(pace.is_due(directory(inode), 1501));
  for (ino_t inode = 2; inode < 2000; ++inode) {
    pace.listed(directory(inode), 100'000, 1500, 1501);
    EXPECT_FALSE(pace.is_due(directory(inode), 1502));
  }
}

}  // namespace
}  // namespace trunkline::os
