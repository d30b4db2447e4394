#include "checkpoint/store_descriptor.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>

#include "base/strict_json.h"
#include "checkpoint/json_record.h"
#include "checkpoint/manifest.h"

namespace trunkline::checkpoint {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kStoreFormat = "trunkline checkpoints";
constexpr unsigned kPlainVersion = 1;  // of descriptors without a first commit; earlier builds read it
constexpr unsigned kStoreVersion = 2;
constexpr int kMaxStoreDepth = 2;

std::unexpected<Error> not_a_descriptor(ErrorKind kind, const std::string& path, std::string_view why) {
  return std::unexpected(make_error(
      kind,
      fmt::format(
          "{} does not describe a directory of checkpoints: {}; restore it from a copy, or remove it: "
          "the checkpoints can be loaded without it, and the next save makes a new one",
          path, why),
      path));
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
  nlohmann::ordered_json json = {{"format", kStoreFormat},
                                 {"version", descriptor.first_commit > 1 ? kStoreVersion : kPlainVersion},
                                 {"id", descriptor.id},
                                 {"volumes", descriptor.volumes},
                                 {"former_volumes", descriptor.former_volumes}};
  if (descriptor.first_commit > 1) json["first_commit"] = descriptor.first_commit;
  return format_json_record(std::move(json), "volumes");
}

Result<StoreDescriptor> parse_store_descriptor(std::string_view text, const std::string& path) {
  const auto json = parse_json_object(text, kMaxStoreDepth);
  if (!json) return not_a_descriptor(ErrorKind::format, path, json.error());
  const auto format = json->find("format");
  if (format == json->end() || *format != kStoreFormat)
    return not_a_descriptor(ErrorKind::format, path, fmt::format("\"format\" is not \"{}\"", kStoreFormat));
  // Before the other fields, which another version may have changed.
  const auto version = json->find("version");
  if (version == json->end() || !version->is_number_unsigned() || *version == 0U)
    return not_a_descriptor(ErrorKind::format, path, "\"version\" is not a positive integer");
  if (*version > kStoreVersion) {
    return std::unexpected(make_error(
        ErrorKind::format,
        fmt::format(
            "{} is of a newer version, {}, and this build reads versions up to {}; upgrade trunkline to use "
            "the directory",
            path, version->dump(), kStoreVersion),
        path));
  }
  const auto id = json->find("id");
  if (id == json->end() || !id->is_string() || !is_id(id->get_ref<const std::string&>()))
    return not_a_descriptor(ErrorKind::format, path, "\"id\" is not 16 lower-case hexadecimal digits");
  auto volumes = paths_of(*json, "volumes");
  auto former = paths_of(*json, "former_volumes");
  if (!volumes || !former) {
    return not_a_descriptor(ErrorKind::format, path,
                            "\"volumes\" or \"former_volumes\" is not an array of absolute paths");
  }
  StoreDescriptor descriptor{
      .id = id->get<std::string>(), .volumes = std::move(*volumes), .former_volumes = std::move(*former)};
  if (*version == kStoreVersion) {
    const auto first = json->find("first_commit");
    if (first == json->end() || !first->is_number_unsigned() || *first > kMaxNumber)
      return not_a_descriptor(ErrorKind::format, path, "\"first_commit\" is not a number of a commit");
    descriptor.first_commit = first->get<std::uint64_t>();
  }
  // Covers the checksum, and keys that are not known.
  if (format_store_descriptor(descriptor) != text) {
    return not_a_descriptor(ErrorKind::corrupt, path,
                            "it is not byte for byte as it was written: it was damaged or edited");
  }
  return descriptor;
}

}  // namespace trunkline::checkpoint
