// A file that is written under a temporary name, and gets its own name once it is complete.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "os/access.h"
#include "os/durable.h"
#include "os/replaced_file.h"
#include "os/temporary_file.h"
#include "os/unique_fd.h"
#include "trunkline/error.h"

namespace trunkline::os {

// Readers, and a crash at any time, see either the complete old file or the complete new one. At destruction
// the temporary file is removed, unless it was named; a forked child leaves its parent's alone.
class ReplacementFile {
 public:
  // Creates the temporary file, beside the file to which `path` leads. With IfPresent::replace that file may
  // exist: see os/replaced_file.h for what is kept of it, and for the errors where it may not be replaced.
  // With IfPresent::fail the new file gets the access rights of the file `access_of`, unless that is empty or
  // missing.
  static Result<ReplacementFile> create(const std::string& path, IfPresent if_present = IfPresent::replace,
                                        const std::string& access_of = {});
  ReplacementFile(ReplacementFile&& other) noexcept;
  ReplacementFile& operator=(ReplacementFile&&) = delete;
  ~ReplacementFile();

  // Where the file will be: what `path` leads to, with IfPresent::fail `path` itself.
  const std::string& path() const { return target_; }

  // Open for writing.
  int fd() const { return fd_.get(); }

  // Appends.
  Status write(std::string_view contents) const;

  // Once, after everything is written: syncs the file to the device, and gives it its name. Returns the
  // directory whose fsync_directory() makes the name durable.
  Result<std::string> finish();

 private:
  ReplacementFile(std::string target, IfPresent if_present, std::optional<ReplacedFile> replaced);

  Status create_temporary();
  Status sync() const;
  Status name();
  void close();

  std::string target_;
  IfPresent if_present_;
  unsigned generation_;
  std::optional<ReplacedFile> replaced_;
  std::optional<FileAccess> access_;
  std::string written_;  // the temporary file's path; empty once there is none
  UniqueFd fd_;
  std::unique_ptr<WriterClaim> claim_;  // ends before the descriptor
};

}  // namespace trunkline::os
