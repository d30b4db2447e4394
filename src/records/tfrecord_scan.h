// TFRecord: a record is its length (8 bytes, little-endian), the masked CRC-32C of these bytes (4), the data,
// and the masked CRC-32C of the data (4).
#pragma once

#include <cstdint>
#include <string>

#include "records/scan.h"
#include "records/source.h"
#include "trunkline/error.h"

namespace trunkline::records {

inline constexpr std::uint64_t kTfrecordHeadBytes = 12;
inline constexpr std::uint64_t kTfrecordTailBytes = 4;

// The form in which TFRecord files store a CRC-32C.
constexpr std::uint32_t masked_crc(std::uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xa282ead8U; }

// Finds the records, with heads and tails. Verifies the checksums of lengths, and that all records are within
// the file; not the data. `path` is for messages.
Result<Ranges> scan_tfrecords(Source& source, const std::string& path, const ScanOptions& options);

}  // namespace trunkline::records
