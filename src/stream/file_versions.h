// Whether files were modified since they were looked at last.
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

  // Remembers how all of the files are now; once, before any of them is looked at.
  Status begin();

  // Looks at the file. The number grows whenever any of the files was found to be modified.
  Result<std::uint64_t> version_of(std::size_t file);

 private:
  const std::vector<File> files_;
  std::mutex mutex_;
  std::vector<std::string> known_;  // as they were looked at last
  std::uint64_t modifications_ = 0;
};

}  // namespace trunkline
