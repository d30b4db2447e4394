#include "checkpoint/descriptor_io.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <iterator>

#include "checkpoint/names.h"
#include "os/read_text.h"
#include "os/same_file.h"

namespace trunkline::checkpoint {
namespace {

namespace fs = std::filesystem;

std::string descriptor_path(const std::string& directory) {
  return fmt::format("{}/{}", directory, kDescriptorFile);
}

std::string tiers_path(const std::string& directory) { return fmt::format("{}/{}", directory, kTiersFile); }

// Shows people who look at a volume which directory this one belongs to.
std::string readable_name(const std::string& directory) {
  constexpr std::size_t kMaxBytes = 100;
  std::string name = fs::path(directory).filename().string().substr(0, kMaxBytes);
  for (char& c : name) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       c == '-' || c == '_' || c == '.';
    if (!plain) c = '_';
  }
  return name.empty() ? "checkpoints" : name;
}

std::string parent_of(const std::string& path) { return fs::path(path).parent_path().string(); }

// The entry of `volumes` that has the same parent; empty if there is none.
std::string beside(const std::string& volume, const std::vector<std::string>& volumes) {
  const auto has_same_parent = [&](const std::string& each) { return parent_of(each) == parent_of(volume); };
  const auto found = std::ranges::find_if(volumes, has_same_parent);
  return found == volumes.end() ? std::string{} : *found;
}

}  // namespace

Result<std::optional<StoreDescriptor>> read_store_descriptor(const std::string& directory) {
  const std::string path = descriptor_path(directory);
  const auto text = os::read_text(path, kMaxDescriptorBytes);
  if (!text && text.error().code == ENOENT) return std::nullopt;
  if (!text) return std::unexpected(text.error());
  auto descriptor = parse_store_descriptor(*text, path);
  if (!descriptor) return std::unexpected(descriptor.error());
  return std::move(*descriptor);
}

StoreDescriptor with_volumes(const StoreDescriptor& before, const std::vector<std::string>& volumes,
                             const std::string& directory) {
  const std::vector<std::string> known = before.all_volumes();
  StoreDescriptor after{.id = before.id, .volumes = {}, .first_commit = before.first_commit};
  for (const std::string& volume : volumes) {
    const auto same = std::ranges::find(known, volume, parent_of);
    after.volumes.push_back(same != known.end() ? *same
                                                : fmt::format("{}/{}-{}", volume == "/" ? "" : volume,
                                                              readable_name(directory), before.id));
  }
  for (const std::string& each : known) {
    if (std::ranges::find(after.volumes, each) == after.volumes.end()) after.former_volumes.push_back(each);
  }
  return after;
}

std::vector<std::string> parents_of(const std::vector<std::string>& volumes) {
  std::vector<std::string> parents;
  std::ranges::transform(volumes, std::back_inserter(parents), parent_of);
  return parents;
}

// Directories first: the descriptor promises that they exist, so that one that is missing later means a disk
// that is not mounted.
Status write_store_descriptor(const std::string& directory, const StoreDescriptor& descriptor,
                              const std::optional<StoreDescriptor>& before, const DirectoryOps& ops) {
  const auto text = format_store_descriptor(descriptor);
  if (!text) return std::unexpected(text.error());
  const std::vector<std::string> known = before ? before->all_volumes() : std::vector<std::string>{};
  for (const std::string& volume : descriptor.volumes) {
    if (std::ranges::find(known, volume) != known.end()) continue;
    // When it replaces another one, those who could not read that one cannot read it either.
    const std::string like = before ? beside(volume, before->volumes) : std::string{};
    if (auto made = ops.make_directories_durably(volume, like); !made) return made;
  }
  const std::string path = descriptor_path(directory);
  return before ? ops.replace_file_durably(path, *text) : ops.create_file_durably(path, *text);
}

Result<OwnTiers> read_tiers(const std::string& directory, const std::optional<StoreDescriptor>& descriptor) {
  const std::string path = tiers_path(directory);
  const auto text = os::read_text(path, kMaxDescriptorBytes);
  if (!text && text.error().code == ENOENT) return OwnTiers{};
  if (!text) return std::unexpected(text.error());
  auto record = parse_tier_record(*text, path);
  if (!record) return std::unexpected(record.error());
  if (record->id != id_of(descriptor)) return OwnTiers{};
  const auto identity = os::directory_identity(directory);
  if (!identity) return std::unexpected(identity.error());
  return OwnTiers{.tiers = std::move(record->tiers), .is_copied = record->identity != *identity};
}

Status write_tiers(const std::string& directory, const StoreDescriptor& descriptor,
                   const std::vector<RecordedTier>& tiers, const DirectoryOps& ops) {
  const auto identity = os::directory_identity(directory);
  if (!identity) return std::unexpected(identity.error());
  const auto text = format_tier_record({.id = descriptor.id, .identity = *identity, .tiers = tiers});
  if (!text) return std::unexpected(text.error());
  return ops.replace_file_durably(tiers_path(directory), *text);
}

}  // namespace trunkline::checkpoint
