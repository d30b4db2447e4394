// Writes layouts through a bounded ring of staging blocks, with their checksums computed as the bytes pass.
#pragma once

#include <array>
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
  std::uint64_t staging_bytes = 64ULL << 20;  // at most, rounded to blocks; but at least two
  unsigned copiers = 1;                       // threads that copy and checksum
};

// The path of one block, through its BlockStates:
// 1. waiting: blocks are claimed in order, and only by a copier that has a staging block for it, so the first
//    one that others wait for is always under way. A direct block needs none, but few are under way at once.
// 2. filling: a copier has it. What it has in the memory of devices is fetched first, if there is any:
//    2a. fetching: into its staging block, by the device, while the copier goes on with other blocks;
//    2b. fetched: any copier claims it again, before it claims one that is waiting; then it is filling.
//    Then the copier copies the rest, and computes the checksums of all.
// 3. held: until all blocks are folded whose checksums stand in it, which are then filled in. Most blocks
//    have none to wait for.
// 4. staged: complete. It is written at once; or once all are staged, where there is room for that, since who
//    waits for the staging comes first (WriteWhen).
// 5. writing: the engine has it.
// 6. done: its staging block is free again. After an error blocks end in the state they are in, except that
//    one which the device was fetching is done.
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
  struct Held {  // filled, but some checksums have yet to be written into it
    std::size_t block;
    StagingRing::Index slot;
    std::size_t after;  // until so many blocks are folded
  };
  enum class BlockState { waiting, filling, fetching, fetched, held, staged, writing, done };
  static constexpr std::size_t kBlockStates = static_cast<std::size_t>(BlockState::done) + 1;
  struct Progress {
    ChecksumCombiner checksums;
    std::vector<BlockState> states;  // of each block; changed by move_to() alone
    std::vector<Held> held;
  };
  enum class WriteWhen { staged, all_staged };
  // A block that a copier has claimed, until it is done.
  struct ClaimedBlock {
    BlockPlace place;
    std::optional<StagingRing::Index> slot;  // none: direct
  };
  struct Claim {
    ClaimedBlock block;
    bool is_fetched = false;  // nothing of it is in the memory of devices any more
  };

  static bool may_follow(BlockState from, BlockState to);
  void move_to(BlockState to, const BlockPlace& place);
  std::size_t count(BlockState state) const { return counts_[static_cast<std::size_t>(state)]; }
  bool is_direct(const BlockPlace& place) const {
    return blocks_[place.layout][place.block].direct != nullptr;
  }
  // Whether blocks that were claimed are to be claimed again.
  bool is_fetching() const { return count(BlockState::fetching) + count(BlockState::fetched) > 0; }
  void copy_blocks();
  void write_staged(std::unique_lock<std::mutex>& lock);
  bool claim(std::unique_lock<std::mutex>& lock, Claim& claimed);
  std::optional<Claim> try_claim_next();
  void grow_ring(std::unique_lock<std::mutex>& lock);
  bool start_fetch(const ClaimedBlock& claimed);
  void finish_fetch(const ClaimedBlock& claimed, const Status& status);
  std::vector<PartialChecksum> fill(const FileLayout& layout, const Block& block, std::byte* slot) const;
  void finish_fill(const ClaimedBlock& filled, std::vector<PartialChecksum> checksums);
  std::size_t release_point(std::size_t layout, const Block& block) const;
  void fill_checksum_fields(std::size_t layout, const Block& block, std::byte* slot) const;
  void start_write(const ClaimedBlock& claimed);
  void finish_write(const ClaimedBlock& claimed, const Result<std::uint64_t>& result);
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
  std::array<std::size_t, kBlockStates> counts_{};  // of blocks, by their states
  std::deque<ClaimedBlock> fetched_blocks_;         // in the state fetched
  std::vector<ClaimedBlock> staged_blocks_;         // in the state staged
  std::size_t direct_ = 0;                          // direct blocks that are filling to writing
  std::size_t growing_ = 0;                         // copiers that make ring_ larger
  WriteWhen write_when_ = WriteWhen::staged;
  std::size_t next_ = 0;  // in order_: the first that is waiting
  std::optional<Error> error_;
  std::unique_ptr<DeviceCopies> devices_ = std::make_unique<DeviceCopies>();
};

}  // namespace trunkline::tensor_file
