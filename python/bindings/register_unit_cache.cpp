#include <nanobind/stl/pair.h>

#include <memory>
#include <utility>

#include "arguments.h"
#include "bindings.h"
#include "engine_object.h"
#include "errors.h"
#include "interruptible.h"
#include "os/fork_generation.h"
#include "stats_dict.h"
#include "stream_arguments.h"
#include "trunkline/unit_cache.h"

namespace trunkline::python {

using namespace nb::literals;

namespace {

using CacheUnitArgument = std::tuple<UnitArgument, std::size_t, std::size_t>;
using UseArgument = std::pair<std::size_t, std::uint64_t>;

class UnitCacheObject {
 public:
  UnitCacheObject(const std::vector<nb::object>& files_value, const std::vector<CacheUnitArgument>& units,
                  nb::handle memory_bytes, std::size_t read_ahead, std::vector<double> use_rates,
                  nb::handle verify, nb::handle engine)
      : generation_(os::fork_generation()) {
    UnitCacheOptions options{
        .verify = verify_argument(verify), .read_ahead = read_ahead, .use_rates = std::move(use_rates)};
    if (const auto bytes = optional_size_argument(memory_bytes, "memory_bytes"))
      options.memory_bytes = *bytes;
    std::vector<CacheUnit> wanted;
    for (const auto& [unit, group, pool] : units)
      wanted.push_back({.unit = unit_argument(unit), .group = group, .pool = pool});
    std::vector<File> files = files_argument(files_value);
    const Engine used = engine_or_default(engine);
    auto opened = [&] {
      const GilReleased unlocked;
      return UnitCache::open(used, std::move(files), std::move(wanted), options);
    }();
    cache_ = std::make_unique<UnitCache>(unwrap(std::move(opened)));
  }
  UnitCacheObject(const UnitCacheObject&) = delete;
  UnitCacheObject& operator=(const UnitCacheObject&) = delete;
  ~UnitCacheObject() {
    if (generation_ != os::fork_generation()) {
      static_cast<void>(cache_.release());  // its transfers are the parent's
      return;
    }
    const GilReleased unlocked;  // waits for reads in flight
    cache_.reset();
  }

  UnitCache& cache() { return *cache_; }

  void request(std::size_t group, const std::vector<UseArgument>& uses, std::uint64_t tokens,
               const std::vector<std::size_t>& expected) {
    std::vector<UnitUse> wanted;
    for (const auto& [unit, unit_tokens] : uses) wanted.push_back({.unit = unit, .tokens = unit_tokens});
    Status status = [&] {
      const GilReleased unlocked;  // may have to wait for room in the engine's queue
      return cache_->request(group, wanted, tokens, expected);
    }();
    unwrap(std::move(status));
  }

  std::pair<std::size_t, std::uint64_t> acquire(const std::vector<std::size_t>& units) {
    const UnitCache::Acquired acquired =
        unwrap(on_main_thread() ? acquire_interruptibly(units) : acquire_here(units));
    return {acquired.unit, static_cast<std::uint64_t>(acquired.memory.data - cache_->memory().data)};
  }

  void release(std::size_t unit) {
    Status status = [&] {
      const GilReleased unlocked;
      return cache_->release(unit);
    }();
    unwrap(std::move(status));
  }

 private:
  Result<UnitCache::Acquired> acquire_here(const std::vector<std::size_t>& units) {
    const GilReleased unlocked;
    return cache_->acquire(units);
  }
  Result<UnitCache::Acquired> acquire_interruptibly(const std::vector<std::size_t>& units) {
    while (true) {
      Result<UnitCache::Acquired> acquired = [&] {
        const GilReleased unlocked;
        return cache_->acquire(units, kSignalLatency);
      }();
      if (acquired || acquired.error().kind != ErrorKind::timed_out) return acquired;
      check_signals();
    }
  }

  const unsigned generation_;
  std::unique_ptr<UnitCache> cache_;
};

StreamMemoryObject* memory_of(nb::handle_t<UnitCacheObject> self) {
  return new StreamMemoryObject{nb::borrow(self), nb::cast<UnitCacheObject&>(self).cache().memory()};
}

constexpr StatsField<UnitCacheStats> kCacheStats[] = {
    {"requests", &UnitCacheStats::requests},
    {"hits", &UnitCacheStats::hits},
    {"misses", &UnitCacheStats::misses},
    {"units_read", &UnitCacheStats::units_read},
    {"bytes_read", &UnitCacheStats::bytes_read},
    {"evictions", &UnitCacheStats::evictions},
    {"acquired", &UnitCacheStats::acquired},
    {"waited", &UnitCacheStats::waited},
    {"wait_seconds", &UnitCacheStats::wait_ns, true},
    {"verify_seconds", &UnitCacheStats::verify_ns, true},
    {"read_seconds", &UnitCacheStats::read_ns, true},
    {"failed", &UnitCacheStats::failed},
};

constexpr StatsField<UnitGroupStats> kGroupStats[] = {
    {"requests", &UnitGroupStats::requests},     {"hits", &UnitGroupStats::hits},
    {"misses", &UnitGroupStats::misses},         {"units_read", &UnitGroupStats::units_read},
    {"bytes_read", &UnitGroupStats::bytes_read}, {"evictions", &UnitGroupStats::evictions},
};

nb::dict stats_of(UnitCacheObject& self) { return stats_dict(self.cache().stats(), kCacheStats); }

nb::list group_stats_of(UnitCacheObject& self) {
  nb::list list;
  for (const UnitGroupStats& stats : self.cache().group_stats()) list.append(stats_dict(stats, kGroupStats));
  return list;
}

nb::dict dict_of(const CachePlacement& placement) {
  nb::dict dict;
  dict["slots"] = nb::cast(placement.slots);
  dict["slot_bytes"] = nb::cast(placement.slot_bytes);
  dict["memory_bytes"] = placement.memory_bytes;
  return dict;
}

nb::dict place(const std::vector<std::uint64_t>& unit_bytes, const std::vector<std::size_t>& pools,
               nb::handle memory_bytes) {
  if (pools.size() != unit_bytes.size()) raise_value_error("pools: must have one element for each unit");
  return dict_of(unwrap(place_pools(unit_bytes, pools, size_argument(memory_bytes, "memory_bytes"))));
}

}  // namespace

void register_unit_cache(nb::module_& module) {
  nb::class_<UnitCacheObject>(
      module, "UnitCache", nb::is_weak_referenceable(),
      "Weights larger than memory of which each step uses few: units of files, read when a step requests\n"
      "them; those that are used most stay in memory. Thread-safe.\n\n"
      "files: open for reading. units: (unit as of WeightStream, group, pool) each: a step chooses among "
      "the\n"
      "units of a group, and units of a pool share slots. memory_bytes: bound on all slots (int or str; "
      "None:\n"
      "all units stay). read_ahead: how many units of each pool are read for a request before the first of\n"
      "them has been used. use_rates: what use_rates() of an earlier cache of these units returned. verify: "
      "as of WeightStream. Raises OutOfBudget, naming the least, if two slots "
      "for\n"
      "each pool do not fit.")
      .def(nb::init<const std::vector<nb::object>&, const std::vector<CacheUnitArgument>&, nb::handle,
                    std::size_t, std::vector<double>, nb::handle, nb::handle>(),
           "files"_a, "units"_a, nb::kw_only(), "memory_bytes"_a = nb::none(), "read_ahead"_a = 16,
           "use_rates"_a = nb::list(), "verify"_a = "once", "engine"_a = nb::none(),
           nb::sig("def __init__(self, files: collections.abc.Sequence[File], units: "
                   "collections.abc.Sequence[tuple[tuple[str, int, collections.abc.Sequence[tuple[int, int, "
                   "int, int, int | None]]], int, int]], *, memory_bytes: int | str | None = None, "
                   "read_ahead: int = 16, use_rates: collections.abc.Sequence[float] = (), verify: "
                   "typing.Literal['never', 'once', 'always'] = 'once', "
                   "engine: Engine | None = None) -> None"))
      .def("request", &UnitCacheObject::request, "group"_a, "uses"_a, "tokens"_a = 1,
           "expected"_a = nb::list(),
           nb::sig(
               "def request(self, group: int, uses: collections.abc.Sequence[tuple[int, int]], tokens: int "
               "= 1, expected: collections.abc.Sequence[int] = ()) -> None"),
           "A step of `tokens` tokens will use these units of a group: (unit, how many tokens use it) each,\n"
           "about in this order. Reads those that are not in memory, then `expected` ones.")
      .def("acquire", &UnitCacheObject::acquire, "units"_a,
           nb::sig("def acquire(self, units: collections.abc.Sequence[int]) -> tuple[int, int]"),
           "Waits until one of the units is in memory: (the unit, offset in `memory`). Ctrl-C ends the "
           "wait.\n\n"
           "Raises the error of reading it; acquiring again reads again.")
      .def("release", &UnitCacheObject::release, "unit"_a, "Allows the unit's memory to be reused.")
      .def_prop_ro("memory", &memory_of, nb::rv_policy::take_ownership,
                   nb::for_getter(nb::sig("def memory(self) -> StreamMemory")), "The memory of all slots.")
      .def_prop_ro(
          "placement", [](UnitCacheObject& self) { return dict_of(self.cache().placement()); },
          nb::for_getter(nb::sig("def placement(self) -> dict[str, typing.Any]")),
          "\"slots\" and \"slot_bytes\" of each pool, and \"memory_bytes\" of all slots.")
      .def("stats", &stats_of, nb::sig("def stats(self) -> dict[str, float]"),
           "Counts, bytes and seconds since the cache was opened.")
      .def("group_stats", &group_stats_of, nb::sig("def group_stats(self) -> list[dict[str, int]]"),
           "Those of the counts and bytes that belong to one group each, by group.")
      .def(
          "use_rates", [](UnitCacheObject& self) { return self.cache().use_rates(); },
          nb::sig("def use_rates(self) -> list[float]"),
          "For each unit a number from 0 to 1 that grows with the share of its group's tokens that used it.");
  module.def("place_pools", &place, "unit_bytes"_a, "pools"_a, "memory_bytes"_a.none(),
             nb::sig("def place_pools(unit_bytes: collections.abc.Sequence[int], pools: "
                     "collections.abc.Sequence[int], memory_bytes: int | str) -> dict[str, typing.Any]"),
             "What UnitCache.placement would be. Raises OutOfBudget, naming the least budget.");
}

}  // namespace trunkline::python
