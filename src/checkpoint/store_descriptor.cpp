#include "checkpoint/store_descriptor.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <span>

#include "base/strict_json.h"
#include "checkpoint/manifest.h"
#include "trunkline/checksum.h"

namespace trunkline::checkpoint {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kFormat = "trunkline checkpoints";
constexpr unsigned kPlainVersion = 1;  // of descriptors without a first commit; earlier builds read it
constexpr unsigned kVersion = 2;
constexpr std::size_t kIdDigits = 16;
constexpr int kMaxDepth = 2;

std::unexpected<Error> fail(ErrorKind kind, const std::string& path, std::string_view why) {
  return std::unexpected(make_error(
      kind,
      fmt::format(
          "{} does not describe a directory of checkpoints: {}; restore it from a copy, or remove it: "
          "the checkpoints can be loaded without it, and the next save makes a new one",
          path, why),
      path));
}

bool is_id(std::string_view text) {
  return text.size() == kIdDigits && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

std::optional<std::vector<std::string>> paths_of(const Json& json, std::string_view key) {
  const auto found = json.find(key);
  if (found == json.end() || !found->is_array()) return std::nullopt;
  std::vector<std::string> paths;
  for (const Json& path : *found) {
    if (!path.is_string() || !path.get_ref<const std::string&>().starts_with('/') ||
        path.get_ref<const std::string&>().find('\0') != std::string::npos)
      return std::nullopt;
    paths.push_back(path.get<std::string>());
  }
  return paths;
}

}  // namespace

std::vector<std::string> StoreDescriptor::all_volumes() const {
  std::vector<std::string> all = volumes;
  all.insert(all.end(), former_volumes.begin(), former_volumes.end());
  return all;
}

bool StoreDescriptor::owns(std::string_view directory) const {
  return directory.starts_with('/') && directory.ends_with("-" + id);
}

Result<std::string> format_store_descriptor(const StoreDescriptor& descriptor) {
  nlohmann::ordered_json json = {{"format", kFormat},
                                 {"version", descriptor.first_commit > 1 ? kVersion : kPlainVersion},
                                 {"id", descriptor.id},
                                 {"volumes", descriptor.volumes},
                                 {"former_volumes", descriptor.former_volumes}};
  if (descriptor.first_commit > 1) json["first_commit"] = descriptor.first_commit;
  try {
    const std::string text = json.dump(1);
    json["crc32c"] = fmt::format("{:08x}", crc32c(std::as_bytes(std::span(text))));
    return json.dump(1) + "\n";
  } catch (const Json::type_error&) {
    return std::unexpected(
        make_error(ErrorKind::invalid_argument, "volumes: a path is not valid UTF-8; use another directory"));
  }
}

Result<StoreDescriptor> parse_store_descriptor(std::string_view text, const std::string& path) {
  const auto json = parse_json_object(text, kMaxDepth);
  if (!json) return fail(ErrorKind::format, path, json.error());
  const auto format = json->find("format");
  if (format == json->end() || *format != kFormat)
    return fail(ErrorKind::format, path, fmt::format("\"format\" is not \"{}\"", kFormat));
  // Before the other fields, which another version may have changed.
  const auto version = json->find("version");
  if (version == json->end() || !version->is_number_unsigned() || *version == 0U)
    return fail(ErrorKind::format, path, "\"version\" is not a positive integer");
  if (*version > kVersion) {
    return std::unexpected(make_error(
        ErrorKind::format,
        fmt::format(
            "{} is of a newer version, {}, and this build reads versions up to {}; upgrade trunkline to use "
            "the directory",
            path, version->dump(), kVersion),
        path));
  }
  const auto id = json->find("id");
  if (id == json->end() || !id->is_string() || !is_id(id->get_ref<const std::string&>()))
    return fail(ErrorKind::format, path, "\"id\" is not 16 lower-case hexadecimal digits");
  auto volumes = paths_of(*json, "volumes");
  auto former = paths_of(*json, "former_volumes");
  if (!volumes || !former) {
    return fail(ErrorKind::format, path,
                "\"volumes\" or \"former_volumes\" is not an array of absolute paths");
  }
  StoreDescriptor descriptor{
      .id = id->get<std::string>(), .volumes = std::move(*volumes), .former_volumes = std::move(*former)};
  if (*version == kVersion) {
    const auto first = json->find("first_commit");
    if (first == json->end() || !first->is_number_unsigned() || *first > kMaxNumber)
      return fail(ErrorKind::format, path, "\"first_commit\" is not a number of a commit");
    descriptor.first_commit = first->get<std::uint64_t>();
  }
  // Covers the checksum, and keys that are not known.
  if (format_store_descriptor(descriptor) != text) {
    return fail(ErrorKind::corrupt, path,
                "it is not byte for byte as it was written: it was damaged or edited");
  }
  return descriptor;
}

}  // namespace trunkline::checkpoint
