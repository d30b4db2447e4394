#include "stream/unit_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/invalid_argument.h"
#include "trunkline/checksum.h"

namespace trunkline {

UnitSource::UnitSource(const Engine& engine, std::vector<File> files, std::vector<StreamUnit> units,
                       StreamVerify verify)
    : engine_(engine),
      files_(std::move(files)),
      units_(std::move(units)),
      verify_(verify),
      versions_(files_) {}

Status UnitSource::check_unit(std::size_t unit) const {
  if (unit < units_.size()) return {};
  return invalid_argument(fmt::format("unit: {} of {}", unit, units_.size()));
}

Status UnitSource::begin() {
  if (verify_ != StreamVerify::once) return {};
  return versions_.begin();
}

Result<std::uint64_t> UnitSource::version_of(std::size_t unit) {
  if (verify_ != StreamVerify::once) return 0;
  std::uint64_t latest = 0;
  std::optional<std::size_t> last;
  for (const StreamPart& part : units_[unit].parts) {
    if (std::exchange(last, part.file) == part.file) continue;
    auto file_version = versions_.version_of(part.file);
    if (!file_version) return file_version;
    latest = std::max(latest, *file_version);
  }
  return latest;
}

void UnitSource::add_reads(std::size_t unit, std::byte* memory, std::vector<Request>& requests) const {
  for (const StreamPart& part : units_[unit].parts) {
    requests.push_back({.op = Op::read,
                        .file = &files_[part.file],
                        .memory = {memory + part.at, part.bytes},
                        .offset = part.offset});
  }
}

Status UnitSource::check_sums(std::size_t unit, const std::byte* memory, std::uint64_t file_version) const {
  const std::string& name = units_[unit].name;
  for (const StreamPart& part : units_[unit].parts) {
    const std::string& path = files_[part.file].path();
    if (!part.checksum) {
      if (file_version == 0) continue;
      return std::unexpected(make_error(
          ErrorKind::corrupt,
          fmt::format("cannot read {} from {}: the file was modified since it was opened, and there is no "
                      "checksum to show whether these bytes were; open it again",
                      name, path),
          path));
    }
    const std::uint32_t found = crc32c({memory + part.at, part.bytes});
    if (found == *part.checksum) continue;
    return std::unexpected(make_error(
        ErrorKind::corrupt,
        fmt::format(
            "reading {}: bytes {} to {} of {} have the checksum {:08x}, but {:08x} was recorded; they "
            "changed after they were written",
            name, part.offset, part.offset + part.bytes, path, found, *part.checksum),
        path));
  }
  return {};
}

std::uint64_t stored_bytes(const StreamUnit& unit) {
  std::uint64_t bytes = 0;
  for (const StreamPart& part : unit.parts) bytes += part.bytes;
  return bytes;
}

Status check_units(std::span<const File> files, std::span<const StreamUnit> units) {
  const auto wrong = [](const StreamUnit& unit, std::string_view what) {
    return std::unexpected(
        make_error(ErrorKind::invalid_argument, fmt::format("units: {} {}", unit.name, what)));
  };
  if (units.empty()) return std::unexpected(make_error(ErrorKind::invalid_argument, "units: there are none"));
  for (const File& file : files) {
    if (!file.valid())
      return std::unexpected(make_error(ErrorKind::invalid_argument, "files: one is not open"));
  }
  for (const StreamUnit& unit : units) {
    if (unit.bytes == 0) return wrong(unit, "is empty");
    std::uint64_t total = 0;
    for (const StreamPart& part : unit.parts) {
      if (part.file >= files.size()) return wrong(unit, "has a part in a file that does not exist");
      if (part.at > unit.bytes || part.bytes > unit.bytes - part.at)
        return wrong(unit, "has a part that reaches past its end");
      if (part.offset + part.bytes < part.offset) return wrong(unit, "has a part past the end of any file");
      total += part.bytes;
      if (total > unit.bytes) return wrong(unit, "has parts that overlap");
    }
  }
  return {};
}

}  // namespace trunkline
