#include "checkpoint/volume_claims.h"

#include <optional>
#include <set>
#include <utility>

#include "checkpoint/descriptor_io.h"
#include "checkpoint/listing.h"
#include "checkpoint/volume_owner.h"
#include "os/file_type.h"

namespace trunkline::checkpoint {
namespace {

// Those of the descriptor and of the manifests.
Result<std::set<std::string>> named_volumes(const std::string& directory) {
  const auto recorded = read_store_descriptor(directory);
  if (!recorded) return std::unexpected(recorded.error());
  const auto entries = list_steps(directory);
  if (!entries) return std::unexpected(entries.error());
  std::set<std::string> volumes;
  if (const std::optional<StoreDescriptor>& known = *recorded) {
    for (std::string& volume : known->all_volumes()) volumes.insert(std::move(volume));
  }
  for (const StepEntry& entry : *entries) {
    const auto manifest = read_newest_manifest(directory, entry.step);
    if (manifest) volumes.insert(manifest->volumes.begin(), manifest->volumes.end());
  }
  volumes.erase(std::string(kOwnVolume));
  return volumes;
}

}  // namespace

Status claim_volumes(const StoreDescriptor& descriptor, const std::string& directory,
                     std::span<const std::uint64_t> shards, Unrecorded unrecorded, const DirectoryOps& ops) {
  if (auto ours = check_owners(descriptor, directory); !ours) return ours;
  const std::vector<std::string> volumes = descriptor.all_volumes();
  for (std::size_t i = 0; i < volumes.size(); ++i) {
    if (!os::is_directory(volumes[i])) continue;
    if (unrecorded == Unrecorded::leave && !check_recorded_owner(volumes[i], directory)) continue;
    auto taken = record_owner(volumes[i], directory, ops);
    const bool written_to = i < descriptor.volumes.size() && shards[i] > 0;
    if (!taken && (written_to || taken.error().kind != ErrorKind::system)) return taken;
  }
  return {};
}

Result<Adopted> adopt_volumes(const std::string& directory, const DirectoryOps& ops) {
  const auto volumes = named_volumes(directory);
  if (!volumes) return std::unexpected(volumes.error());
  Adopted adopted;
  for (const std::string& volume : *volumes)
    (os::is_directory(volume) ? adopted.volumes : adopted.missing).push_back(volume);
  // All or none, as far as can be seen.
  for (const std::string& volume : adopted.volumes) {
    if (auto can = check_can_adopt(volume, directory); !can) return std::unexpected(can.error());
  }
  for (const std::string& volume : adopted.volumes) {
    if (auto done = adopt_volume(volume, directory, ops); !done) return std::unexpected(done.error());
  }
  return adopted;
}

}  // namespace trunkline::checkpoint
