// The files that `trunkline tune` reads and writes: one in each directory, under a temporary name.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "os/temporary_file.h"
#include "os/unique_fd.h"
#include "trunkline/error.h"
#include "trunkline/units.h"

namespace trunkline::cli {

inline constexpr std::uint64_t kFewestScratchBytes = 64 * kMiB;  // that anything can be measured with

// The size of each of the files in `directories`: `wanted`, or as much less as leaves half of the free space
// of each filesystem. Fails with system (ENOSPC) where that is too little to measure anything.
Result<std::uint64_t> scratch_bytes(std::span<const std::string> directories, std::uint64_t wanted);

// Removes its files at destruction. Those of a process that was killed are removed by the next one, on local
// filesystems.
class ScratchFiles {
 public:
  static Result<ScratchFiles> create(std::span<const std::string> directories);
  ScratchFiles(ScratchFiles&&) = default;
  ScratchFiles& operator=(ScratchFiles&&) = delete;
  ScratchFiles(const ScratchFiles&) = delete;
  ScratchFiles& operator=(const ScratchFiles&) = delete;
  ~ScratchFiles();

  const std::vector<std::string>& paths() const { return paths_; }

  // Waits for what was written, and drops the page cache of all files, so that the devices are read.
  Status drop_page_cache() const;

 private:
  ScratchFiles() = default;

  std::vector<std::string> paths_;
  std::vector<os::UniqueFd> fds_;
  std::vector<std::unique_ptr<os::WriterClaim>> claims_;  // end before the descriptors
};

}  // namespace trunkline::cli
