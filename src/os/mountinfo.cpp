#include "os/mountinfo.h"

#include <charconv>
#include <optional>

#include "os/read_text.h"

namespace trunkline::os {
namespace {

// Removes the part of `text` before the next `separator`, and the separator, and returns the part.
std::string_view take(std::string_view& text, char separator) {
  const std::size_t end = text.find(separator);
  const std::string_view part = text.substr(0, end);
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  return part;
}

template <class Integer>
bool parse_number(std::string_view text, Integer& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size();
}

bool is_octal(char c) { return c >= '0' && c <= '7'; }

// Space, tab, newline and backslash are written as a backslash and three octal digits.
std::string unescape(std::string_view text) {
  std::string plain;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size() && is_octal(text[i + 1]) && is_octal(text[i + 2]) &&
        is_octal(text[i + 3])) {
      plain += static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 + (text[i + 3] - '0'));
      i += 3;
    } else {
      plain += text[i];
    }
  }
  return plain;
}

// "36 35 98:0 /root /mount/point rw,noatime shared:1 master:2 - ext3 /dev/root rw,errors=continue"
std::optional<Mount> parse_line(std::string_view line) {
  Mount mount;
  const std::string_view id = take(line, ' ');
  take(line, ' ');  // the parent's id
  std::string_view device = take(line, ' ');
  const std::string_view major = take(device, ':');
  take(line, ' ');  // the root of the mount within the filesystem
  mount.point = unescape(take(line, ' '));
  take(line, ' ');                                   // mount options
  while (!line.empty() && take(line, ' ') != "-") {  // any number of optional fields
  }
  mount.filesystem = unescape(take(line, ' '));
  mount.source = unescape(take(line, ' '));
  const bool numbers = parse_number(id, mount.id) && parse_number(major, mount.device.major) &&
                       parse_number(device, mount.device.minor);
  if (!numbers || mount.point.empty() || mount.filesystem.empty()) return std::nullopt;
  return mount;
}

bool is_above(std::string_view point, std::string_view path) {
  if (point == "/") return path.starts_with('/');
  return path.starts_with(point) && (path.size() == point.size() || path[point.size()] == '/');
}

}  // namespace

std::vector<Mount> parse_mountinfo(std::string_view text) {
  std::vector<Mount> mounts;
  while (!text.empty()) {
    if (auto mount = parse_line(take(text, '\n'))) mounts.push_back(std::move(*mount));
  }
  return mounts;
}

const Mount* find_mount(const std::vector<Mount>& mounts, const MountQuery& query) {
  const Mount* same_device = nullptr;
  const Mount* any = nullptr;
  for (const Mount& mount : mounts) {
    if (query.mount_id != 0 && mount.id == query.mount_id) return &mount;
    if (!is_above(mount.point, query.path)) continue;
    const auto deeper = [&mount](const Mount* best) {
      return best == nullptr || mount.point.size() >= best->point.size();
    };
    if (deeper(any)) any = &mount;
    if (mount.device == query.device && deeper(same_device)) same_device = &mount;
  }
  return same_device != nullptr ? same_device : any;
}

Result<std::vector<Mount>> read_mounts() {
  auto text = read_text("/proc/self/mountinfo");
  if (!text) return std::unexpected(text.error());
  return parse_mountinfo(*text);
}

}  // namespace trunkline::os
