// Writes layouts through a bounded ring of staging blocks, with their checksums computed as the bytes pass.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tensor_file/block_plan.h"
#include "tensor_file/block_queue.h"
#include "tensor_file/checksum_combiner.h"
#include "tensor_file/device_copies.h"
#include "tensor_file/staging_ring.h"
#include "trunkline/engine.h"
#include "trunkline/file.h"

namespace trunkline::tensor_file {

struct WriteOptions {
  // All bytes pass through staging blocks, so that the tensors may change once everything is staged. Else
  // what is aligned is written from where it lies.
  bool stage_all = false;
  std::uint64_t staging_bytes = 64ULL << 20;  // at most, rounded to blocks; at least three blocks
  unsigned copiers = 1;                       // threads that copy and checksum
};

// The path of one block: a copier claims it -> what it has in the memory of devices is fetched into a staging
// block, while the copier goes on -> a copier copies the rest, summing all -> when all blocks before it are
// summed whose checksums stand in it, it is filled -> it is written -> its staging block is free again.
// Blocks are claimed in order and only by a copier that has a staging block, so the first one that others
// wait for is always under way.
//
// stage(), then finish(), from one thread; the rest from any.
class FileWriter {
 public:
  struct Target {
    File file;  // open for writing, empty
    FileLayout layout;
  };

  FileWriter(const Engine& engine, std::vector<Target> targets, const WriteOptions& options);
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;
  ~FileWriter();  // cancels, and waits for what is under way

  // Returns when no more bytes are read from the layouts' memory but by direct writes (none with stage_all).
  Status stage();

  // Waits for the writes. After that the bytes are in the files, not yet durable.
  Status finish();

  void cancel();

  // Gives up what was not written, waits for what is under way, closes the files and gives the staging memory
  // back. From the thread of stage() and finish(), instead of what comes next.
  void stop();

  std::uint64_t bytes_total() const { return bytes_total_; }
  std::uint64_t bytes_done() const { return bytes_done_.load(std::memory_order_relaxed); }

  // Of the layout's checksums, once stage() has succeeded.
  const std::vector<std::uint32_t>& checksums(std::size_t layout) const {
    return progress_[layout].checksums.values();
  }
  const File& file(std::size_t layout) const { return targets_[layout].file; }

 private:
  struct Held {  // staged, and waiting for checksums that stand in it
    std::size_t block;
    StagingRing::Index slot;
    std::size_t after;  // until so many blocks are folded
  };
  struct Progress {
    ChecksumCombiner checksums;
    std::vector<Held> held;
  };
  struct Ready {
    BlockPlace place;
    std::optional<StagingRing::Index> slot;  // none: direct
  };

  struct Claimed {
    Ready ready;
    bool fetched = false;  // nothing of it is in the memory of devices any more
  };

  void copy_blocks();
  void write_deferred(std::unique_lock<std::mutex>& lock);
  bool claim(std::unique_lock<std::mutex>& lock, Claimed& claimed);
  void grow_ring(std::unique_lock<std::mutex>& lock);
  bool fetch(const Ready& claimed);
  void fetched(const Ready& claimed, const Status& status);
  std::vector<PartialChecksum> fill(const FileLayout& layout, const Block& block, std::byte* slot) const;
  std::vector<Ready> staged(const Ready& filled, std::vector<PartialChecksum> checksums);
  std::size_t release_point(std::size_t layout, const Block& block) const;
  void fill_checksum_fields(std::size_t layout, const Block& block, std::byte* slot) const;
  void write(const Ready& ready);
  void written(const Ready& ready, const Result<std::uint64_t>& result);
  void fail(Error error);
  Status outcome() const;

  const Engine engine_;
  const WriteOptions options_;
  std::vector<Target> targets_;
  std::vector<std::vector<Block>> blocks_;  // of each target
  std::vector<BlockPlace> order_;
  std::uint64_t bytes_total_ = 0;
  std::atomic<std::uint64_t> bytes_done_{0};

  std::mutex mutex_;
  std::condition_variable changed_;
  std::unique_ptr<StagingRing> ring_;  // as large as the blocks ask for
  std::size_t least_slots_ = 0;        // fewer would wait for each other
  std::vector<Progress> progress_;
  std::size_t fetching_ = 0;     // claimed, and to be claimed again
  std::deque<Ready> fetched_;    // of these
  std::vector<Ready> deferred_;  // staged, to be written
  bool defer_ = false;           // until all is staged: there is room, and who waits for that comes first
  std::size_t next_ = 0;         // in order_
  std::size_t filling_ = 0;      // claimed, and not handed over to be written
  std::size_t writing_ = 0;
  std::size_t direct_writing_ = 0;
  std::optional<Error> error_;
  std::unique_ptr<DeviceCopies> devices_ = std::make_unique<DeviceCopies>();
};

}  // namespace trunkline::tensor_file
