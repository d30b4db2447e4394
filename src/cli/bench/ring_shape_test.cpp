#include "cli/bench/ring_shape.h"

#include <gtest/gtest.h>

#include "trunkline/units.h"

namespace trunkline::cli {
namespace {

TEST(RingShape, KeepsTwiceTheDepthOutstanding) {
  for (const Order order : {Order::sequential, Order::random}) {
    for (const std::uint64_t files : {1U, 2U, 3U, 4U, 16U, 100U}) {
      for (const std::uint64_t in_flight : {1U, 8U, 32U, 128U}) {
        const RingLimits limits{.block_bytes = kMiB, .in_flight = in_flight, .memory_bytes = 64 * kGiB};
        const RingShape shape = ring_shape(order, files, limits);
        EXPECT_GE(shape.bytes(files), 2 * in_flight * kMiB) << files << " files, depth " << in_flight;
        EXPECT_GE(shape.batches_per_file, 2U);
        // Once one batch is done, the remaining ones still fill the queue.
        EXPECT_GE(shape.bytes(files) - shape.piece_bytes * shape.pieces, in_flight * kMiB);
        EXPECT_EQ(shape.piece_bytes % kMiB, 0U);
        if (order == Order::random) {
          EXPECT_EQ(shape.piece_bytes, kMiB);
        } else {
          EXPECT_EQ(shape.pieces, 1U);
        }
      }
    }
  }
}

TEST(RingShape, ManyFilesAreInFlightTogether) {
  // The queue is first in, first out: requests must be small enough that each file has one in flight.
  const RingLimits limits{.block_bytes = kMiB, .in_flight = 32, .memory_bytes = kGiB};
  EXPECT_LE(ring_shape(Order::sequential, 4, limits).piece_bytes, 32 * kMiB / 4);
  EXPECT_LE(ring_shape(Order::sequential, 16, limits).piece_bytes, 32 * kMiB / 16);
}

TEST(RingShape, BatchesOfSmallRandomBlocksAreLarge) {
  const RingLimits limits{.block_bytes = 4 * kKiB, .in_flight = 32, .memory_bytes = kGiB};
  const RingShape shape = ring_shape(Order::random, 1, limits);
  EXPECT_EQ(shape.piece_bytes, 4 * kKiB);
  EXPECT_EQ(shape.pieces, 256U);
  EXPECT_EQ(shape.batches_per_file, 2U);
  const RingLimits tight{.block_bytes = 4 * kKiB, .in_flight = 32, .memory_bytes = kMiB};
  EXPECT_EQ(ring_shape(Order::random, 2, tight).pieces, 32U);
  EXPECT_LE(ring_shape(Order::random, 2, tight).bytes(2), kMiB);
  EXPECT_EQ(ring_shape(Order::sequential, 1, limits).bytes(1), 256 * kKiB);
}

TEST(RingShape, StaysWithinItsMemory) {
  const RingLimits limits{.block_bytes = 16 * kMiB, .in_flight = 128, .memory_bytes = 512 * kMiB};
  EXPECT_LE(ring_shape(Order::sequential, 1, limits).bytes(1), 512 * kMiB);
}

TEST(LapShape, HoldsWholeFilesWhereMemoryAllows) {
  const RingLimits limits{.block_bytes = kMiB, .in_flight = 32, .memory_bytes = kGiB};
  EXPECT_GE(lap_shape(Order::sequential, 2, 100 * kMiB + 1, limits).bytes(2), 2 * (100 * kMiB + 1));
  EXPECT_LE(lap_shape(Order::sequential, 2, 100 * kMiB + 1, limits).bytes(2), 2 * 120 * kMiB);
  EXPECT_LE(lap_shape(Order::random, 2, 100 * kGiB, limits).bytes(2), kGiB);
  EXPECT_EQ(lap_shape(Order::random, 1, 1, limits).batches_per_file, 1U);
}

}  // namespace
}  // namespace trunkline::cli
