// The names in a directory of checkpoints (docs/formats/checkpoint.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace trunkline::checkpoint {

inline constexpr std::string_view kDescriptorFile = "trunkline-checkpoints.json";
inline constexpr std::string_view kTiersFile = "trunkline-tiers.json";
inline constexpr std::string_view kLockFile = "lock";
inline constexpr std::string_view kOwnerFile = "home";                // in the directories on volumes
inline constexpr std::string_view kMovedShardsFile = "moved-shards";  // in those of their steps

std::string step_directory(std::uint64_t step);   // "step-00000012"
std::string manifest_file(std::uint64_t commit);  // "manifest-0000000004"
// "shard-00000-of-00004-0123456789abcdef.safetensors"
std::string shard_file(std::uint64_t index, std::uint64_t count, std::string_view nonce);

// The number in a name that the functions above generate; nullopt for any other name.
std::optional<std::uint64_t> step_of(std::string_view name);
std::optional<std::uint64_t> commit_of(std::string_view name);

// Whether shard_file() generates names like this one: such files may be removed when nothing refers to them.
// So may those with names of src/os/temporary_file.h, once their writers are dead.
bool is_shard_file(std::string_view name);
// The parts of such a name; index and count as written in it.
struct ShardName {
  std::uint64_t index = 0;
  std::uint64_t count = 0;
  std::string_view nonce;
};
std::optional<ShardName> shard_of(std::string_view name);

// A folder in the directory that holds an earlier run: "aside-20260131T235959Z", or the same with "-2"
// appended.
std::string aside_directory(std::string_view time, std::uint64_t number);
bool is_aside_directory(std::string_view name);

std::string random_hex(unsigned digits);

}  // namespace trunkline::checkpoint
