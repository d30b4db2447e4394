// The files that one striped file consists of, and the protocols that create, check and remove them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "os/durable.h"
#include "trunkline/error.h"

namespace trunkline::volume {

class StripeFiles {
 public:
  StripeFiles(const std::vector<std::string>& directories, const std::string& name);

  // Fails with invalid_argument unless `name` can be the name of a striped file.
  static Status check_name(const std::string& name);

  // The striped file's name in error messages.
  const std::string& name() const { return name_; }
  const std::vector<std::string>& members() const { return members_; }
  const std::vector<std::string>& descriptors() const { return descriptors_; }
  const std::vector<std::string>& directories() const { return directories_; }

  // The name that a member would have in one of the directories.
  std::string member_path(std::size_t directory, unsigned member) const;

  // Which of the files exist now.
  struct Presence {
    std::vector<bool> members;
    std::vector<bool> descriptors;
    bool any_descriptor() const;
    bool any() const;
  };
  Result<Presence> survey() const;

  // The stripe unit of the existing file; `corrupt` or `format` unless the file is complete, system (ENOENT)
  // when nothing of it exists.
  Result<std::uint64_t> check() const;

  // Writes the descriptors of a new file, all with one new id.
  Status write_descriptors(std::uint64_t stripe_bytes, os::IfPresent if_present) const;

  // Empties existing members durably, so that no old contents can be mistaken for contents of the new file.
  // Also removes members whose descriptor in the same directory gives them a different index.
  Status empty_members(const Presence& presence) const;

  // Removes everything that exists: members before descriptors, so that what an interruption leaves behind is
  // still found.
  Status remove() const;

  Status sync_directories() const;

 private:
  Status remove_displaced(std::size_t index) const;

  std::string name_;
  std::vector<std::string> directories_;
  std::string base_;
  std::vector<std::string> members_;
  std::vector<std::string> descriptors_;
};

}  // namespace trunkline::volume
