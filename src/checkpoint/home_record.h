// The file in a volume's directory that says which directory of checkpoints its shards belong to
// (docs/formats/checkpoint.md): its text, without any I/O.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "trunkline/error.h"

namespace trunkline::checkpoint {

// Path for people and for finding it; device and inode because one directory has many paths.
struct Home {
  std::string path;
  std::uint64_t device = 0;
  std::uint64_t inode = 0;

  bool operator==(const Home&) const = default;
  bool is_same_directory(const Home& other) const { return device == other.device && inode == other.inode; }
};

std::string format_home(const Home& home);

// Takes what format_home() writes, byte for byte: `format` for another version, `corrupt` for all else.
// `record` is the file's path, for the message.
Result<Home> parse_home(std::string_view text, const std::string& record);

}  // namespace trunkline::checkpoint
