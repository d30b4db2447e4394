// The files that units are stored in: starts reading units, and verifies what has arrived.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "stream/file_versions.h"
#include "trunkline/stream.h"

namespace trunkline {

// Thread-safe.
class UnitSource {
 public:
  UnitSource(const Engine& engine, std::vector<File> files, std::vector<StreamUnit> units,
             StreamVerify verify);

  const Engine& engine() const { return engine_; }
  const std::vector<StreamUnit>& units() const { return units_; }
  StreamVerify verify() const { return verify_; }

  Status check_unit(std::size_t unit) const;  // invalid_argument unless there is such a unit

  // Records the state of all files: modifications are noticed from now on. Call it once, before any read.
  Status begin();

  // The version of the unit's files: it grows when one of them was modified. 0 where that does not matter.
  Result<std::uint64_t> version_of(std::size_t unit);

  // The reads of a unit into its memory, one for each part.
  void add_reads(std::size_t unit, std::byte* memory, std::vector<Request>& requests) const;

  // Verifies the checksums of a unit of this file version. corrupt where one differs, or is missing though
  // the files were modified.
  Status check_sums(std::size_t unit, const std::byte* memory, std::uint64_t file_version) const;

 private:
  const Engine engine_;
  const std::vector<File> files_;
  const std::vector<StreamUnit> units_;
  const StreamVerify verify_;
  FileVersions versions_;
};

// The bytes of a unit's parts, as opposed to those of its memory.
std::uint64_t stored_bytes(const StreamUnit& unit);

// Whether the units make sense: parts within files and units, nothing empty or overlapping.
Status check_units(std::span<const File> files, std::span<const StreamUnit> units);

}  // namespace trunkline
