// Where the shards of a save go.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/directory_ops.h"
#include "checkpoint/held_directories.h"
#include "checkpoint/manifest.h"
#include "checkpoint/store_descriptor.h"
#include "trunkline/error.h"

namespace trunkline::checkpoint {

// What the manifest of the save says of them as well, once bytes and checksums are known.
struct Placement {
  std::vector<std::string> volumes;  // Manifest::volumes
  std::vector<Shard> shards;         // volume and file
  std::vector<std::string> paths;    // of each shard
  std::string nonce;                 // in the names of the shards
  // Files of the checkpoint of this step that this save replaces: shards and manifest get their access
  // rights. Empty: there is none.
  std::string replaced_shard;
  std::string replaced_manifest;
  bool directory_was_replaced = false;  // since what was loaded and saved before: was_replaced()
};

// `shards` of these: how many on each volume, one number without volumes.

// Fails with invalid_argument for a step or numbers that no save can have.
Status check_can_place(const StoreDescriptor& descriptor, std::uint64_t step,
                       std::span<const std::uint64_t> shards);

// In the directory of checkpoints, and on each volume that gets shards; durably.
Status make_step_directories(const std::string& directory, const StoreDescriptor& descriptor,
                             std::uint64_t step, std::span<const std::uint64_t> shards,
                             const DirectoryOps& ops);

// Those that were made, first the one that the manifest goes into.
Result<HeldDirectories> hold_step_directories(const std::string& directory, const StoreDescriptor& descriptor,
                                              std::uint64_t step, std::span<const std::uint64_t> shards);

// Under names that no other save has.
Placement place_shards(const std::string& directory, const StoreDescriptor& descriptor, std::uint64_t step,
                       std::span<const std::uint64_t> shards);

}  // namespace trunkline::checkpoint
