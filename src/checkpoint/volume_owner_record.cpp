#include "checkpoint/volume_owner_record.h"

#include <fmt/format.h>

#include <charconv>
#include <cstddef>
#include <span>

#include "trunkline/checksum.h"

namespace trunkline::checkpoint {
namespace {

constexpr std::string_view kOwnerMagic = "trunkline home ";
constexpr std::string_view kOwnerVersion = "2";
constexpr std::string_view kFirstOwnerVersion = "1";  // without the birth time

std::string checksum_of(std::string_view text) {
  return fmt::format("{:08x}", crc32c(std::as_bytes(std::span(text))));
}

std::unexpected<Error> not_an_owner(ErrorKind kind, const std::string& record, std::string_view why) {
  return std::unexpected(
      make_error(kind,
                 fmt::format("{} should say which directory of checkpoints its shards belong to: {}; if only "
                             "one directory uses them, remove that file, otherwise restore it",
                             record, why),
                 record));
}

bool take_field(std::string_view& text, std::uint64_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data() + text.size() || *end != ' ') return false;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()) + 1);
  return true;
}

// Paths can contain any bytes, so the record cannot be JSON.
std::string format_version(const VolumeOwner& owner, std::string_view version) {
  const std::string birth = version == kFirstOwnerVersion ? "" : fmt::format("{} ", owner.birth);
  const std::string body = fmt::format("{} {} {}{}\n", owner.device, owner.inode, birth, owner.path);
  return fmt::format("{}{} crc32c={}\n{}", kOwnerMagic, version, checksum_of(body), body);
}

}  // namespace

std::string format_volume_owner(const VolumeOwner& owner) { return format_version(owner, kOwnerVersion); }

Result<VolumeOwner> parse_volume_owner(std::string_view text, const std::string& record) {
  if (!text.starts_with(kOwnerMagic))
    return not_an_owner(ErrorKind::corrupt, record, "it is not such a record");
  std::string_view rest = text.substr(kOwnerMagic.size());
  const std::string_view version = rest.substr(0, rest.find(' '));
  if (version != kOwnerVersion && version != kFirstOwnerVersion) {
    constexpr std::size_t kShown = 16;  // without a space everything that follows is the version
    return not_an_owner(ErrorKind::format, record,
                        fmt::format("it has version {}, but this build reads versions up to {}",
                                    version.substr(0, kShown), kOwnerVersion));
  }
  VolumeOwner owner;
  const std::size_t line = rest.find('\n');
  if (line == std::string_view::npos) return not_an_owner(ErrorKind::corrupt, record, "it is cut off");
  rest.remove_prefix(line + 1);
  if (take_field(rest, owner.device) && take_field(rest, owner.inode) &&
      (version == kFirstOwnerVersion || take_field(rest, owner.birth)) && rest.ends_with('\n'))
    owner.path = rest.substr(0, rest.size() - 1);
  // Also verifies the checksum, and everything else that could differ from what was written.
  if (!owner.path.starts_with('/') || format_version(owner, version) != text)
    return not_an_owner(ErrorKind::corrupt, record, "bytes of it have changed");
  return owner;
}

}  // namespace trunkline::checkpoint
