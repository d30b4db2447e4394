#include "records/tfrecord_framing.h"

#include <fmt/format.h>

#include <cstring>

#include "trunkline/checksum.h"

namespace trunkline::records {
namespace {

template <class T>
T load(std::span<const std::byte> bytes) {
  T value{};  // little endian, as is the machine
  std::memcpy(&value, bytes.data(), sizeof(value));
  return value;
}

std::unexpected<Error> damaged(std::string_view what, std::uint64_t offset, std::string_view path) {
  return std::unexpected(
      make_error(ErrorKind::corrupt,
                 fmt::format("{}: the record at offset {} is damaged: {}", path, offset, what), path));
}

}  // namespace

Status check_tfrecord(std::span<const std::byte> record, std::uint64_t offset, std::string_view path) {
  constexpr std::uint64_t kFraming = kTfrecordHeadBytes + kTfrecordTailBytes;
  if (record.size() < kFraming) return damaged("it is shorter than its framing", offset, path);
  if (load<std::uint32_t>(record.subspan(8)) != masked_crc(crc32c(record.first(8))))
    return damaged("the checksum of its length does not match", offset, path);
  const auto length = load<std::uint64_t>(record);
  if (length != record.size() - kFraming)
    return damaged(
        fmt::format("its length is {}, and was {} when it was indexed", length, record.size() - kFraming),
        offset, path);
  const std::span<const std::byte> payload = record.subspan(kTfrecordHeadBytes, length);
  if (load<std::uint32_t>(record.subspan(kTfrecordHeadBytes + length)) != masked_crc(crc32c(payload)))
    return damaged("the checksum of its data does not match", offset, path);
  return {};
}

}  // namespace trunkline::records
