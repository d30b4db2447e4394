#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "device/device.h"
#include "stream/stream_core.h"
#include "stream/unit_source.h"
#include "stream/upload_ring.h"
#include "trunkline/stream.h"
#include "trunkline/units.h"

namespace trunkline {
namespace {

Status check_device_memory(const StreamCore& core, const MemoryView& memory) {
  if (memory.device->host_accessible()) {
    return std::unexpected(
        make_error(ErrorKind::invalid_argument,
                   fmt::format("device_memory: must be memory of a GPU, not of {}", memory.device->name())));
  }
  const std::uint64_t least = 2 * device_slot_bytes(core.units());
  if (memory.bytes >= least) return {};
  return std::unexpected(
      make_error(ErrorKind::out_of_budget, fmt::format("device_memory: {} bytes are too few for two slots of "
                                                       "the largest unit; pass at least {} bytes ({})",
                                                       memory.bytes, least, format_bytes(least))));
}

}  // namespace

Result<WeightStream> WeightStream::open(const Engine& engine, std::vector<File> files,
                                        std::vector<StreamUnit> units, const StreamOptions& options) {
  if (auto sound = check_units(files, units); !sound) return std::unexpected(sound.error());
  std::vector<std::uint64_t> bytes;
  for (const StreamUnit& unit : units) bytes.push_back(unit.bytes);
  auto placement = place_units(bytes, options.memory_bytes, options.slots);
  if (!placement) return std::unexpected(placement.error());
  auto core = std::make_unique<StreamCore>(engine, std::move(files), std::move(units), std::move(*placement),
                                           options.verify);
  std::unique_ptr<UploadRing> ring;
  if (options.device_memory.device != nullptr) {
    if (auto room = check_device_memory(*core, options.device_memory); !room)
      return std::unexpected(room.error());
    ring = std::make_unique<UploadRing>(*core, options.device_memory);
  }
  if (auto started = core->start(); !started) return std::unexpected(started.error());
  if (ring != nullptr) {
    if (auto started = ring->start(); !started) return std::unexpected(started.error());
  }
  log::info(log::Component::stream,
            "streaming {} units: {} stay in memory, the others through {} slots of {}{}",
            core->units().size(), std::ranges::count(core->placement().resident, true),
            core->placement().slots, format_bytes(core->placement().slot_bytes),
            ring ? fmt::format(", uploaded to {}", ring->memory().device->name()) : std::string());
  return WeightStream(std::move(core), std::move(ring));
}

WeightStream::WeightStream(std::unique_ptr<StreamCore> core, std::unique_ptr<UploadRing> ring)
    : core_(std::move(core)), ring_(std::move(ring)) {}
WeightStream::WeightStream(WeightStream&&) noexcept = default;
WeightStream& WeightStream::operator=(WeightStream&& other) noexcept {
  ring_.reset();  // before what it uses
  core_ = std::move(other.core_);
  ring_ = std::move(other.ring_);
  return *this;
}
WeightStream::~WeightStream() = default;

Result<MemoryView> WeightStream::acquire(std::size_t unit, std::optional<std::chrono::nanoseconds> timeout) {
  return ring_ ? ring_->acquire(unit, timeout) : core_->acquire(unit, timeout);
}

Status WeightStream::release(std::size_t unit, void* stream) {
  return ring_ ? ring_->release(unit, stream) : core_->release(unit);
}

Status WeightStream::set_order(std::vector<std::size_t> order) {
  if (auto set = core_->set_order(order); !set) return set;
  if (ring_) ring_->set_order(std::move(order));
  return {};
}

std::span<const MemoryView> WeightStream::memory() const {
  return ring_ ? std::span(&ring_->memory(), 1) : core_->memory();
}

const std::vector<StreamUnit>& WeightStream::units() const { return core_->units(); }

const StreamPlacement& WeightStream::placement() const { return core_->placement(); }

StreamStats WeightStream::stats() const { return ring_ ? ring_->stats() : core_->stats(); }

}  // namespace trunkline
