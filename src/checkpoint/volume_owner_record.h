// The file in a volume's directory that records which directory of checkpoints owns its shards
// (docs/formats/checkpoint.md): its text, without any I/O.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "trunkline/error.h"

namespace trunkline::checkpoint {

// The path is for people, and for finding the directory. Inode and birth time stay the same when a directory
// is renamed and are new in every copy of it, so a copy in the original's place is not mistaken for the
// original.
struct VolumeOwner {
  std::string path;
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  std::uint64_t birth = 0;  // nanoseconds since 1970; 0 where the filesystem or the record has none

  bool operator==(const VolumeOwner&) const = default;
  // Compares two that exist at the same time. A snapshot of a filesystem has the same inodes and times.
  bool is_same_now(const VolumeOwner& other) const { return device == other.device && inode == other.inode; }
  // Compares an existing one with a record. Device numbers change when a filesystem is mounted again, so they
  // count only without `birth`.
  bool is_same_directory(const VolumeOwner& other) const {
    const bool both = birth != 0 && other.birth != 0;
    return inode == other.inode && (both ? birth == other.birth : device == other.device);
  }
};

std::string format_volume_owner(const VolumeOwner& owner);

// Accepts what format_volume_owner() writes, byte for byte, and version 1, which has no `birth`: `format` for
// another version, `corrupt` for everything else. `record` is the file's path, for the message.
Result<VolumeOwner> parse_volume_owner(std::string_view text, const std::string& record);

}  // namespace trunkline::checkpoint
