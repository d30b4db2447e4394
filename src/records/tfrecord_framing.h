// The framing of a TFRecord: the payload's length and the CRC-32C of that before it, the CRC-32C of the
// payload after it; both checksums "masked" (TensorFlow, core/lib/io/record_writer.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "trunkline/error.h"

namespace trunkline::records {

inline constexpr std::uint64_t kTfrecordHeadBytes = 12;
inline constexpr std::uint64_t kTfrecordTailBytes = 4;

// The form in which TFRecord files store a CRC-32C.
constexpr std::uint32_t masked_crc(std::uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xA282EAD8U; }

// Verifies a whole record: its framing and its payload. `offset` and `path`, where it is stored, are for
// errors
// (`corrupt`).
Status check_tfrecord(std::span<const std::byte> record, std::uint64_t offset, std::string_view path);

}  // namespace trunkline::records
