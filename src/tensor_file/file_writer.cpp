#include "tensor_file/file_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <cstring>
#include <tuple>
#include <utility>

#include "base/threads.h"
#include "base/trace.h"
#include "io/engine_core.h"
#include "io/file/file_core.h"
#include "tensor_file/file_rules.h"

namespace trunkline::tensor_file {
namespace {

constexpr trace::Kind kCopyWrite{"copy and checksum", trace::Category::checksum, trace::Kind::Fields::bytes};
constexpr trace::Kind kWriteWait{"wait for a staging block", trace::Category::wait};

constexpr std::size_t kLeastSlots = 2;  // besides those that are held back: one being filled, one written

std::string encoded(const ChecksumField& field, std::uint32_t value) {
  std::string text;
  switch (field.encoding) {
    case ChecksumEncoding::le32:
      for (unsigned shift = 0; shift < 32; shift += 8) text.push_back(static_cast<char>(value >> shift));
      break;
    case ChecksumEncoding::hex:
      text = fmt::format("{:08x}", value);
      break;
  }
  return text;
}

std::uint64_t total_of(const std::vector<FileWriter::Target>& targets) {
  std::uint64_t total = 0;
  for (const auto& target : targets) total += target.layout.bytes;
  return total;
}

}  // namespace

FileWriter::FileWriter(const Engine& engine, std::vector<Target> targets, const WriteOptions& options)
    : engine_(engine), options_(options), targets_(std::move(targets)), bytes_total_(total_of(targets_)) {
  std::size_t held = 0;
  for (std::size_t layout = 0; layout < targets_.size(); ++layout) {
    const Target& target = targets_[layout];
    BlockRules rules = rules_for(target.file);
    rules.allow_direct = !options.stage_all;
    blocks_.push_back(cut_into_blocks(target.layout, rules));
    progress_.push_back({.checksums = ChecksumCombiner(target.layout, blocks_.back().size()),
                         .states = std::vector(blocks_.back().size(), BlockState::waiting),
                         .held = {}});
    for (std::size_t index = 0; index < blocks_.back().size(); ++index) {
      if (release_point(layout, blocks_.back()[index]) > index + 1) ++held;
    }
  }
  order_ = in_turns(blocks_);
  counts_[static_cast<std::size_t>(BlockState::waiting)] = order_.size();
  least_slots_ = std::min(kLeastSlots + held, order_.size());
  const std::size_t wanted =
      std::min<std::size_t>(options.staging_bytes / StagingPool::kBlockBytes, order_.size());
  ring_ = std::make_unique<StagingRing>(engine.core()->staging(), std::max(least_slots_, wanted));
  if (options.stage_all && wanted == order_.size()) write_when_ = WriteWhen::all_staged;
}

FileWriter::~FileWriter() { stop(); }

void FileWriter::stop() {
  cancel();
  {
    std::unique_lock lock(mutex_);
    for (const ClaimedBlock& each : std::exchange(fetched_blocks_, {})) move_to(BlockState::done, each.place);
    changed_.wait(lock, [&] {
      return growing_ + count(BlockState::filling) + count(BlockState::fetching) +
                 count(BlockState::writing) ==
             0;
    });
    ring_.reset();
  }
  devices_.reset();
  for (const Target& target : targets_) std::ignore = target.file.close();
}

void FileWriter::cancel() {
  const std::scoped_lock lock(mutex_);
  fail(make_error(ErrorKind::cancelled, "writing was cancelled"));
}

void FileWriter::fail(Error error) {
  if (!error_) error_ = std::move(error);
  changed_.notify_all();
}

Status FileWriter::outcome() const {
  if (error_) return std::unexpected(*error_);
  return {};
}

Status FileWriter::stage() {
  for (const Target& target : targets_) {
    // All room at once: a full disk shows before anything is copied.
    if (target.layout.bytes == 0) continue;
    if (auto room = target.file.core()->extend(0, target.layout.bytes, 0); !room) {
      const std::scoped_lock lock(mutex_);
      fail(room.error());
      return outcome();
    }
  }
  side_by_side(std::min<std::size_t>(options_.copiers, order_.size()), [this] { copy_blocks(); });
  std::unique_lock lock(mutex_);
  if (!error_) write_staged(lock);
  return outcome();
}

Status FileWriter::finish() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return count(BlockState::writing) == 0; });
  return outcome();
}

bool FileWriter::may_follow(BlockState from, BlockState to) {
  switch (to) {
    case BlockState::waiting:
      return false;
    case BlockState::filling:
      return from == BlockState::waiting || from == BlockState::fetched;
    case BlockState::fetching:
    case BlockState::held:
      return from == BlockState::filling;
    case BlockState::fetched:
      return from == BlockState::fetching;
    case BlockState::staged:
      return from == BlockState::filling || from == BlockState::held;
    case BlockState::writing:
      return from == BlockState::staged;
    case BlockState::done:
      return from == BlockState::writing || from == BlockState::fetching || from == BlockState::fetched;
  }
  return false;
}

// The lock is held.
void FileWriter::move_to(BlockState to, const BlockPlace& place) {
  BlockState& state = progress_[place.layout].states[place.block];
  assert(may_follow(state, to));
  --counts_[static_cast<std::size_t>(state)];
  ++counts_[static_cast<std::size_t>(to)];
  if (is_direct(place)) {  // never fetched
    if (to == BlockState::filling) ++direct_;
    if (to == BlockState::done) --direct_;
  }
  state = to;
}

void FileWriter::copy_blocks() {
  std::unique_lock lock(mutex_);
  Claim claimed;
  while (claim(lock, claimed)) {
    const auto& [place, slot] = claimed.block;
    lock.unlock();
    if (!claimed.is_fetched && start_fetch(claimed.block)) {
      lock.lock();
      continue;
    }
    const FileLayout& layout = targets_[place.layout].layout;
    const Block& block = blocks_[place.layout][place.block];
    std::vector<PartialChecksum> checksums = fill(layout, block, slot ? ring_->block(*slot) : nullptr);
    lock.lock();
    finish_fill(claimed.block, std::move(checksums));
    if (write_when_ == WriteWhen::staged) write_staged(lock);
    changed_.notify_all();
  }
}

void FileWriter::write_staged(std::unique_lock<std::mutex>& lock) {
  const std::vector<ClaimedBlock> staged = std::exchange(staged_blocks_, {});
  for (const ClaimedBlock& each : staged) move_to(BlockState::writing, each.place);
  lock.unlock();
  for (const ClaimedBlock& each : staged) start_write(each);
  lock.lock();
}

// The next block and what it needs, or false when there is none (any more).
bool FileWriter::claim(std::unique_lock<std::mutex>& lock, Claim& claimed) {
  while (!error_ && (next_ < order_.size() || is_fetching())) {
    if (!fetched_blocks_.empty()) {
      claimed = {.block = fetched_blocks_.front(), .is_fetched = true};
      fetched_blocks_.pop_front();
      move_to(BlockState::filling, claimed.block.place);
      return true;
    }
    if (const auto next = try_claim_next()) {
      claimed = *next;
      return true;
    }
    const bool lacks_slot = next_ < order_.size() && !is_direct(order_[next_]);
    if (lacks_slot && ring_->may_grow()) {
      grow_ring(lock);
    } else if (lacks_slot && !staged_blocks_.empty()) {
      write_when_ = WriteWhen::staged;  // there is less room than there seemed to be
      write_staged(lock);
    } else {
      const trace::Span span(kWriteWait);
      changed_.wait(lock);
    }
  }
  return false;
}

// The next one that is waiting, if what it needs is there.
std::optional<FileWriter::Claim> FileWriter::try_claim_next() {
  if (next_ == order_.size()) return std::nullopt;
  const BlockPlace place = order_[next_];
  std::optional<StagingRing::Index> slot;
  if (is_direct(place)) {
    if (direct_ >= kMostDirect) return std::nullopt;
  } else {
    slot = ring_->try_take();
    if (!slot) return std::nullopt;
  }
  ++next_;
  move_to(BlockState::filling, place);
  return Claim{.block = {.place = place, .slot = slot}};
}

void FileWriter::grow_ring(std::unique_lock<std::mutex>& lock) {
  ++growing_;
  const auto grown = ring_->grow(lock, least_slots_);
  --growing_;
  if (!grown) fail(grown.error());
  changed_.notify_all();
}

// Begins to copy what the block has in the memory of devices, after which it can be claimed again; false
// where there is nothing.
bool FileWriter::start_fetch(const ClaimedBlock& claimed) {
  const FileLayout& layout = targets_[claimed.place.layout].layout;
  const Block& block = blocks_[claimed.place.layout][claimed.place.block];
  Device* const device = device_of(layout, block);
  if (device == nullptr || !claimed.slot) return false;
  const StagingRing::Index slot = *claimed.slot;
  ring_->pin(slot, *device);
  {
    const std::scoped_lock lock(mutex_);
    move_to(BlockState::fetching, claimed.place);
  }
  devices_->start(layout, block, ring_->block(slot), Direction::to_host,
                  [this, claimed](const Status& status) { finish_fetch(claimed, status); });
  return true;
}

void FileWriter::finish_fetch(const ClaimedBlock& claimed, const Status& status) {
  const std::scoped_lock lock(mutex_);
  if (!status) fail(status.error());
  move_to(error_ ? BlockState::done : BlockState::fetched,
          claimed.place);  // after an error, nobody claims it
  if (!error_) fetched_blocks_.push_back(claimed);
  changed_.notify_all();  // under the lock: a waiter may destroy this next
}

std::vector<PartialChecksum> FileWriter::fill(const FileLayout& layout, const Block& block,
                                              std::byte* slot) const {
  const trace::Span span(kCopyWrite, layout.path, block.bytes);
  BlockChecksums checksums(layout);
  for_each_segment(layout, block.offset, block.end(), [&](const Segment& segment) {
    const std::byte* source = nullptr;
    std::byte* target = slot == nullptr ? nullptr : slot + (segment.offset - block.offset);
    if (segment.extent == nullptr) {
      std::memset(target, 0, segment.bytes);
      source = target;
    } else if (is_host(segment.extent->memory)) {
      source = segment.extent->memory.data + (segment.offset - segment.extent->offset);
    } else {
      source = target;  // fetched
    }
    checksums.add(segment.checksum, {source, segment.bytes}, source == target ? nullptr : target);
  });
  return checksums.take();
}

// With it, others that waited for its checksums may be staged.
void FileWriter::finish_fill(const ClaimedBlock& filled, std::vector<PartialChecksum> checksums) {
  const auto [layout, index] = filled.place;
  Progress& progress = progress_[layout];
  progress.checksums.add(index, std::move(checksums));
  const auto stage = [this](const ClaimedBlock& block) {
    move_to(BlockState::staged, block.place);
    staged_blocks_.push_back(block);
  };
  const std::size_t after = release_point(layout, blocks_[layout][index]);
  if (after == 0 || !filled.slot) {  // filled blocks are never direct
    stage(filled);
  } else {
    move_to(BlockState::held, filled.place);
    progress.held.push_back({.block = index, .slot = *filled.slot, .after = after});
  }
  std::erase_if(progress.held, [&](const Held& held) {
    if (progress.checksums.folded() < held.after) return false;
    fill_checksum_fields(layout, blocks_[layout][held.block], ring_->block(held.slot));
    stage({.place = {.layout = layout, .block = held.block}, .slot = held.slot});
    return true;
  });
}

// How many blocks of the layout must be folded before all checksums that stand in this one are known.
std::size_t FileWriter::release_point(std::size_t layout, const Block& block) const {
  const FileLayout& of = targets_[layout].layout;
  std::size_t after = 0;
  for (const ChecksumField& field : checksum_fields_in(of, block.offset, block.end())) {
    const Checksum& checksum = of.checksums[field.checksum];
    const auto last = std::ranges::partition_point(
        blocks_[layout], [&](const Block& each) { return each.end() < checksum.end; });
    after = std::max(after, static_cast<std::size_t>(last - blocks_[layout].begin()) + 1);
  }
  return after;
}

void FileWriter::fill_checksum_fields(std::size_t layout, const Block& block, std::byte* slot) const {
  for (const ChecksumField& field : checksum_fields_in(targets_[layout].layout, block.offset, block.end())) {
    const std::string text = encoded(field, progress_[layout].checksums.value(field.checksum));
    const std::uint64_t begin = std::max(field.offset, block.offset);
    const std::uint64_t end = std::min(field.end(), block.end());
    std::memcpy(slot + (begin - block.offset), text.data() + (begin - field.offset), end - begin);
  }
}

void FileWriter::start_write(const ClaimedBlock& claimed) {
  const Block& block = blocks_[claimed.place.layout][claimed.place.block];
  std::byte* data = nullptr;
  if (claimed.slot) {
    data = ring_->block(*claimed.slot);
  } else {
    data = block.direct->memory.data + (block.offset - block.direct->offset);
  }
  Future future = targets_[claimed.place.layout].file.async_pwrite({data, block.bytes}, block.offset);
  future.on_done([this, claimed, future] { finish_write(claimed, future.result()); });
}

void FileWriter::finish_write(const ClaimedBlock& claimed, const Result<std::uint64_t>& result) {
  const std::scoped_lock lock(mutex_);
  if (result) {
    bytes_done_.fetch_add(*result, std::memory_order_relaxed);
  } else {
    fail(result.error());
  }
  if (claimed.slot) ring_->give_back(*claimed.slot);
  move_to(BlockState::done, claimed.place);
  changed_.notify_all();  // under the lock: a waiter may destroy this next
}

}  // namespace trunkline::tensor_file
