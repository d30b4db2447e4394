#include "checkpoint/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <tuple>
#include <utility>

#include "base/threads.h"
#include "checkpoint/listing.h"
#include "checkpoint/tensor_places.h"
#include "checkpoint/volume_owner.h"
#include "trunkline/checksum.h"
#include "trunkline/file.h"

namespace trunkline::checkpoint {
namespace {

constexpr std::uint64_t kBlockBytes = 4 * kMiB;  // or a chunk, if that is larger
constexpr std::uint64_t kRingBytes = 64 * kMiB;
constexpr unsigned kThreads = 2;  // for checksums; each is several times as fast as a disk
constexpr std::chrono::milliseconds kProgressEvery{100};

// A shard that is being read, front to back.
struct OpenShard {
  std::uint64_t shard = 0;
  File file;
  std::uint64_t next = 0;  // offset of the next block
  std::uint64_t end = 0;   // of the chunks that can be read
};

// The shards of one volume, one after the other.
struct VolumeQueue {
  std::deque<std::uint64_t> shards;
  std::unique_ptr<OpenShard> current;
  unsigned in_flight = 0;
};

struct Slot {
  std::span<std::byte> memory;
  File file;
  Future future;
  std::size_t volume = 0;
  std::uint64_t shard = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

// The caller's thread opens files and submits reads; separate threads compute checksums.
class Verification {
 public:
  Verification(const Engine& engine, const std::string& directory, const Manifest& manifest,
               const VerifyOptions& options)
      : engine_(engine), directory_(directory), manifest_(manifest), options_(options), places_(manifest) {}

  Result<VerifyReport> run();

 private:
  Status make_ring();
  std::unique_ptr<OpenShard> open(std::uint64_t index);
  bool ready(VolumeQueue& queue);
  VolumeQueue* next_queue();
  void submit(Slot& slot, VolumeQueue& queue);
  Status feed();
  void sum_until_stopped();
  void check(const Slot& slot);
  void check_chunk(const Slot& slot, std::uint64_t begin, std::uint64_t end);
  void report(Mismatch mismatch, std::string_view what);

  const Engine& engine_;
  const std::string& directory_;
  const Manifest& manifest_;
  const VerifyOptions& options_;
  const TensorPlaces places_;

  std::uint64_t block_bytes_ = 0;
  Buffer memory_;
  std::vector<Slot> slots_;
  std::vector<VolumeQueue> queues_;  // used by the caller's thread only

  std::mutex mutex_;  // guards the members below
  std::condition_variable arrival_;
  std::condition_variable freed_;
  std::deque<Slot*> arrived_;
  std::vector<Slot*> free_;
  bool stopping_ = false;
  std::uint64_t done_bytes_ = 0;
  VerifyReport report_;
};

Status Verification::make_ring() {
  block_bytes_ = std::max(kBlockBytes, manifest_.chunk_bytes);
  const std::uint64_t needed = chunks_of(bytes_to_verify(manifest_), block_bytes_) + manifest_.shards.size();
  std::uint64_t count =
      std::clamp<std::uint64_t>(needed, 1, std::max<std::uint64_t>(2, kRingBytes / block_bytes_));
  auto memory = engine_.allocate(count * block_bytes_);
  // The budget is small, or shared with others.
  for (; !memory && memory.error().kind == ErrorKind::out_of_budget && count > 1;
       memory = engine_.allocate(count * block_bytes_))
    count /= 2;
  if (!memory) return std::unexpected(memory.error());
  memory_ = std::move(*memory);
  slots_.resize(count);
  for (std::uint64_t i = 0; i < count; ++i) {
    slots_[i].memory = memory_.span().subspan(i * block_bytes_, block_bytes_);
    free_.push_back(&slots_[i]);
  }
  return {};
}

void Verification::report(Mismatch mismatch, std::string_view what) {
  mismatch.path = shard_path(directory_, manifest_, mismatch.shard);
  const std::uint64_t end = mismatch.chunk ? mismatch.offset + mismatch.bytes : kMaxNumber;
  mismatch.tensors = places_.in(mismatch.shard, mismatch.offset, end);
  mismatch.message = mismatch.path;
  if (mismatch.chunk)
    mismatch.message += fmt::format(", chunk {} (bytes {} to {})", *mismatch.chunk, mismatch.offset, end);
  mismatch.message += fmt::format(": {}; ", what);
  if (mismatch.tensors.empty()) {
    mismatch.message += "it contains no tensor's bytes";
  } else {
    constexpr std::size_t kShown = 4;
    const auto shown = std::span(mismatch.tensors).first(std::min(kShown, mismatch.tensors.size()));
    mismatch.message +=
        fmt::format("{} {}", mismatch.tensors.size() == 1 ? "tensor" : "tensors", fmt::join(shown, ", "));
    if (mismatch.tensors.size() > kShown)
      mismatch.message += fmt::format(" and {} more", mismatch.tensors.size() - kShown);
  }
  const std::scoped_lock lock(mutex_);
  report_.mismatches.push_back(std::move(mismatch));
}

// nullptr where there is nothing in it to read; that is counted as done.
std::unique_ptr<OpenShard> Verification::open(std::uint64_t index) {
  const Shard& shard = manifest_.shards[index];
  OpenShard opened{.shard = index, .file = {}};
  const std::string path = shard_path(directory_, manifest_, index);
  Result<std::uint64_t> size = 0;
  if (auto file = File::open(engine_, path)) {
    opened.file = std::move(*file);
    size = opened.file.size();
  } else {
    size = std::unexpected(file.error());
  }
  if (!size) {
    const Error& error = size.error();
    const bool gone = error.code == ENOENT || error.code == ENOTDIR;
    const auto why =
        gone ? why_gone(manifest_.volumes[shard.volume], directory_, manifest_.step) : std::nullopt;
    // The manifest is in the same place, so no disk is missing.
    const bool is_beside = manifest_.volumes[shard.volume] == kOwnVolume;
    report({.kind = gone ? Mismatch::Kind::missing : Mismatch::Kind::unread,
            .shard = index,
            .bytes = shard.bytes,
            .code = error.code},
           gone ? fmt::format("it is missing ({}){}", errno_name(error.code),
                              why ? ": " + *why
                                  : std::string(is_beside ? ": it was removed" : ", is its disk mounted?"))
                : error.message);
  } else if (*size != shard.bytes) {
    report({.kind = Mismatch::Kind::size, .shard = index, .bytes = *size},
           fmt::format("it has {} bytes, but the manifest says {}", *size, shard.bytes));
  }
  const std::uint64_t found = size.value_or(0);
  const std::uint64_t chunk = manifest_.chunk_bytes;
  opened.end = found >= shard.bytes ? shard.bytes : found / chunk * chunk;
  const std::scoped_lock lock(mutex_);
  done_bytes_ += shard.bytes - opened.end;
  return opened.end == 0 ? nullptr : std::make_unique<OpenShard>(std::move(opened));
}

bool Verification::ready(VolumeQueue& queue) {
  while (!queue.current || queue.current->next == queue.current->end) {
    queue.current.reset();
    if (queue.shards.empty()) return false;
    queue.current = open(queue.shards.front());
    queue.shards.pop_front();
  }
  return true;
}

// The volume with the fewest reads in flight, so that a slow one delays no other.
VolumeQueue* Verification::next_queue() {
  VolumeQueue* best = nullptr;
  for (VolumeQueue& queue : queues_) {
    if (best != nullptr && queue.in_flight >= best->in_flight) continue;
    if (ready(queue)) best = &queue;
  }
  return best;
}

void Verification::submit(Slot& slot, VolumeQueue& queue) {
  OpenShard& source = *queue.current;
  slot.file = source.file;
  slot.volume = static_cast<std::size_t>(&queue - queues_.data());
  slot.shard = source.shard;
  slot.offset = source.next;
  slot.bytes = std::min(block_bytes_, source.end - source.next);
  source.next += slot.bytes;
  ++queue.in_flight;
  slot.future = slot.file.async_pread(slot.memory.first(slot.bytes), slot.offset);
  slot.future.on_done([this, &slot] {
    const std::scoped_lock lock(mutex_);
    arrived_.push_back(&slot);
    arrival_.notify_one();  // under the lock: this object is destroyed as soon as all slots have come back
  });
}

// Runs until everything is read and checksummed, or returns `cancelled`; nothing is in flight afterwards in
// either case.
Status Verification::feed() {
  bool cancelled = false;
  std::vector<Slot*> free = std::exchange(free_, {});
  while (true) {
    while (!cancelled && !free.empty()) {
      VolumeQueue* const queue = next_queue();
      if (queue == nullptr) break;
      submit(*free.back(), *queue);
      free.pop_back();
    }
    if (free.size() == slots_.size()) break;
    std::uint64_t done = 0;
    {
      std::unique_lock lock(mutex_);
      freed_.wait_for(lock, kProgressEvery, [this] { return !free_.empty(); });
      for (Slot* const slot : std::exchange(free_, {})) {
        --queues_[slot->volume].in_flight;
        free.push_back(slot);
      }
      done = done_bytes_;
    }
    if (options_.on_progress) options_.on_progress(done);
    if (!cancelled && options_.cancelled && options_.cancelled()) {
      cancelled = true;
      for (Slot& slot : slots_) {
        if (slot.future.valid()) slot.future.cancel();
      }
    }
  }
  if (cancelled)
    return std::unexpected(make_error(ErrorKind::cancelled, "verifying " + directory_ + " was cancelled"));
  return {};
}

void Verification::check_chunk(const Slot& slot, std::uint64_t begin, std::uint64_t end) {
  const std::uint64_t chunk = (slot.offset + begin) / manifest_.chunk_bytes;
  const std::uint32_t found = crc32c(slot.memory.subspan(begin, end - begin));
  const std::uint32_t expected = manifest_.shards[slot.shard].crc32c[chunk];
  if (found == expected) return;
  report({.kind = Mismatch::Kind::checksum,
          .shard = slot.shard,
          .chunk = chunk,
          .offset = slot.offset + begin,
          .bytes = end - begin},
         fmt::format("its CRC-32C is {:08x}, but the manifest says {:08x}", found, expected));
}

void Verification::check(const Slot& slot) {
  const auto result = slot.future.result();
  if (!result && result.error().kind == ErrorKind::cancelled) return;
  std::uint64_t read = 0;
  for (std::uint64_t begin = 0; begin < slot.bytes; begin += manifest_.chunk_bytes) {
    const std::uint64_t end = std::min(begin + manifest_.chunk_bytes, slot.bytes);
    // Where a block cannot be read, most of its chunks usually can.
    const auto again =
        result ? result : slot.file.pread(slot.memory.subspan(begin, end - begin), slot.offset + begin);
    if (again) {
      check_chunk(slot, begin, end);
      read += end - begin;
    } else {
      report({.kind = Mismatch::Kind::unread,
              .shard = slot.shard,
              .chunk = (slot.offset + begin) / manifest_.chunk_bytes,
              .offset = slot.offset + begin,
              .bytes = end - begin,
              .code = again.error().code},
             again.error().message);
    }
  }
  const std::scoped_lock lock(mutex_);
  done_bytes_ += slot.bytes;
  report_.bytes += read;
}

void Verification::sum_until_stopped() {
  std::unique_lock lock(mutex_);
  while (true) {
    arrival_.wait(lock, [this] { return stopping_ || !arrived_.empty(); });
    if (arrived_.empty()) return;
    Slot* const slot = arrived_.front();
    arrived_.pop_front();
    lock.unlock();
    check(*slot);
    lock.lock();
    free_.push_back(slot);
    freed_.notify_one();
  }
}

Result<VerifyReport> Verification::run() {
  if (auto made = make_ring(); !made) return std::unexpected(made.error());
  queues_.resize(manifest_.volumes.size());
  for (std::uint64_t i = 0; i < manifest_.shards.size(); ++i)
    queues_[manifest_.shards[i].volume].shards.push_back(i);
  auto threads = start_threads(std::clamp(std::thread::hardware_concurrency(), 1U, kThreads),
                               [this] { sum_until_stopped(); });
  if (threads.empty())
    return std::unexpected(system_error(EAGAIN, "start a thread that computes checksums", directory_));
  const Status fed = feed();
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
    arrival_.notify_all();
  }
  threads.clear();
  if (!fed) return std::unexpected(fed.error());
  if (options_.on_progress) options_.on_progress(done_bytes_);
  std::ranges::sort(report_.mismatches, {}, [](const Mismatch& each) {
    return std::tuple(each.shard, each.chunk.has_value(), each.offset);
  });
  return std::move(report_);
}

}  // namespace

std::string_view to_string(Mismatch::Kind kind) {
  constexpr std::array<std::string_view, 4> kNames{"missing", "size", "unread", "checksum"};
  return kNames.at(static_cast<std::size_t>(kind));
}

std::uint64_t bytes_to_verify(const Manifest& manifest) {
  std::uint64_t total = 0;
  for (const Shard& shard : manifest.shards) total += shard.bytes;
  return total;
}

Result<VerifyReport> verify(const Engine& engine, const std::string& directory, const Manifest& manifest,
                            const VerifyOptions& options) {
  return Verification(engine, directory, manifest, options).run();
}

}  // namespace trunkline::checkpoint
