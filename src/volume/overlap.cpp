#include "volume/overlap.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "volume/descriptor.h"

namespace trunkline::volume {
namespace {

using Found = std::vector<std::optional<Descriptor>>;

std::unexpected<Error> refuse(const StripeFiles& files, std::string_view action, const std::string& path,
                              std::string_view why, std::string_view advice) {
  return std::unexpected(
      make_error(ErrorKind::corrupt,
                 fmt::format("cannot {} striped file {} in the directories {}: {} {}; {}", action,
                             files.name(), fmt::join(files.directories(), ", "), path, why, advice),
                 path));
}

Result<Found> read_all(const StripeFiles& files, const StripeFiles::Presence& presence) {
  Found found(files.descriptors().size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (!presence.descriptors[i]) continue;
    auto descriptor = read_descriptor_if_valid(files.descriptors()[i]);
    if (!descriptor) return std::unexpected(descriptor.error());
    found[i] = *std::move(descriptor);
  }
  return found;
}

bool is_complete(const Found& found) {
  const std::optional<Descriptor>& first = found.front();
  if (!first) return false;
  std::set<unsigned> members;
  for (const std::optional<Descriptor>& descriptor : found) {
    if (!descriptor || descriptor->id != first->id) return false;
    members.insert(descriptor->member);
  }
  return members.size() == found.size();
}

bool has_data(const std::string& path) {
  struct stat status{};
  return ::lstat(path.c_str(), &status) == 0 && (!S_ISREG(status.st_mode) || status.st_size > 0);
}

// Whether a member has data: at the place that its directory has here, or at the one that its descriptor
// names.
bool any_data(const StripeFiles& files, const Found& found) {
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (has_data(files.members()[i])) return true;
    const std::optional<Descriptor>& descriptor = found[i];
    if (descriptor && has_data(files.member_path(i, descriptor->member))) return true;
  }
  return false;
}

bool agree(const Found& found) {
  std::optional<std::string> id;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const std::optional<Descriptor>& descriptor = found[i];
    if (!descriptor) continue;
    if (descriptor->member != i || descriptor->id != id.value_or(descriptor->id)) return false;
    id = descriptor->id;
  }
  return true;
}

}  // namespace

Status check_no_overlap(const StripeFiles& files, const StripeFiles::Presence& presence,
                        std::string_view action) {
  const auto found = read_all(files, presence);
  if (!found) return std::unexpected(found.error());
  // 1.
  for (std::size_t i = 0; i < found->size(); ++i) {
    const std::optional<Descriptor>& descriptor = (*found)[i];
    if (!descriptor || descriptor->members == found->size()) continue;
    return refuse(files, action, files.descriptors()[i],
                  fmt::format("belongs to a file that is striped over {} directories, not over these {}",
                              descriptor->members, found->size()),
                  "use another name, or remove that file first, with a volume of its own directories");
  }
  // 2.
  if (is_complete(*found)) return {};
  // 3.
  std::optional<std::size_t> empty;  // a directory that has nothing of the file
  for (std::size_t i = found->size(); i-- > 0;)
    if (!presence.descriptors[i] && !presence.members[i]) empty = i;
  const bool no_members = std::ranges::find(presence.members, true) == presence.members.end();
  const bool data = any_data(files, *found);
  if (no_members && !data && found->front() && agree(*found)) return {};
  if (!empty && (agree(*found) || !data)) return {};
  // 4.
  const auto first =
      static_cast<std::size_t>(std::ranges::find(presence.descriptors, true) - presence.descriptors.begin());
  const std::string why =
      empty ? fmt::format("belongs to a file of which {} has nothing", files.directories()[*empty])
            : std::string("does not belong to the same file as what is in the other directories");
  return refuse(
      files, action, files.descriptors()[first], why,
      "other parts of that file may be in other directories. Use another name, or remove that file "
      "with a volume of its own directories; if its other parts are lost, delete what is left of it: "
      "its member and its descriptor in each directory");
}

}  // namespace trunkline::volume
