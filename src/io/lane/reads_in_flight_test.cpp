// Reads in flight over time: which bucket has which share of a read.
#include "io/lane/reads_in_flight.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace trunkline::io {
namespace {

constexpr std::int64_t kWidth = TimeBuckets<InFlightBucket>::kFinestNs;

TEST(ReadsInFlight, OverlappingReadsAddUp) {
  ReadsInFlight reads(kWidth * 10);
  reads.add(kWidth * 21 / 2, kWidth * 23 / 2, 100);  // half of each of two buckets
  reads.add(kWidth * 10, kWidth * 12, 1000);         // sent earlier, ended later
  ASSERT_EQ(reads.sums().first(), 10);
  ASSERT_EQ(reads.sums().buckets().size(), 3);
  for (const std::size_t bucket : {0, 1}) {
    EXPECT_EQ(reads.sums().buckets()[bucket].read_ns, kWidth * 3 / 2);
    EXPECT_DOUBLE_EQ(reads.sums().buckets()[bucket].byte_ns, static_cast<double>(kWidth) * 1050);
  }
  EXPECT_EQ(reads.sums().buckets()[2].read_ns, 0);
}

TEST(ReadsInFlight, WhatWasEarlierDoesNotCount) {
  ReadsInFlight reads(kWidth * 10);
  reads.add(0, kWidth * 5, 1);
  reads.add(kWidth * 9, kWidth * 10, 1);
  EXPECT_EQ(reads.sums().buckets().front().read_ns, 0);
  reads.add(kWidth * 9, kWidth * 11, 8);
  EXPECT_EQ(reads.sums().first(), 10);
  EXPECT_EQ(reads.sums().buckets().front().read_ns, kWidth);
  EXPECT_DOUBLE_EQ(reads.sums().buckets().front().byte_ns, static_cast<double>(kWidth) * 8);
}

TEST(ReadsInFlight, LongRunsGetCoarserAndLoseNothing) {
  ReadsInFlight reads(kWidth * 7 + 13);
  std::int64_t time = kWidth * 7 + 13;
  constexpr std::int64_t kReads = 20'000;
  for (std::int64_t read = 0; read < kReads; ++read) {
    reads.add(time, time + 2'000'003, 4096);  // two at a time
    time += 1'000'000;
  }
  EXPECT_LE(reads.sums().buckets().size(), TimeBuckets<InFlightBucket>::kMostBuckets);
  InFlightBucket sum;
  for (const InFlightBucket& each : reads.sums().buckets()) sum += each;
  EXPECT_EQ(sum.read_ns, kReads * 2'000'003);
  EXPECT_NEAR(sum.byte_ns / (static_cast<double>(sum.read_ns) * 4096), 1, 1e-9);
  const InFlightBucket& middle = reads.sums().buckets()[200];
  EXPECT_NEAR(static_cast<double>(middle.read_ns) / static_cast<double>(reads.sums().width_ns()), 2, 0.001);
}

}  // namespace
}  // namespace trunkline::io
