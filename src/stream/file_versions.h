// Detects whether files were modified since they were last checked.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "trunkline/file.h"

namespace trunkline {

// Thread-safe.
class FileVersions {
 public:
  explicit FileVersions(std::vector<File> files);

  // Records the current state of all files; call once, before any of them is read.
  Status begin();

  // Checks the file. The number grows whenever any of the files is found to be modified.
  Result<std::uint64_t> version_of(std::size_t file);

 private:
  const std::vector<File> files_;
  std::mutex mutex_;
  std::vector<std::string> known_;  // the states at the last check
  std::uint64_t modifications_ = 0;
};

}  // namespace trunkline
