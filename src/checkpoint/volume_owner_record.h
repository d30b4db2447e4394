// The file in a volume's directory that says which directory of checkpoints its shards belong to
// (docs/formats/checkpoint.md): its text, without any I/O.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "trunkline/error.h"

namespace trunkline::checkpoint {

// Path for people and for finding it. The inode and the time it was made stay when a directory is renamed and
// are new in every copy of it, so that a copy in the original's place is not taken for the original.
struct VolumeOwner {
  std::string path;
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  std::uint64_t birth = 0;  // nanoseconds since 1970; 0 where the filesystem or the record has none

  bool operator==(const VolumeOwner&) const = default;
  // Of two that are there at the same time. A snapshot of a filesystem has the same inodes and times.
  bool is_same_now(const VolumeOwner& other) const { return device == other.device && inode == other.inode; }
  // Of one that is there and a record. Device numbers change when a filesystem is mounted again, so that they
  // count only without `birth`.
  bool is_same_directory(const VolumeOwner& other) const {
    const bool both = birth != 0 && other.birth != 0;
    return inode == other.inode && (both ? birth == other.birth : device == other.device);
  }
};

std::string format_volume_owner(const VolumeOwner& owner);

// Accepts what format_volume_owner() writes, byte for byte, and version 1, which has no `birth`: `format` for
// another version, `corrupt` for all else. `record` is the file's path, for the message.
Result<VolumeOwner> parse_volume_owner(std::string_view text, const std::string& record);

}  // namespace trunkline::checkpoint
