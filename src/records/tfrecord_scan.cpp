#include "records/tfrecord_scan.h"

#include <fmt/format.h>

#include <bit>
#include <cstring>
#include <span>
#include <utility>

#include "records/window_reader.h"
#include "trunkline/checksum.h"

namespace trunkline::records {
namespace {

static_assert(std::endian::native == std::endian::little);

template <class T>
T load(std::span<const std::byte> bytes, std::size_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

bool is_gzip(std::span<const std::byte> head) { return load<std::uint16_t>(head, 0) == 0x8b1f; }

Error error_at(ErrorKind kind, const std::string& path, std::uint64_t offset, std::string_view why) {
  return make_error(kind, fmt::format("{}: at byte {}: {}", path, offset, why), path);
}

// The length of a record with head and tail.
Result<std::uint64_t> record_bytes(std::span<const std::byte> head, std::uint64_t left,
                                   const std::string& path, std::uint64_t offset) {
  const auto length = load<std::uint64_t>(head, 0);
  if (masked_crc(crc32c(head.first(sizeof length))) != load<std::uint32_t>(head, sizeof length)) {
    if (offset != 0) {
      return std::unexpected(error_at(ErrorKind::corrupt, path, offset,
                                      "the length of the record contradicts its checksum, so that no further "
                                      "record can be found"));
    }
    if (is_gzip(head)) {
      return std::unexpected(error_at(ErrorKind::unsupported, path, offset,
                                      "the file is compressed by gzip, which random access does not allow; "
                                      "decompress it"));
    }
    return std::unexpected(error_at(ErrorKind::format, path, offset,
                                    "not a TFRecord file, or a damaged one, which must be copied or written "
                                    "again: the length of the first record contradicts its checksum"));
  }
  if (length > left - kTfrecordHeadBytes - kTfrecordTailBytes) {
    return std::unexpected(error_at(
        ErrorKind::corrupt, path, offset,
        fmt::format("the record is truncated: it has {} bytes of data, but the file ends {} bytes after the "
                    "beginning of the record",
                    length, left)));
  }
  return kTfrecordHeadBytes + length + kTfrecordTailBytes;
}

}  // namespace

Result<Ranges> scan_tfrecords(Source& source, const std::string& path, const ScanOptions& options) {
  Ranges found;
  WindowReader reader(source);
  std::uint64_t offset = 0;
  while (offset < reader.size()) {
    if (stopped(options)) return std::unexpected(stopped_error(path));
    const std::uint64_t left = reader.size() - offset;
    Result<std::uint64_t> bytes = 0;
    if (left < kTfrecordHeadBytes + kTfrecordTailBytes) {
      bytes =
          std::unexpected(error_at(ErrorKind::corrupt, path, offset,
                                   fmt::format("only {} bytes are left, too few for a record: the file is "
                                               "probably truncated",
                                               left)));
    } else {
      const auto head = reader.at(offset, kTfrecordHeadBytes);
      if (!head) return std::unexpected(head.error());
      bytes = record_bytes(*head, left, path, offset);
    }
    if (!bytes) {
      if (options.on_damage == OnDamage::fail) return std::unexpected(std::move(bytes.error()));
      found.skipped.push_back({offset, std::move(bytes.error().message)});
      break;
    }
    found.offsets.push_back(offset);
    found.lengths.push_back(*bytes);
    offset += *bytes;
  }
  return found;
}

}  // namespace trunkline::records
