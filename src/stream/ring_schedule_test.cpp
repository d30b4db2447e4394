// Table tests of a slot ring's decisions.
#include "stream/ring_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace trunkline {
namespace {

using State = SlotUse::State;
using Units = std::vector<std::size_t>;
constexpr std::size_t kNoUnit = RingSchedule::kNone;

TEST(RingSchedule, FetchesInCyclicOrder) {
  RingSchedule schedule(3);
  for (const std::size_t unit : {0, 1, 2, 0, 1}) EXPECT_EQ(schedule.take_next(), unit);
  EXPECT_EQ(schedule.next(), 2U);
  EXPECT_EQ(schedule.next(), 2U) << "next() should not consume it";
}

TEST(RingSchedule, SkipsUnitsThatHaveALocation) {
  RingSchedule schedule(4);
  for (const std::size_t unit : {0, 2}) schedule.set_location(unit, 7);
  EXPECT_EQ(schedule.take_next(), 1U);
  EXPECT_EQ(schedule.take_next(), 3U);
  for (const std::size_t unit : {1, 3}) schedule.set_location(unit, 7);
  EXPECT_EQ(schedule.next(), kNoUnit);
  EXPECT_EQ(schedule.take_next(), kNoUnit);
  schedule.set_location(2, kNoUnit);
  EXPECT_EQ(schedule.next(), 2U);
  EXPECT_EQ(schedule.location(1), 7U);
}

TEST(RingSchedule, WithoutUnitsNothingIsFetched) { EXPECT_EQ(RingSchedule(0).next(), kNoUnit); }

TEST(RingSchedule, ANewOrderKeepsTheUnitThatIsFetchedNext) {
  RingSchedule schedule(4);
  EXPECT_EQ(schedule.take_next(), 0U);
  schedule.set_order({3, 1, 0, 2});
  for (const std::size_t unit : {1, 0, 2, 3}) EXPECT_EQ(schedule.take_next(), unit);
}

TEST(RingSchedule, MovesToAUnitAndReportsWhetherThatIsAChange) {
  RingSchedule schedule(4);
  EXPECT_TRUE(schedule.move_to(2));
  EXPECT_FALSE(schedule.move_to(2));
  EXPECT_EQ(schedule.take_next(), 2U);
  EXPECT_TRUE(schedule.move_to(2));
}

TEST(RingSchedule, DistancesCountOnlyUnitsThatUseSlots) {
  struct Case {
    std::vector<bool> resident;
    std::size_t from, to, distance;
  };
  const std::vector<Case> cases = {
      {{}, 0, 0, 0},
      {{}, 0, 3, 3},
      {{}, 3, 0, 1},
      {{}, 2, 1, 3},
      {{false, true, false, true}, 0, 2, 1},
      {{false, true, false, true}, 2, 0, 1},
      {{false, true, false, true}, 1, 2, 0},  // the unit needed after a resident one
      {{false, false, true, false}, 0, 3, 2},
  };
  for (const Case& each : cases)
    EXPECT_EQ(RingSchedule(4, each.resident).distance(each.from, each.to), each.distance)
        << each.from << " to " << each.to;
  RingSchedule reordered(4);
  reordered.set_order({3, 2, 1, 0});
  EXPECT_EQ(reordered.distance(3, 0), 3U);
}

TEST(RingSchedule, SlotsBehindAreThoseUsedLaterThanThereAreSlots) {
  const RingSchedule schedule(6);
  const std::vector<SlotUse> slots = {
      {State::evictable, 2}, {State::evictable, 0}, {State::in_use, 0}, {State::evicting, 0}};
  EXPECT_EQ(schedule.slots_behind(1, slots), Units{1});
  EXPECT_EQ(schedule.slots_behind(2, slots), (Units{1})) << "distance 4, and 4 slots";
  EXPECT_EQ(schedule.slots_behind(3, slots), Units{0});
  EXPECT_EQ(schedule.slots_behind(0, slots), Units{});
  EXPECT_EQ(schedule.slots_behind(0, {}), Units{});
}

TEST(RingSchedule, TheUnitThatIsUsedLastIsEvicted) {
  const RingSchedule schedule(5);
  struct Case {
    std::vector<SlotUse> slots;
    std::optional<std::size_t> expected;
  };
  const std::vector<Case> cases = {
      {{{State::evictable, 2}, {State::evictable, 0}}, 1},
      {{{State::evictable, 0}, {State::evictable, 2}}, 0},
      {{{State::evictable, 2}, {State::in_use, 0}}, 0},
      {{{State::in_use, 2}, {State::in_use, 0}}, std::nullopt},
      {{{State::evictable, 2}, {State::empty}}, std::nullopt},
      {{{State::evictable, 2}, {State::evicting, 0}}, std::nullopt},
      {{}, std::nullopt},
  };
  for (std::size_t i = 0; i < cases.size(); ++i)
    EXPECT_EQ(schedule.slot_to_evict(1, cases[i].slots), cases[i].expected) << "case " << i;
}

// Compares a ring that follows the schedule with one that knows the whole order: units used in order are
// fetched once a cycle, and a slot is never given to a unit that is used later than another one that waits.
TEST(RingSchedule, ARingServesRandomOrdersWithoutFetchingAUnitTwice) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    const std::size_t units = 3 + random() % 8;
    const std::size_t slot_count = 2 + random() % (units - 1);
    Units order(units);
    std::iota(order.begin(), order.end(), 0);
    std::ranges::shuffle(order, random);
    RingSchedule schedule(units);
    schedule.set_order(order);
    schedule.move_to(order[0]);
    std::vector<SlotUse> slots(slot_count);
    std::size_t fetched = 0;
    const auto fetch_ahead = [&] {
      while (schedule.next() != kNoUnit) {
        const auto slot = std::ranges::find(slots, State::empty, &SlotUse::state);
        if (slot == slots.end()) return;
        const std::size_t unit = schedule.take_next();
        *slot = {State::evictable, unit};
        schedule.set_location(unit, static_cast<std::size_t>(slot - slots.begin()));
        ++fetched;
      }
    };
    fetch_ahead();
    for (std::size_t use = 0; use < 3 * units; ++use) {
      const std::size_t unit = order[use % units];
      ASSERT_NE(schedule.location(unit), kNoUnit) << "fetched ahead of its use";
      slots[schedule.location(unit)].state = State::in_use;
      EXPECT_TRUE(schedule.slots_behind(unit, slots).empty());
      slots[schedule.location(unit)] = {};
      schedule.set_location(unit, kNoUnit);
      fetch_ahead();
    }
    EXPECT_EQ(fetched, slot_count + 3 * units);
  }
}

}  // namespace
}  // namespace trunkline
