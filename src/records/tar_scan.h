// WebDataset archives: a sample is the adjacent members of a tar archive whose names are the same up to the
// first dot of the last component.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "records/scan.h"
#include "records/source.h"
#include "trunkline/error.h"

namespace trunkline::records {

// Finds the samples. Each range begins with the first header of a sample and ends with the data of its last
// member. Errors: a sample with two members of one extension, or that is in two places; one with a link,
// whose data are elsewhere; an archive that does not end as tar archives must, so that it may be truncated;
// anything but another archive after its end. Of archives that were concatenated (cat a.tar b.tar) all are
// read. `path` is for messages.
Result<Ranges> scan_tar(Source& source, const std::string& path, const ScanOptions& options);

struct SampleMember {
  std::string extension;  // lower case, as WebDataset makes it
  std::uint64_t begin = 0;
  std::uint64_t bytes = 0;
};

struct TarSample {
  std::string key;
  std::vector<SampleMember> members;
};

// Parses the bytes of one range that scan_tar() found.
Result<TarSample> parse_tar_sample(std::span<const std::byte> bytes, const std::string& path);

}  // namespace trunkline::records
