#include "checkpoint/store.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <tuple>
#include <utility>

#include "base/trace.h"
#include "checkpoint/descriptor_io.h"
#include "checkpoint/directory_lock.h"
#include "checkpoint/names.h"
#include "checkpoint/own_directory.h"
#include "checkpoint/placement.h"
#include "checkpoint/volume_claims.h"

namespace trunkline::checkpoint {
namespace {

constexpr trace::Kind kBegin{"begin the save", trace::Category::checkpoint};

std::unexpected<Error> other_volumes(const std::string& directory) {
  return std::unexpected(
      Error{.kind = ErrorKind::system,
            .code = EAGAIN,
            .message = fmt::format(
                "{}: another process has given the directory other volumes; begin the save again", directory),
            .path = directory});
}

}  // namespace

Store::Store(std::string directory, Volumes volumes, DirectoryOps ops, CollectionPace collection_pace)
    : volumes_(std::move(volumes)),
      collection_pace_(std::move(collection_pace)),
      state_(std::make_shared<StoreState>(std::move(directory), std::move(ops))) {}

Store::~Store() = default;

Result<std::vector<RecordedTier>> Store::tiers() const {
  const auto descriptor = read_store_descriptor(directory());
  if (!descriptor) return std::unexpected(descriptor.error());
  auto found = read_tiers(directory(), *descriptor);
  if (!found) return std::unexpected(found.error());
  return std::move(found->tiers);
}

Result<bool> Store::has_copied_tiers() const {
  const auto descriptor = read_store_descriptor(directory());
  if (!descriptor) return std::unexpected(descriptor.error());
  const auto found = read_tiers(directory(), *descriptor);
  if (!found) return std::unexpected(found.error());
  return found->is_copied;
}

Status Store::record_tiers(const std::vector<RecordedTier>& tiers) {
  const auto guard = state_->enter();
  return write_tiers(directory(), state_->descriptor, tiers, state_->ops);
}

Result<std::vector<std::uint64_t>> Store::steps() const {
  const auto entries = list_steps(directory());
  if (!entries) return std::unexpected(entries.error());
  std::vector<std::uint64_t> steps;
  for (const StepEntry& entry : *entries) {
    if (!entry.commits.empty()) steps.push_back(entry.step);
  }
  return steps;
}

Result<std::optional<std::uint64_t>> Store::latest() const {
  const auto entries = list_steps(directory());
  if (!entries) return std::unexpected(entries.error());
  return latest_of(*entries);
}

Result<Manifest> Store::read_manifest(std::uint64_t step) const {
  return read_newest_manifest(directory(), step);
}

Result<std::unique_ptr<SaveTransaction>> Store::begin(std::uint64_t step,
                                                      std::span<const std::uint64_t> shards) {
  const auto guard = state_->enter();
  const trace::Span span(kBegin, directory());
  if (auto can = check_can_place(state_->descriptor, step, shards); !can) return std::unexpected(can.error());
  if (state_->save != nullptr) return busy_directory(directory());  // also where the filesystem has no locks
  if (auto made = make_directory(); !made) return std::unexpected(made.error());
  auto locked = DirectoryLock::acquire(directory(), DirectoryLock::LockFile::create);
  if (!locked) return std::unexpected(locked.error());
  DirectoryLock& lock = **locked;
  lock.touch();
  std::ignore = ::utimensat(AT_FDCWD, fmt::format("{}/{}", directory(), kDescriptorFile).c_str(), nullptr, 0);
  const DirectoryOps ops = lock.guarded(state_->ops);
  const auto earlier = prepare_directory(step, shards, lock, ops);
  if (!earlier) return std::unexpected(earlier.error());
  const StoreDescriptor& descriptor = state_->descriptor;
  if (auto made = make_step_directories(directory(), descriptor, step, shards, ops); !made)
    return std::unexpected(made.error());
  auto held = hold_step_directories(directory(), descriptor, step, shards);
  if (!held) return std::unexpected(held.error());
  // They are below the directory that is locked.
  if (auto same = lock.check_or_renew(); !same) return std::unexpected(same.error());
  if (earlier->of_another_run) state_->known = {};
  state_->known.loaded.id = descriptor.id;
  state_->known.directory = directory_id_of(directory());
  fresh_ = false;
  Placement placement = place_shards(directory(), descriptor, step, shards);
  placement.directory_was_replaced = earlier->directory_was_replaced;
  return std::unique_ptr<SaveTransaction>(
      new SaveTransaction(state_, *std::move(locked), *std::move(held), step, std::move(placement)));
}

// Makes the directory, its descriptor and its volumes what a save of the step needs. The order matters: what
// can be refused is refused before an earlier run is set aside, but for what is only known after that: links
// to steps go aside with the run, and the volumes are those of the new descriptor. So when this fails, it may
// have set the run aside: aside(). What is checked again was not locked before.
Result<Store::EarlierSteps> Store::prepare_directory(std::uint64_t step,
                                                     std::span<const std::uint64_t> shards,
                                                     DirectoryLock& lock, const DirectoryOps& ops) {
  if (auto ours = check_not_foreign(directory()); !ours) return std::unexpected(ours.error());
  if (auto own = check_not_of_dcp(directory(), step); !own) return std::unexpected(own.error());
  const auto before = read_store_descriptor(directory());
  if (!before) return std::unexpected(before.error());
  if (const std::optional<StoreDescriptor>& known = *before) lock.hold_volumes(*known);
  auto earlier = settle_earlier_steps(step, lock, ops);
  if (!earlier) return earlier;
  if (auto own = check_not_a_link(directory(), step); !own) return std::unexpected(own.error());
  if (auto recorded = record_descriptor(*earlier, ops); !recorded) return std::unexpected(recorded.error());
  const StoreDescriptor& descriptor = state_->descriptor;
  lock.hold_volumes(descriptor);
  if (const auto device = device_of_directory(directory())) device_ = *device;
  if (shards.size() != std::max<std::size_t>(1, descriptor.volumes.size())) return other_volumes(directory());
  if (auto claimed = claim_volumes(descriptor, directory(), shards, Unrecorded::claim, ops); !claimed)
    return std::unexpected(claimed.error());
  return earlier;
}

Result<Adopted> Store::adopt() {
  const auto guard = state_->enter();
  if (state_->save != nullptr) return busy_directory(directory());
  const auto locked = DirectoryLock::acquire(directory(), DirectoryLock::LockFile::create);
  if (!locked) return std::unexpected(locked.error());
  return adopt_volumes(directory(), state_->ops);
}

}  // namespace trunkline::checkpoint
