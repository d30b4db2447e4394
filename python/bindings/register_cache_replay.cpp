#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "bindings.h"
#include "errors.h"
#include "gil.h"
#include "stream/cache_replay.h"

namespace trunkline::python {

using namespace nb::literals;

namespace {

using ModuleArgument = std::tuple<std::size_t, std::vector<std::size_t>>;
using StepArgument =
    std::tuple<std::size_t, std::uint64_t, std::vector<std::size_t>, std::vector<std::uint64_t>, bool>;

class CacheReplayObject {
 public:
  CacheReplayObject(const std::vector<ModuleArgument>& modules_value,
                    const std::vector<StepArgument>& steps_value)
      : replay_(made(modules_value, steps_value)) {
    for (const auto& [experts, pools] : modules_value) {
      for (const std::size_t pool : pools) pools_ = std::max(pools_, pool + 1);
    }
  }

  const CacheReplay& replay() const { return replay_; }

  void check_slots(const std::vector<std::size_t>& slots) const {
    if (slots.size() != pools_ || std::ranges::find(slots, 0U) != slots.end())
      raise_value_error("slots: must have a number from 1 for each pool");
  }

 private:
  static CacheReplay made(const std::vector<ModuleArgument>& modules_value,
                          const std::vector<StepArgument>& steps_value) {
    std::vector<ReplayModule> modules;
    for (const auto& [experts, pools] : modules_value)
      modules.push_back({.experts = experts, .pools = pools});
    std::vector<ReplayStep> steps;
    steps.reserve(steps_value.size());
    for (const auto& [module, tokens, experts, counts, expects_next] : steps_value) {
      if (counts.size() != experts.size())
        raise_value_error("steps: counts must have one element for each expert");
      ReplayStep& step = steps.emplace_back(
          ReplayStep{.module = module, .tokens = tokens, .uses = {}, .expects_next = expects_next});
      for (std::size_t index = 0; index < experts.size(); ++index)
        step.uses.push_back({.unit = experts[index], .tokens = counts[index]});
    }
    return unwrap(CacheReplay::create(std::move(modules), std::move(steps)));
  }

  CacheReplay replay_;
  std::size_t pools_ = 0;
};

nb::dict dict_of(const ReplayCounts& counts) {
  nb::dict dict;
  dict["steps"] = counts.steps;
  dict["hits"] = counts.hits;
  dict["misses"] = counts.misses;
  dict["evictions"] = counts.evictions;
  dict["units_read"] = nb::cast(counts.units_read);
  return dict;
}

nb::tuple replay(const CacheReplayObject& self, const std::vector<std::size_t>& slots, std::size_t read_ahead,
                 std::uint64_t tokens) {
  self.check_slots(slots);
  const CacheReplay::Replayed replayed = [&] {
    const GilReleased unlocked;
    return self.replay().replay(slots, read_ahead, tokens);
  }();
  return nb::make_tuple(dict_of(replayed.all), dict_of(replayed.counted));
}

std::uint64_t static_hits(const CacheReplayObject& self, const std::vector<std::size_t>& slots,
                          std::size_t for_misses) {
  self.check_slots(slots);
  const GilReleased unlocked;
  return self.replay().static_hits(slots, for_misses);
}

template <std::uint64_t (CacheReplay::*hits)(std::span<const std::size_t>) const>
std::uint64_t hits_of(const CacheReplayObject& self, const std::vector<std::size_t>& slots) {
  self.check_slots(slots);
  const GilReleased unlocked;
  return (self.replay().*hits)(slots);
}

}  // namespace

void register_cache_replay(nb::module_& module) {
  nb::class_<CacheReplayObject>(
      module, "CacheReplay",
      "What a UnitCache of routed experts would have done for recorded steps. Immutable; thread-safe, and\n"
      "without the GIL.\n\n"
      "modules: (number of experts, the pool of each matrix of an expert) each. steps: (module, tokens, "
      "experts\n"
      "that these used, how many of the tokens used each, whether the next module's experts are read ahead)\n"
      "each. Raises ValueError for modules and experts that do not exist.")
      .def(nb::init<const std::vector<ModuleArgument>&, const std::vector<StepArgument>&>(), "modules"_a,
           "steps"_a,
           nb::sig("def __init__(self, modules: collections.abc.Sequence[tuple[int, "
                   "collections.abc.Sequence[int]]], steps: collections.abc.Sequence[tuple[int, int, "
                   "collections.abc.Sequence[int], collections.abc.Sequence[int], bool]]) -> None"))
      .def("replay", &replay, "slots"_a, "read_ahead"_a, "tokens"_a,
           nb::sig("def replay(self, slots: collections.abc.Sequence[int], read_ahead: int, tokens: int) -> "
                   "tuple[dict[str, typing.Any], dict[str, typing.Any]]"),
           "Counts of all steps with a cache that is empty at first, and of those with so many tokens:\n"
           "\"steps\", \"hits\", \"misses\", \"evictions\", and \"units_read\" of each pool. slots: of each "
           "pool.\n"
           "read_ahead: as of UnitCache.")
      .def("lru_hits", &hits_of<&CacheReplay::lru_hits>, "slots"_a,
           nb::sig("def lru_hits(self, slots: collections.abc.Sequence[int]) -> int"),
           "Hits of a cache that evicts what was not used for longest.")
      .def("lfu_hits", &hits_of<&CacheReplay::lfu_hits>, "slots"_a,
           nb::sig("def lfu_hits(self, slots: collections.abc.Sequence[int]) -> int"),
           "Hits of a cache that evicts what was used least.")
      .def("static_hits", &static_hits, "slots"_a, "for_misses"_a,
           nb::sig("def static_hits(self, slots: collections.abc.Sequence[int], for_misses: int) -> int"),
           "Hits of a fixed choice: what the first half of the steps uses most, but for `for_misses` slots "
           "of\n"
           "each pool that misses pass through.")
      .def_prop_ro(
          "uses", [](const CacheReplayObject& self) { return self.replay().uses(); },
          nb::for_getter(nb::sig("def uses(self) -> int")), "Hits and misses together.")
      .def_prop_ro(
          "used_units", [](const CacheReplayObject& self) { return self.replay().used_units(); },
          nb::for_getter(nb::sig("def used_units(self) -> int")),
          "How many units are used at all: these misses no cache can avoid that is empty at first.");
}

}  // namespace trunkline::python
