#include "tensor_file/file_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

#include "base/threads.h"
#include "io/engine_core.h"
#include "io/file/file_core.h"
#include "tensor_file/file_rules.h"

namespace trunkline::tensor_file {
namespace {

constexpr std::size_t kLeastSlots = 2;  // besides those that are held back: one being filled, one written

std::string encoded(const ChecksumField& field, std::uint32_t value) {
  if (field.encoding == ChecksumEncoding::hex) return fmt::format("{:08x}", value);
  std::string bytes;
  for (unsigned shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<char>(value >> shift));
  return bytes;
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
    progress_.push_back({.checksums = ChecksumCombiner(target.layout, blocks_.back().size()), .held = {}});
    for (std::size_t index = 0; index < blocks_.back().size(); ++index) {
      if (release_point(layout, blocks_.back()[index]) > index + 1) ++held;
    }
  }
  order_ = in_turns(blocks_);
  least_slots_ = std::min(kLeastSlots + held, order_.size());
  const std::size_t wanted =
      std::min<std::size_t>(options.staging_bytes / StagingPool::kBlockBytes, order_.size());
  ring_ = std::make_unique<StagingRing>(engine.core()->staging(), std::max(least_slots_, wanted));
  defer_ = options.stage_all && wanted == order_.size();
}

FileWriter::~FileWriter() { stop(); }

void FileWriter::stop() {
  cancel();
  {
    std::unique_lock lock(mutex_);
    filling_ -= fetched_.size();
    fetched_.clear();
    changed_.wait(lock, [&] { return filling_ == 0 && writing_ == 0; });
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
  if (!error_) write_deferred(lock);
  return outcome();
}

Status FileWriter::finish() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return writing_ == 0; });
  return outcome();
}

void FileWriter::copy_blocks() {
  std::unique_lock lock(mutex_);
  Claimed claimed;
  while (claim(lock, claimed)) {
    const Ready& filled = claimed.ready;
    lock.unlock();
    if (!claimed.fetched && fetch(filled)) {
      lock.lock();
      continue;
    }
    const FileLayout& layout = targets_[filled.place.layout].layout;
    const Block& block = blocks_[filled.place.layout][filled.place.block];
    std::vector<PartialChecksum> checksums =
        fill(layout, block, filled.slot ? ring_->block(*filled.slot) : nullptr);
    lock.lock();
    const std::vector<Ready> ready = staged(filled, std::move(checksums));
    deferred_.insert(deferred_.end(), ready.begin(), ready.end());
    if (!defer_) write_deferred(lock);
    --filling_;
    changed_.notify_all();
  }
}

void FileWriter::write_deferred(std::unique_lock<std::mutex>& lock) {
  const std::vector<Ready> ready = std::exchange(deferred_, {});
  writing_ += ready.size();
  lock.unlock();
  for (const Ready& each : ready) write(each);
  lock.lock();
}

// The next block and what it needs, or false when there is none (any more).
bool FileWriter::claim(std::unique_lock<std::mutex>& lock, Claimed& claimed) {
  while (!error_ && (next_ < order_.size() || fetching_ > 0)) {
    if (!fetched_.empty()) {
      claimed = {.ready = fetched_.front(), .fetched = true};
      fetched_.pop_front();
      --fetching_;
      return true;
    }
    if (next_ == order_.size()) {
      changed_.wait(lock);
      continue;
    }
    const BlockPlace place = order_[next_];
    if (blocks_[place.layout][place.block].direct != nullptr) {
      if (direct_writing_ < kMostDirect) {
        ++direct_writing_;
        claimed = {.ready = {.place = place, .slot = std::nullopt}};
        ++next_;
        ++filling_;
        return true;
      }
    } else if (const auto slot = ring_->try_take()) {
      claimed = {.ready = {.place = place, .slot = slot}};
      ++next_;
      ++filling_;
      return true;
    } else if (ring_->may_grow()) {
      grow_ring(lock);
      continue;
    } else if (!deferred_.empty()) {
      defer_ = false;  // there is less room than there seemed to be
      write_deferred(lock);
      continue;
    }
    changed_.wait(lock);
  }
  return false;
}

void FileWriter::grow_ring(std::unique_lock<std::mutex>& lock) {
  ++filling_;  // the ring is in use meanwhile
  const auto grown = ring_->grow(lock, least_slots_);
  --filling_;
  if (!grown) fail(grown.error());
  changed_.notify_all();
}

// Begins to copy what the block has in the memory of devices, after which it can be claimed again; false
// where there is nothing.
bool FileWriter::fetch(const Ready& claimed) {
  const FileLayout& layout = targets_[claimed.place.layout].layout;
  const Block& block = blocks_[claimed.place.layout][claimed.place.block];
  Device* const device = device_of(layout, block);
  if (device == nullptr || !claimed.slot) return false;
  const StagingRing::Index slot = *claimed.slot;
  ring_->pin(slot, *device);
  {
    const std::scoped_lock lock(mutex_);
    ++fetching_;
  }
  devices_->start(layout, block, ring_->block(slot), Direction::to_host,
                  [this, claimed](const Status& status) { fetched(claimed, status); });
  return true;
}

void FileWriter::fetched(const Ready& claimed, const Status& status) {
  const std::scoped_lock lock(mutex_);
  if (!status) fail(status.error());
  if (error_) {
    --filling_;  // nobody claims it
  } else {
    fetched_.push_back(claimed);
  }
  changed_.notify_all();  // under the lock: a waiter may destroy this next
}

std::vector<PartialChecksum> FileWriter::fill(const FileLayout& layout, const Block& block,
                                              std::byte* slot) const {
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

// What can be written now that a block is filled: itself, and others that waited for its checksums.
std::vector<FileWriter::Ready> FileWriter::staged(const Ready& filled,
                                                  std::vector<PartialChecksum> checksums) {
  const auto [layout, index] = filled.place;
  Progress& progress = progress_[layout];
  progress.checksums.add(index, std::move(checksums));
  std::vector<Ready> ready;
  const std::size_t after = release_point(layout, blocks_[layout][index]);
  if (after == 0 || !filled.slot) {  // filled blocks are never direct
    ready.push_back(filled);
  } else {
    progress.held.push_back({.block = index, .slot = *filled.slot, .after = after});
  }
  std::erase_if(progress.held, [&](const Held& held) {
    if (progress.checksums.folded() < held.after) return false;
    fill_checksum_fields(layout, blocks_[layout][held.block], ring_->block(held.slot));
    ready.push_back({.place = {.layout = layout, .block = held.block}, .slot = held.slot});
    return true;
  });
  return ready;
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

void FileWriter::write(const Ready& ready) {
  const Block& block = blocks_[ready.place.layout][ready.place.block];
  std::byte* data = nullptr;
  if (ready.slot) {
    data = ring_->block(*ready.slot);
  } else {
    data = block.direct->memory.data + (block.offset - block.direct->offset);
  }
  Future future = targets_[ready.place.layout].file.async_pwrite({data, block.bytes}, block.offset);
  future.on_done([this, ready, future] { written(ready, future.result()); });
}

void FileWriter::written(const Ready& ready, const Result<std::uint64_t>& result) {
  const std::scoped_lock lock(mutex_);
  if (result) {
    bytes_done_.fetch_add(*result, std::memory_order_relaxed);
  } else {
    fail(result.error());
  }
  if (ready.slot) {
    ring_->give_back(*ready.slot);
  } else {
    --direct_writing_;
  }
  --writing_;
  changed_.notify_all();  // under the lock: a waiter may destroy this next
}

}  // namespace trunkline::tensor_file
