#include "volume/stripe_files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "os/unique_fd.h"
#include "volume/descriptor.h"

namespace trunkline::volume {
namespace {

std::unexpected<Error> corrupt(const StripeFiles& files, const std::string& path, std::string_view why) {
  return std::unexpected(make_error(
      ErrorKind::corrupt, fmt::format("cannot open striped file {}: {} {}", files.name(), path, why), path));
}

// os::exists() would not do: a member that cannot be examined must not count as missing.
Result<bool> exists(const std::string& path) {
  struct stat status{};
  if (::lstat(path.c_str(), &status) == 0) return true;
  if (errno == ENOENT) return false;
  return std::unexpected(system_error(errno, "stat " + path, path));
}

bool is_regular_file(const std::string& path) {
  struct stat status{};
  return ::stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode);
}

Status unlink_if_present(const std::string& path) {
  if (::unlink(path.c_str()) == 0 || errno == ENOENT) return {};
  return std::unexpected(system_error(errno, "remove " + path, path));
}

// Includes an fsync: an emptied member must not regain its contents after a power failure.
Status empty_durably(const std::string& path) {
  const os::UniqueFd fd(::open(path.c_str(), O_WRONLY | O_TRUNC | O_CLOEXEC | O_NONBLOCK));
  if (!fd.valid()) return std::unexpected(system_error(errno, "empty " + path, path));
  if (::fsync(fd.get()) != 0) return std::unexpected(system_error(errno, "fsync " + path, path));
  return {};
}

}  // namespace

StripeFiles::StripeFiles(const std::vector<std::string>& directories, const std::string& name)
    : name_(directories.front() + "/" + name), directories_(directories), base_(name) {
  for (std::size_t i = 0; i < directories.size(); ++i) {
    members_.push_back(member_path(i, static_cast<unsigned>(i)));
    descriptors_.push_back(fmt::format("{}/{}.stripe", directories[i], name));
  }
}

std::string StripeFiles::member_path(std::size_t directory, unsigned member) const {
  return fmt::format("{}/{}.{}", directories_[directory], base_, member);
}

Status StripeFiles::check_name(const std::string& name) {
  constexpr std::size_t kMaxNameBytes = 200;  // leaves room for suffixes below NAME_MAX (255)
  const auto refuse = [](std::string_view why) {
    return std::unexpected(make_error(ErrorKind::invalid_argument,
                                      fmt::format("name of a striped file: {}; use a plain file name", why)));
  };
  if (name.empty()) return refuse("it is empty");
  if (name == "." || name == "..") return refuse(fmt::format("\"{}\" is a directory", name));
  if (name.find('/') != std::string::npos) return refuse(fmt::format("\"{}\" contains a slash", name));
  if (name.find('\0') != std::string::npos) return refuse("it contains a zero byte");
  if (name.size() > kMaxNameBytes)
    return refuse(fmt::format("it has {} bytes, more than {}", name.size(), kMaxNameBytes));
  return {};
}

bool StripeFiles::Presence::any_descriptor() const {
  return std::ranges::find(descriptors, true) != descriptors.end();
}

bool StripeFiles::Presence::any() const {
  return any_descriptor() || std::ranges::find(members, true) != members.end();
}

Result<StripeFiles::Presence> StripeFiles::survey() const {
  Presence presence;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    auto member = exists(members_[i]);
    if (!member) return std::unexpected(member.error());
    auto descriptor = exists(descriptors_[i]);
    if (!descriptor) return std::unexpected(descriptor.error());
    presence.members.push_back(*member);
    presence.descriptors.push_back(*descriptor);
  }
  return presence;
}

Result<std::uint64_t> StripeFiles::check() const {
  auto presence = survey();
  if (!presence) return std::unexpected(presence.error());
  if (!presence->any()) return std::unexpected(system_error(ENOENT, "open striped file " + name_, name_));
  Descriptor first;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    const std::string& path = descriptors_[i];
    if (!presence->descriptors[i])
      return corrupt(*this, path,
                     "is missing; restore it from a copy, or remove the file and write it again");
    auto found = read_descriptor(path);
    if (!found) return std::unexpected(found.error());
    if (found->members != members_.size()) {
      return corrupt(*this, path,
                     fmt::format("says that the file is spread over {} directories, not over these {}; open "
                                 "it with all the directories it was written to",
                                 found->members, members_.size()));
    }
    if (i == 0) first = *found;
    if (found->id != first.id) {
      return corrupt(
          *this, path,
          fmt::format("belongs to a different file than {}: their ids differ (a copy from another time, or "
                      "an interrupted overwrite); restore the right one, or write the file again",
                      descriptors_[0]));
    }
    if (found->member != i) {
      return corrupt(*this, path,
                     fmt::format("is member {}, but member {} is expected there; list the directories in the "
                                 "order in which the file was written",
                                 found->member, i));
    }
    if (found->stripe_bytes != first.stripe_bytes) {
      return corrupt(
          *this, path,
          fmt::format(
              "has a stripe unit of {} bytes, but {} has one of {}; restore the right one from a copy",
              found->stripe_bytes, descriptors_[0], first.stripe_bytes));
    }
    if (!is_regular_file(members_[i]))
      return corrupt(*this, members_[i],
                     "is missing or not a regular file; restore it, or remove the file and write it again");
  }
  return first.stripe_bytes;
}

Status StripeFiles::write_descriptors(std::uint64_t stripe_bytes, os::IfPresent if_present) const {
  const std::string id = random_id();
  for (std::size_t i = 0; i < descriptors_.size(); ++i) {
    const Descriptor descriptor{id, static_cast<unsigned>(i), static_cast<unsigned>(descriptors_.size()),
                                stripe_bytes};
    auto written = os::write_file_durably(descriptors_[i], format_descriptor(descriptor), if_present);
    if (written) continue;
    if (if_present == os::IfPresent::replace) return written;
    // When two create the same file at once, the first descriptor decides; all descriptors written since then
    // are our own. The last one may already have its final name, if making the name durable is what failed.
    for (std::size_t made = 0; made < i; ++made) ::unlink(descriptors_[made].c_str());
    const auto last = read_descriptor(descriptors_[i]);
    if (last && last->id == id) ::unlink(descriptors_[i].c_str());
    return written;
  }
  return {};
}

Status StripeFiles::remove_displaced(std::size_t index) const {
  const auto descriptor = read_descriptor(descriptors_[index]);
  // An unreadable descriptor names no file that could be removed.
  if (!descriptor || descriptor->member == index) return {};
  return unlink_if_present(member_path(index, descriptor->member));
}

Status StripeFiles::empty_members(const Presence& presence) const {
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (presence.descriptors[i]) {
      if (auto removed = remove_displaced(i); !removed) return removed;
    }
    if (presence.members[i]) {
      if (auto emptied = empty_durably(members_[i]); !emptied) return emptied;
    }
  }
  return {};
}

Status StripeFiles::remove() const {
  // 1. Remove members: those at their expected place, and those that the descriptor beside them names. The
  // first members go last: an interrupted removal is recognized by them.
  for (std::size_t i = members_.size(); i-- > 0;) {
    if (auto removed = remove_displaced(i); !removed) return removed;
    if (auto removed = unlink_if_present(members_[i]); !removed) return removed;
  }
  // 2. Make that durable, so that no member can outlive all descriptors that identify it.
  if (auto synced = sync_directories(); !synced) return synced;
  // 3. Remove descriptors.
  for (std::size_t i = descriptors_.size(); i-- > 0;) {
    if (auto removed = unlink_if_present(descriptors_[i]); !removed) return removed;
  }
  return sync_directories();
}

Status StripeFiles::sync_directories() const {
  for (const std::string& directory : directories_) {
    if (auto synced = os::fsync_directory(directory); !synced) return synced;
  }
  return {};
}

}  // namespace trunkline::volume
