// The checksums in the metadata of a safetensors file (docs/formats/safetensors-checksums.md). Parsing; no
// I/O.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "format/safetensors.h"
#include "trunkline/error.h"

namespace trunkline::format {

inline constexpr std::string_view kChecksumsKey = "trunkline.crc32c";

// A CRC-32C of each `chunk_bytes` of the data, the last of which may be shorter.
struct SafetensorsChecksums {
  std::uint64_t chunk_bytes = 0;
  std::vector<std::uint32_t> crc32c;
};

// The checksums that were written with this file; nullopt if there are none, as in a file that another
// program made from one of ours, keeping its metadata. `corrupt` if the header or the entry was changed in
// place. `head`: all bytes before the data.
Result<std::optional<SafetensorsChecksums>> find_safetensors_checksums(const Metadata& metadata,
                                                                       std::string_view head,
                                                                       std::uint64_t data_bytes,
                                                                       const std::string& path);

}  // namespace trunkline::format
