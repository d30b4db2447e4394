#include "cli/tune/deepspeed_export.h"

#include <fmt/format.h>

#include <filesystem>

#include "base/strict_json.h"
#include "os/durable.h"
#include "os/read_text.h"

namespace trunkline::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kMaxDepth = 64;

std::unexpected<Error> refuse(const std::string& file, std::string_view why) {
  return std::unexpected(
      make_error(ErrorKind::invalid_argument, fmt::format("--export {}: {}", file, why), file));
}

bool exists(const std::string& file) {
  std::error_code ignored;
  return std::filesystem::exists(std::filesystem::symlink_status(file, ignored));
}

// What the file holds; an empty object where it does not exist.
Result<Json> read_config(const std::string& file, bool merge) {
  if (!exists(file)) {
    std::error_code ignored;
    if (!std::filesystem::is_directory(os::directory_of(file), ignored))
      return refuse(file, "its directory does not exist");
    return Json::object();
  }
  if (!merge)
    return refuse(file, "the file exists; pass --merge to change its aio section, or name another file");
  const auto text = os::read_text(file);
  if (!text) return std::unexpected(text.error());
  if (const auto why = objection_to_json_object(*text, kMaxDepth)) return refuse(file, *why);
  Json config = Json::parse(*text, nullptr, /*allow_exceptions=*/false);
  if (config.contains("aio") && !config["aio"].is_object()) return refuse(file, "\"aio\" is not an object");
  return config;
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
  auto config = read_config(file, merge);
  if (!config) return std::unexpected(config.error());
  Json& section = (*config)["aio"];
  section.update(deepspeed_aio(candidate));
  const os::IfPresent if_present = merge && exists(file) ? os::IfPresent::replace : os::IfPresent::fail;
  return os::write_file_durably(file, config->dump(2) + "\n", if_present);
}

}  // namespace trunkline::cli
