#include "tensor_file/file_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

#include "base/threads.h"
#include "base/trace.h"
#include "io/engine_core.h"
#include "tensor_file/file_rules.h"

namespace trunkline::tensor_file {
namespace {

constexpr trace::Kind kCopyRead{"copy and checksum", trace::Category::checksum, trace::Kind::Fields::bytes};
constexpr trace::Kind kReadWait{"wait for a block", trace::Category::wait};
constexpr trace::Kind kRead{"read the files", trace::Category::checkpoint};

}  // namespace

FileReader::FileReader(const Engine& engine, std::vector<Target> targets, const ReadOptions& options)
    : engine_(engine), options_(options), targets_(std::move(targets)) {
  for (Target& target : targets_) {
    if (!options.verify) target.layout.checksums.clear();
    BlockRules rules = rules_for(target.file);
    rules.skip_gaps = true;
    blocks_.push_back(cut_into_blocks(target.layout, rules));
    checksums_.emplace_back(target.layout, blocks_.back().size());
    for (const Block& block : blocks_.back()) bytes_total_ += block.bytes;
  }
  order_ = in_turns(blocks_);
  for (const auto [layout, block] : order_) fresh_.add_block(targets_[layout].layout, blocks_[layout][block]);
  const std::size_t wanted = options.staging_bytes / StagingPool::kBlockBytes;
  ring_ = std::make_unique<StagingRing>(engine.core()->staging(),
                                        std::max<std::size_t>(1, std::min(wanted, order_.size())));
  arrived_.reserve(order_.size());
}

FileReader::~FileReader() {
  cancel();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return reading_ == 0 && working_ == 0 && landing_ == 0; });
}

void FileReader::cancel() {
  const std::scoped_lock lock(mutex_);
  fail(make_error(ErrorKind::cancelled, "reading was cancelled"));
}

void FileReader::fail(Error error) {
  if (!error_) error_ = std::move(error);
  changed_.notify_all();
}

Status FileReader::check_sizes() const {
  for (const Target& target : targets_) {
    const auto size = target.file.size();
    if (!size) return std::unexpected(size.error());
    if (*size == target.layout.bytes) continue;
    const std::string& path = target.layout.path;
    return std::unexpected(make_error(ErrorKind::corrupt,
                                      fmt::format("cannot read {}: it has {} bytes but should have {}; it "
                                                  "was cut off, or is a shard of another checkpoint",
                                                  path, *size, target.layout.bytes),
                                      path));
  }
  return {};
}

Status FileReader::read() {
  const trace::Span span(kRead);
  Status status = read_all();
  devices_.reset();
  // Not only at destruction: an error may be kept long after, along with everything that led to it.
  const std::scoped_lock lock(mutex_);
  ring_.reset();
  for (const Target& target : targets_) {
    if (!target.keep_open) std::ignore = target.file.close();
  }
  return status;
}

Status FileReader::read_all() {
  if (auto sizes = check_sizes(); !sizes) return sizes;
  side_by_side(std::min<std::size_t>(options_.workers, order_.size()), [this] { work(); });
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return reading_ == 0 && landing_ == 0; });
  if (error_) return std::unexpected(*error_);
  return {};
}

// Submits first, so that the disks are busy while this thread checksums what has arrived; while nothing has,
// it prepares memory for what will.
void FileReader::work() {
  std::unique_lock lock(mutex_);
  while (!error_) {
    const bool may_populate = fresh_.first_unclaimed() < order_.size();
    const bool has_arrived = taken_ < arrived_.size();
    if (may_send()) {
      send(lock);
    } else if (may_populate && (waits_for_memory() || !has_arrived)) {
      populate(lock);
    } else if (has_arrived) {
      finish(lock);
    } else if (taken_ == order_.size()) {
      return;
    } else {
      const trace::Span span(kReadWait);
      changed_.wait(lock);
    }
  }
}

bool FileReader::has_room() const {
  const auto [layout, index] = order_[next_];
  if (blocks_[layout][index].direct != nullptr) return direct_pending_ < kMostDirect;
  return ring_->has_free() || ring_->may_grow();
}

// The memory of a staged block is needed only when it has arrived.
bool FileReader::waits_for_memory() const {
  if (next_ == order_.size() || fresh_.is_ready(next_) || !has_room()) return false;
  const auto [layout, index] = order_[next_];
  return blocks_[layout][index].direct != nullptr;
}

bool FileReader::may_send() const { return next_ < order_.size() && has_room() && !waits_for_memory(); }

void FileReader::populate(std::unique_lock<std::mutex>& lock) {
  const std::size_t number = fresh_.first_unclaimed();
  fresh_.claim(number);
  ++working_;
  lock.unlock();
  fresh_.populate(number);
  lock.lock();
  fresh_.set_ready(number);
  --working_;
  changed_.notify_all();
}

void FileReader::finish(std::unique_lock<std::mutex>& lock) {
  const Arrived block = arrived_[taken_++];
  const bool populates = fresh_.claim(block.number);
  ++working_;
  lock.unlock();
  if (populates) fresh_.populate(block.number);
  std::vector<PartialChecksum> checksums = unpack(block);
  lock.lock();
  if (populates) fresh_.set_ready(block.number);
  check(block, std::move(checksums));
  const auto [layout, index] = block.place;
  Device* const device = device_of(targets_[layout].layout, blocks_[layout][index]);
  if (!error_ && device != nullptr && block.slot) {
    land(lock, block, *block.slot, *device);
  } else {
    release(block);
  }
  --working_;
  changed_.notify_all();
}

void FileReader::send(std::unique_lock<std::mutex>& lock) {
  Arrived sent{.place = order_[next_], .number = next_, .slot = std::nullopt};
  const Block& block = blocks_[sent.place.layout][sent.place.block];
  std::byte* data = nullptr;
  if (block.direct != nullptr) {
    ++direct_pending_;
    data = block.direct->memory.data + (block.offset - block.direct->offset);
  } else {
    sent.slot = ring_->try_take();
    if (!sent.slot) {
      grow_ring(lock);
      return;
    }
    data = ring_->block(*sent.slot);
  }
  ++next_;
  ++reading_;
  lock.unlock();
  Future future = targets_[sent.place.layout].file.async_pread({data, block.bytes}, block.offset);
  future.on_done([this, sent, future] { arrived(sent, future.result()); });
  lock.lock();
}

void FileReader::grow_ring(std::unique_lock<std::mutex>& lock) {
  ++working_;  // keeps the ring in use meanwhile
  const auto grown = ring_->grow(lock, 1);
  --working_;
  if (!grown) fail(grown.error());
  changed_.notify_all();
}

void FileReader::arrived(const Arrived& block, const Result<std::uint64_t>& result) {
  const std::scoped_lock lock(mutex_);
  if (result) {
    bytes_done_.fetch_add(*result, std::memory_order_relaxed);
    arrived_.push_back(block);
  } else {
    fail(result.error());
  }
  --reading_;
  changed_.notify_all();  // under the lock: a waiter may destroy this next
}

std::vector<PartialChecksum> FileReader::unpack(const Arrived& arrived) const {
  const FileLayout& layout = targets_[arrived.place.layout].layout;
  const Block& block = blocks_[arrived.place.layout][arrived.place.block];
  const trace::Span span(kCopyRead, layout.path, block.bytes);
  BlockChecksums checksums(layout);
  for_each_segment(layout, block.offset, block.end(), [&](const Segment& segment) {
    std::byte* memory = nullptr;
    if (segment.extent != nullptr && is_host(segment.extent->memory))
      memory = segment.extent->memory.data + (segment.offset - segment.extent->offset);
    const std::byte* source =
        arrived.slot ? ring_->block(*arrived.slot) + (segment.offset - block.offset) : memory;
    checksums.add(segment.checksum, {source, segment.bytes}, source == memory ? nullptr : memory);
  });
  return checksums.take();
}

void FileReader::land(std::unique_lock<std::mutex>& lock, const Arrived& arrived, StagingRing::Index slot,
                      Device& device) {
  const auto [layout, index] = arrived.place;
  ++landing_;
  lock.unlock();
  ring_->pin(slot, device);
  devices_->start(targets_[layout].layout, blocks_[layout][index], ring_->block(slot), Direction::from_host,
                  [this, arrived](const Status& status) {
                    const std::scoped_lock landed(mutex_);
                    if (!status) fail(status.error());
                    release(arrived);
                    --landing_;
                    changed_.notify_all();  // under the lock: a waiter may destroy this next
                  });
  lock.lock();
}

void FileReader::release(const Arrived& arrived) {
  if (arrived.slot) {
    ring_->give_back(*arrived.slot);
  } else {
    --direct_pending_;
  }
}

void FileReader::check(const Arrived& arrived, std::vector<PartialChecksum> checksums) {
  const auto [layout, index] = arrived.place;
  const FileLayout& of = targets_[layout].layout;
  for (const std::uint32_t checksum : checksums_[layout].add(index, std::move(checksums))) {
    const auto& expected = of.checksums[checksum].expected;
    const std::uint32_t found = checksums_[layout].value(checksum);
    if (!expected || *expected == found || mismatch_) continue;
    mismatch_ =
        ChecksumMismatch{.layout = layout, .checksum = checksum, .expected = *expected, .found = found};
    fail(make_error(
        ErrorKind::corrupt,
        fmt::format("{}: bytes {} to {} have the checksum {:08x}, but {:08x} was recorded; they "
                    "changed after they were written",
                    of.path, of.checksums[checksum].begin, of.checksums[checksum].end, found, *expected),
        of.path));
  }
}

}  // namespace trunkline::tensor_file
