// The small file that says which directories, called tiers, the checkpoints of a directory are copied to
// (docs/formats/checkpoint.md). The directory is complete without it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "trunkline/error.h"

namespace trunkline::checkpoint {

struct RecordedTier {
  std::string directory;  // absolute
  std::string id;         // of its descriptor; empty: it had none yet
  bool operator==(const RecordedTier&) const = default;
};

struct TierRecord {
  std::string id;  // of the descriptor of the directory that has the record; empty: there is no record
  std::uint64_t identity = 0;  // os::directory_identity() of that directory: a copy of it has another
  std::vector<RecordedTier> tiers;
  bool operator==(const TierRecord&) const = default;
};

// Fails with invalid_argument where a path is not valid UTF-8.
Result<std::string> format_tier_record(const TierRecord& record);

// Takes what format_tier_record() writes, byte for byte. `format` for what is not a record of version 2,
// `corrupt` for one with bytes that have changed. `path` is for the message.
Result<TierRecord> parse_tier_record(std::string_view text, const std::string& path);

}  // namespace trunkline::checkpoint
