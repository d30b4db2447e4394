#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "stream/pages.h"
#include "trunkline/stream.h"
#include "trunkline/units.h"

namespace trunkline {
namespace {

// Makes units resident until they hold a share of room / total of the bytes, as evenly as whole units allow.
void spread(std::span<const std::uint64_t> bytes, std::uint64_t total, std::uint64_t& room,
            std::vector<bool>& resident) {
  const double share = static_cast<double>(room) / static_cast<double>(total);
  double owed = 0;
  for (std::size_t unit = 0; unit < bytes.size(); ++unit) {
    owed += share * static_cast<double>(bytes[unit]);
    if (bytes[unit] > room || owed < static_cast<double>(bytes[unit]) / 2) continue;
    resident[unit] = true;
    room -= bytes[unit];
    owed -= static_cast<double>(bytes[unit]);
  }
}

// Gives the remaining room to the largest units that fit.
void fill(std::span<const std::uint64_t> bytes, std::uint64_t& room, std::vector<bool>& resident) {
  std::vector<std::size_t> by_size(bytes.size());
  std::iota(by_size.begin(), by_size.end(), 0);
  std::ranges::sort(by_size, std::ranges::greater{},
                    [&](std::size_t unit) { return std::pair(bytes[unit], bytes.size() - unit); });
  for (const std::size_t unit : by_size) {
    if (resident[unit] || bytes[unit] > room) continue;
    resident[unit] = true;
    room -= bytes[unit];
  }
}

}  // namespace

Result<StreamPlacement> place_units(std::span<const std::uint64_t> unit_bytes, std::uint64_t memory_bytes,
                                    std::size_t slots) {
  std::vector<std::uint64_t> bytes;
  for (const std::uint64_t unit : unit_bytes) bytes.push_back(whole_pages(unit));
  const std::uint64_t total = std::accumulate(bytes.begin(), bytes.end(), std::uint64_t{0});
  StreamPlacement placement{.resident = std::vector<bool>(bytes.size(), total <= memory_bytes)};
  placement.memory_bytes = total;
  if (total <= memory_bytes) return placement;

  const std::uint64_t largest = std::ranges::max(bytes);
  if (memory_bytes / kMinSlots < largest) {
    return std::unexpected(make_error(ErrorKind::out_of_budget,
                                      fmt::format("memory_bytes: {} is too small for two slots of {}, the "
                                                  "size of the largest unit; pass at least {} "
                                                  "bytes ({})",
                                                  format_size(memory_bytes), format_bytes(largest),
                                                  kMinSlots * largest, format_bytes(kMinSlots * largest))));
  }
  placement.slots = std::clamp<std::size_t>(slots, kMinSlots, memory_bytes / largest);
  std::uint64_t room = memory_bytes - placement.slots * largest;
  spread(bytes, total, room, placement.resident);
  fill(bytes, room, placement.resident);
  placement.memory_bytes = 0;
  for (std::size_t unit = 0; unit < bytes.size(); ++unit) {
    if (placement.resident[unit]) {
      placement.memory_bytes += bytes[unit];
    } else {
      placement.slot_bytes = std::max(placement.slot_bytes, bytes[unit]);
    }
  }
  placement.memory_bytes += placement.slots * placement.slot_bytes;
  return placement;
}

}  // namespace trunkline
