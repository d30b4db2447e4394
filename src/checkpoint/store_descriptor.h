// The small file that says that a directory holds checkpoints, and on which volumes their shards lie
// (docs/formats/checkpoint.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "trunkline/error.h"

namespace trunkline::checkpoint {

inline constexpr std::size_t kMaxDescriptorBytes = std::size_t{1} << 20;

struct StoreDescriptor {
  std::string id;  // 16 lower-case hexadecimal digits
  // Directories of this store alone, each named NAME-ID, one on each volume; empty: shards lie with the
  // manifests.
  std::vector<std::string> volumes;
  std::vector<std::string> former_volumes = {};  // those that were given up, and may still hold something
  // Above the commits of all runs that were set aside when this one began: checkpoints with lower ones were
  // moved back from there.
  std::uint64_t first_commit = 1;
  bool operator==(const StoreDescriptor&) const = default;

  // `volumes`, then `former_volumes`: wherever shards of the store may lie besides with the manifests.
  std::vector<std::string> all_volumes() const;

  // Whether the directory can be one of `volumes`, by its name.
  bool owns(std::string_view directory) const;
};

// Fails with invalid_argument where a path is not valid UTF-8.
Result<std::string> format_store_descriptor(const StoreDescriptor& descriptor);

// Takes what format_store_descriptor() writes, byte for byte. `format` for what is not a descriptor of
// version 1 or 2, `corrupt` for one with bytes that have changed. `path` is for the message.
Result<StoreDescriptor> parse_store_descriptor(std::string_view text, const std::string& path);

}  // namespace trunkline::checkpoint
