// What `trunkline tune` found out: the settings that are fastest for files on one device, or on several that
// are used as one.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "trunkline/engine.h"

namespace trunkline::tuning {

// A setting that is not given is that of an engine with default options.
struct Settings {
  std::optional<BackendKind> backend = {};  // io_uring, libaio or threads
  std::optional<unsigned> lanes = {};
  std::optional<unsigned> queue_depth = {};
  std::optional<std::uint64_t> block_bytes = {};
  std::optional<bool> direct = {};  // false: through the page cache, which direct I/O would bypass

  bool operator==(const Settings&) const = default;
  bool is_default() const { return *this == Settings{}; }
};

// A filesystem on a device. All three must be the same for a tuning to be used.
struct Storage {
  std::string filesystem;  // "ext4"
  std::string device;      // "/dev/nvme0n1p2", or the filesystem's source
  std::string id;          // f_fsid of statfs(2), as 16 hexadecimal digits

  auto operator<=>(const Storage&) const = default;
};

// The rates at which one pattern of I/O was measured, in bytes per second.
struct Rates {
  std::uint64_t defaults = 0;
  std::uint64_t tuned = 0;

  bool operator==(const Rates&) const = default;
};

inline constexpr std::size_t kPatterns = 4;
std::string_view pattern_name(std::size_t pattern);  // "sequential read", ...

struct Tuning {
  std::string machine;             // os::machine_id()
  std::string time;                // when it was measured: utc_time()
  std::vector<std::string> paths;  // that were named, for messages
  std::vector<Storage> storages;   // sorted, none twice, at least one
  Settings settings;
  std::vector<Rates> rates;  // of each pattern, kPatterns of them

  bool operator==(const Tuning&) const = default;
};

// "4 MiB", "64 KiB": blocks are powers of two, or at least multiples of 4 KiB.
std::string block_text(std::uint64_t bytes);

// The limits of settings, those of EngineOptions.
bool are_valid(const Settings& settings);

// "io_uring, 2 lanes, queue depth 32, blocks of 4 MiB, page cache"; "the defaults" where nothing is given.
std::string to_string(const Settings& settings);

}  // namespace trunkline::tuning
