#include "tensor_file/image_writer.h"

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

std::string encoded(const Patch& patch, std::uint32_t value) {
  if (patch.encoding == PatchEncoding::hex) return fmt::format("{:08x}", value);
  std::string bytes;
  for (unsigned shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<char>(value >> shift));
  return bytes;
}

std::uint64_t total_of(const std::vector<ImageWriter::Target>& targets) {
  std::uint64_t total = 0;
  for (const auto& target : targets) total += target.image.bytes;
  return total;
}

}  // namespace

ImageWriter::ImageWriter(const Engine& engine, std::vector<Target> targets, const WriteOptions& options)
    : engine_(engine), options_(options), targets_(std::move(targets)), bytes_total_(total_of(targets_)) {
  std::size_t held = 0;
  for (std::size_t image = 0; image < targets_.size(); ++image) {
    const Target& target = targets_[image];
    BlockRules rules = rules_for(target.file);
    rules.allow_direct = !options.stage_all;
    blocks_.push_back(cut_into_blocks(target.image, rules));
    progress_.push_back({.sums = SumFold(target.image, blocks_.back().size()), .held = {}});
    for (std::size_t index = 0; index < blocks_.back().size(); ++index) {
      if (release_point(image, blocks_.back()[index]) > index + 1) ++held;
    }
  }
  order_ = in_turns(blocks_);
  least_slots_ = std::min(kLeastSlots + held, order_.size());
  const std::size_t wanted =
      std::min<std::size_t>(options.staging_bytes / StagingPool::kBlockBytes, order_.size());
  ring_ = std::make_unique<StagingRing>(engine.core()->staging(), std::max(least_slots_, wanted));
  defer_ = options.stage_all && wanted == order_.size();
}

ImageWriter::~ImageWriter() { stop(); }

void ImageWriter::stop() {
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

void ImageWriter::cancel() {
  const std::scoped_lock lock(mutex_);
  fail(make_error(ErrorKind::cancelled, "writing was cancelled"));
}

void ImageWriter::fail(Error error) {
  if (!error_) error_ = std::move(error);
  changed_.notify_all();
}

Status ImageWriter::outcome() const {
  if (error_) return std::unexpected(*error_);
  return {};
}

Status ImageWriter::stage() {
  for (const Target& target : targets_) {
    // All room at once: a full disk shows before anything is copied.
    if (target.image.bytes == 0) continue;
    if (auto room = target.file.core()->extend(0, target.image.bytes, 0); !room) {
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

Status ImageWriter::finish() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return writing_ == 0; });
  return outcome();
}

void ImageWriter::copy_blocks() {
  std::unique_lock lock(mutex_);
  Claimed claimed;
  while (claim(lock, claimed)) {
    const Ready& filled = claimed.ready;
    lock.unlock();
    if (!claimed.fetched && fetch(filled)) {
      lock.lock();
      continue;
    }
    const Image& image = targets_[filled.place.image].image;
    const Block& block = blocks_[filled.place.image][filled.place.block];
    std::vector<PartialSum> sums = fill(image, block, filled.slot ? ring_->block(*filled.slot) : nullptr);
    lock.lock();
    const std::vector<Ready> ready = staged(filled, std::move(sums));
    deferred_.insert(deferred_.end(), ready.begin(), ready.end());
    if (!defer_) write_deferred(lock);
    --filling_;
    changed_.notify_all();
  }
}

void ImageWriter::write_deferred(std::unique_lock<std::mutex>& lock) {
  const std::vector<Ready> ready = std::exchange(deferred_, {});
  writing_ += ready.size();
  lock.unlock();
  for (const Ready& each : ready) write(each);
  lock.lock();
}

// The next block and what it needs, or false when there is none (any more).
bool ImageWriter::claim(std::unique_lock<std::mutex>& lock, Claimed& claimed) {
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
    if (blocks_[place.image][place.block].direct != nullptr) {
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

void ImageWriter::grow_ring(std::unique_lock<std::mutex>& lock) {
  ++filling_;  // the ring is in use meanwhile
  const auto grown = ring_->grow(lock, least_slots_);
  --filling_;
  if (!grown) fail(grown.error());
  changed_.notify_all();
}

// Begins to copy what the block has in the memory of devices, after which it can be claimed again; false
// where there is nothing.
bool ImageWriter::fetch(const Ready& claimed) {
  const Image& image = targets_[claimed.place.image].image;
  const Block& block = blocks_[claimed.place.image][claimed.place.block];
  Device* const device = device_of(image, block);
  if (device == nullptr || !claimed.slot) return false;
  const StagingRing::Index slot = *claimed.slot;
  ring_->pin(slot, *device);
  {
    const std::scoped_lock lock(mutex_);
    ++fetching_;
  }
  devices_->start(image, block, ring_->block(slot), Direction::to_host,
                  [this, claimed](const Status& status) { fetched(claimed, status); });
  return true;
}

void ImageWriter::fetched(const Ready& claimed, const Status& status) {
  const std::scoped_lock lock(mutex_);
  if (!status) fail(status.error());
  if (error_) {
    --filling_;  // nobody claims it
  } else {
    fetched_.push_back(claimed);
  }
  changed_.notify_all();  // under the lock: whoever waits may destroy this next
}

std::vector<PartialSum> ImageWriter::fill(const Image& image, const Block& block, std::byte* slot) const {
  BlockSums sums(image);
  for_each_segment(image, block.offset, block.end(), [&](const Segment& segment) {
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
    sums.add(segment.sum, {source, segment.bytes}, source == target ? nullptr : target);
  });
  return sums.take();
}

// What can be written now that a block is filled: itself, and others that waited for its checksums.
std::vector<ImageWriter::Ready> ImageWriter::staged(const Ready& filled, std::vector<PartialSum> sums) {
  const auto [image, index] = filled.place;
  Progress& progress = progress_[image];
  progress.sums.add(index, std::move(sums));
  std::vector<Ready> ready;
  const std::size_t after = release_point(image, blocks_[image][index]);
  if (after == 0 || !filled.slot) {  // patched blocks are never direct
    ready.push_back(filled);
  } else {
    progress.held.push_back({.block = index, .slot = *filled.slot, .after = after});
  }
  std::erase_if(progress.held, [&](const Held& held) {
    if (progress.sums.folded() < held.after) return false;
    apply_patches(image, blocks_[image][held.block], ring_->block(held.slot));
    ready.push_back({.place = {.image = image, .block = held.block}, .slot = held.slot});
    return true;
  });
  return ready;
}

// How many blocks of the image must be folded before all checksums that stand in this one are known.
std::size_t ImageWriter::release_point(std::size_t image, const Block& block) const {
  const Image& of = targets_[image].image;
  std::size_t after = 0;
  for (const Patch& patch : patches_in(of, block.offset, block.end())) {
    const Sum& sum = of.sums[patch.sum];
    const auto last =
        std::ranges::partition_point(blocks_[image], [&](const Block& each) { return each.end() < sum.end; });
    after = std::max(after, static_cast<std::size_t>(last - blocks_[image].begin()) + 1);
  }
  return after;
}

void ImageWriter::apply_patches(std::size_t image, const Block& block, std::byte* slot) const {
  for (const Patch& patch : patches_in(targets_[image].image, block.offset, block.end())) {
    const std::string text = encoded(patch, progress_[image].sums.value(patch.sum));
    const std::uint64_t begin = std::max(patch.offset, block.offset);
    const std::uint64_t end = std::min(patch.end(), block.end());
    std::memcpy(slot + (begin - block.offset), text.data() + (begin - patch.offset), end - begin);
  }
}

void ImageWriter::write(const Ready& ready) {
  const Block& block = blocks_[ready.place.image][ready.place.block];
  std::byte* data = nullptr;
  if (ready.slot) {
    data = ring_->block(*ready.slot);
  } else {
    data = block.direct->memory.data + (block.offset - block.direct->offset);
  }
  Future future = targets_[ready.place.image].file.async_pwrite({data, block.bytes}, block.offset);
  future.on_done([this, ready, future] { written(ready, future.result()); });
}

void ImageWriter::written(const Ready& ready, const Result<std::uint64_t>& result) {
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
  changed_.notify_all();  // under the lock: whoever waits may destroy this next
}

}  // namespace trunkline::tensor_file
