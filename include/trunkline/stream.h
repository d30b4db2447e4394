// Weights larger than memory: read ahead, over and over, in the order in which a model uses them.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "trunkline/engine.h"
#include "trunkline/file.h"

namespace trunkline {

// Some bytes of a unit: where they are stored, and where in the unit's memory they belong. They are read
// without a copy where `offset` and `at` are congruent modulo the device's alignment.
struct StreamPart {
  std::size_t file = 0;      // index among the stream's files
  std::uint64_t offset = 0;  // bytes from the file's start
  std::uint64_t bytes = 0;
  std::uint64_t at = 0;                        // bytes from the start of the unit's memory
  std::optional<std::uint32_t> checksum = {};  // CRC-32C
};

// What is read, used and released as a whole: a decoder layer, or a piece of one.
struct StreamUnit {
  std::string name;         // for errors
  std::uint64_t bytes = 0;  // of memory; all parts lie in it, and do not overlap
  std::vector<StreamPart> parts;
};

// Which units stay in memory, and the slots that the others are read into.
struct StreamPlacement {
  std::vector<bool> resident;      // by unit
  std::size_t slots = 0;           // none when all units stay
  std::uint64_t slot_bytes = 0;    // of the largest unit that does not stay, rounded up to pages
  std::uint64_t memory_bytes = 0;  // of resident units and slots together
};

// Places units of these sizes in at most `memory_bytes`. The units are scanned cyclically, so a fixed set
// stays resident rather than the most recently used ones; it is spread evenly over the cycle, so that the
// rest is read at an even rate. Fails with out_of_budget when two slots do not fit; the message says how much
// suffices.
Result<StreamPlacement> place_units(std::span<const std::uint64_t> unit_bytes, std::uint64_t memory_bytes,
                                    std::size_t slots = 2);

enum class StreamVerify {
  never,
  once,    // each unit when it is read for the first time, and again whenever its files were modified
  always,  // each time
};

struct StreamOptions {
  std::uint64_t memory_bytes = std::numeric_limits<std::uint64_t>::max();  // resident units and slots
  std::size_t slots = 2;  // at least; one is used while the others are read
  StreamVerify verify = StreamVerify::once;
  // Device memory: units are handed out from as many slots as fit in it, at least two, into which they are
  // copied ahead of their use. The memory must stay valid until the stream is destroyed; work that is queued
  // on its `stream` when the WeightStream is opened comes first.
  MemoryView device_memory = {};
};

// Where the parts of a unit begin in device memory, from the unit's start: at multiples of 512.
std::vector<std::uint64_t> device_layout(const StreamUnit& unit);

// The size of each slot in device memory.
std::uint64_t device_slot_bytes(std::span<const StreamUnit> units);

struct StreamStats {
  std::uint64_t units_read = 0;
  std::uint64_t bytes_read = 0;
  std::uint64_t acquired = 0;      // units handed out
  std::uint64_t waited = 0;        // of these, those that the caller had to wait for
  std::uint64_t wait_ns = 0;       // time spent waiting for storage
  std::uint64_t verify_ns = 0;     // time spent on checksums
  std::uint64_t read_ns = 0;       // time during which anything was being read
  std::uint64_t unused = 0;        // units whose read-ahead was evicted before they were used
  std::uint64_t failed = 0;        // units that could not be read
  std::uint64_t bytes_copied = 0;  // to a device
};

class StreamCore;  // src/stream/stream_core.h
class UploadRing;  // src/stream/upload_ring.h

// Units are acquired in their order, cyclically; the next ones are read meanwhile, wrapping around at the end
// of the cycle. Another order works too, at the cost of waiting for the disk. Every member function is
// thread-safe. Movable, not copyable; destruction cancels reads in flight and waits for them.
class WeightStream {
 public:
  // Starts reading. Fails with invalid_argument for inconsistent units, and with out_of_budget when their
  // slots do not fit in memory_bytes or the engine's budget.
  static Result<WeightStream> open(const Engine& engine, std::vector<File> files,
                                   std::vector<StreamUnit> units, const StreamOptions& options = {});

  WeightStream(WeightStream&&) noexcept;
  WeightStream& operator=(WeightStream&&) noexcept;
  ~WeightStream();

  // The unit's memory, valid to read until its release. Waits for this unit only. A failed read is reported
  // here, once: acquiring the unit again reads it again, and so does acquiring others that were read ahead of
  // it. corrupt when bytes do not match their checksum; timed_out when they did not arrive in time (they
  // still will); invalid_argument when all slots hold acquired units. A unit that is acquired several times
  // must be released as often; in device memory, a unit can be acquired only once at a time.
  Result<MemoryView> acquire(std::size_t unit,
                             std::optional<std::chrono::nanoseconds> timeout = std::nullopt);

  // Frees the unit's memory for the next one. invalid_argument when it is not acquired. In device memory:
  // once the work now queued on `stream` (null: its default stream) has finished.
  Status release(std::size_t unit, void* stream = nullptr);

  // Sets the order in which units will be acquired from now on; each unit appears once.
  Status set_order(std::vector<std::size_t> order);

  // The memory that units are handed out from: the slots, and the resident units; either may be empty. With
  // device_memory: that memory.
  std::span<const MemoryView> memory() const;

  const std::vector<StreamUnit>& units() const;
  const StreamPlacement& placement() const;
  StreamStats stats() const;

 private:
  WeightStream(std::unique_ptr<StreamCore> core, std::unique_ptr<UploadRing> ring);

  std::unique_ptr<StreamCore> core_;
  std::unique_ptr<UploadRing> ring_;  // of units in device memory; uses the core
};

}  // namespace trunkline
