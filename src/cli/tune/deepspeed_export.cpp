#include "cli/tune/deepspeed_export.h"

#include <fmt/format.h>

#include <filesystem>
#include <string>
#include <string_view>

#include "base/strict_json.h"
#include "os/durable.h"
#include "os/read_text.h"

namespace trunkline::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kMaxDepth = 64;
constexpr std::string_view kSection = "aio";
constexpr std::string_view kSpace = " \t\r\n";

std::unexpected<Error> refuse(const std::string& file, std::string_view why) {
  return std::unexpected(
      make_error(ErrorKind::invalid_argument, fmt::format("--export {}: {}", file, why), file));
}

bool exists(const std::string& file) {
  std::error_code ignored;
  return std::filesystem::exists(std::filesystem::symlink_status(file, ignored));
}

// The text of the file, which is a JSON object; an empty one where it does not exist.
Result<std::string> read_config(const std::string& file, bool merge) {
  if (!exists(file)) {
    std::error_code ignored;
    if (!std::filesystem::is_directory(os::directory_of(file), ignored))
      return refuse(file, "its directory does not exist");
    return "{}\n";
  }
  if (!merge)
    return refuse(file, "the file exists; pass --merge to change its aio section, or name another file");
  auto text = os::read_text(file);
  if (!text) return std::unexpected(text.error());
  const auto config = parse_json_object(*text, kMaxDepth);
  if (!config) return refuse(file, config.error());
  if (!config->contains(kSection)) return text;
  if (!config->at(kSection).is_object()) return refuse(file, "\"aio\" is not an object");
  if (member_text(*text, kSection).empty()) return refuse(file, "the key \"aio\" is written with escapes");
  return text;
}

// The section with the candidate's values; what else it holds stays as it is written.
std::string section_text(const Candidate& candidate, std::string_view present) {
  const Json ours = deepspeed_aio(candidate);
  std::string text = "{";
  const auto add = [&](std::string_view key, std::string_view value) {
    text += fmt::format("{}\n    \"{}\": {}", text.size() == 1 ? "" : ",", key, value);
  };
  for (const auto& [key, value] : members_of(present)) {
    if (!ours.contains(key)) add(key, value);
  }
  for (const auto& [key, value] : ours.items()) add(key, value.dump());
  text += "\n  }";
  return text;
}

}  // namespace

Json deepspeed_aio(const Candidate& candidate) {
  return {{"block_size", candidate.block_bytes},
          {"queue_depth", candidate.queue_depth},
          {"intra_op_parallelism", candidate.lanes},
          {"single_submit", false},
          {"overlap_events", true},
          {"use_gds", false}};
}

Status check_export(const std::string& file, bool merge) {
  if (const auto config = read_config(file, merge); !config) return std::unexpected(config.error());
  return {};
}

Status export_deepspeed(const std::string& file, bool merge, const Candidate& candidate) {
  auto text = read_config(file, merge);
  if (!text) return std::unexpected(text.error());
  // Only the section is written anew: a parser would change how numbers and everything else are written.
  if (const std::string_view present = member_text(*text, kSection); !present.empty()) {
    const auto offset = static_cast<std::size_t>(present.data() - text->data());
    const std::string section = section_text(candidate, present);
    text->replace(offset, present.size(), section);
  } else {
    const std::string_view whole = *text;
    const std::string_view members =
        whole.substr(0, whole.find_last_not_of(kSpace, whole.rfind('}') - 1) + 1);
    *text = fmt::format("{}{}\n  \"{}\": {}\n}}\n", members, members.ends_with('{') ? "" : ",", kSection,
                        section_text(candidate, "{}"));
  }
  const os::IfPresent if_present = merge && exists(file) ? os::IfPresent::replace : os::IfPresent::fail;
  return os::write_file_durably(file, *text, if_present);
}

}  // namespace trunkline::cli
