// The actions behind the commands of `trunkline checkpoint`; each returns its exit status.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace trunkline::cli {

struct CheckpointArguments {
  std::string directory;
  std::optional<std::uint64_t> step;  // default: the latest
  bool all = false;
  bool all_nodes = false;
  bool dry_run = false;
  bool orphaned = false;
  bool json = false;
};

int list_checkpoints(const CheckpointArguments& arguments);
int show_checkpoint(const CheckpointArguments& arguments);
int verify_checkpoints(const CheckpointArguments& arguments);
int collect_debris(const CheckpointArguments& arguments);
int adopt_volumes(const CheckpointArguments& arguments);

}  // namespace trunkline::cli
