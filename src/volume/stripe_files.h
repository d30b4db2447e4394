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

  // invalid_argument unless `name` can be the name of a striped file.
  static Status check_name(const std::string& name);

  // What errors call the striped file.
  const std::string& name() const { return name_; }
  const std::vector<std::string>& members() const { return members_; }
  const std::vector<std::string>& descriptors() const { return descriptors_; }

  // Which of the files exist now.
  struct Presence {
    std::vector<bool> members;
    std::vector<bool> descriptors;
    bool any_descriptor() const;
    bool any() const;
  };
  Result<Presence> survey() const;

  // The stripe unit of the file that is there; `corrupt` or `format` unless it is whole, system (ENOENT) when
  // there is nothing of it.
  Result<std::uint64_t> check() const;

  // Descriptors of a new file, with one new id.
  Status write_descriptors(std::uint64_t stripe_bytes, os::IfPresent if_present) const;

  // Makes the members that are there empty, durably, so that nothing of the old contents can be taken for
  // contents of the new file; removes members whose descriptor in that directory gives them another place.
  Status empty_members(const Presence& presence) const;

  // Removes all that is there: members before descriptors, so that what an interruption leaves is still
  // found.
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
