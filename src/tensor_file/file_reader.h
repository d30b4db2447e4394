// Reads layouts into the memory of their extents, and verifies their checksums along the way.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "tensor_file/block_plan.h"
#include "tensor_file/block_queue.h"
#include "tensor_file/checksum_combiner.h"
#include "tensor_file/device_copies.h"
#include "tensor_file/fresh_targets.h"
#include "tensor_file/staging_ring.h"
#include "trunkline/engine.h"
#include "trunkline/file.h"

namespace trunkline::tensor_file {

struct ReadOptions {
  bool verify = true;    // compute the checksums, and compare those with an expected value
  unsigned workers = 1;  // threads that checksum and copy
  std::uint64_t staging_bytes = 64ULL << 20;
};

// A checksum that does not match the file.
struct ChecksumMismatch {
  std::size_t layout = 0;
  std::uint32_t checksum = 0;
  std::uint32_t expected = 0;
  std::uint32_t found = 0;
};

// The path of one block: sent to be read, into its extent's memory where that is aligned, else into a staging
// block -> arrived -> a worker checksums it and copies it to its destination; copies to device memory run
// while the worker continues. Workers that have nothing else to do make the memory of later blocks resident.
//
// read() once, from any thread; cancel() and bytes_done() from any thread as well.
class FileReader {
 public:
  struct Target {
    File file;  // open for reading
    FileLayout layout;
    bool keep_open = false;  // otherwise the file is closed once it is read
  };

  FileReader(const Engine& engine, std::vector<Target> targets, const ReadOptions& options);
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;
  ~FileReader();

  // Returns when all memory of all extents is filled, or the first error: `corrupt` for a checksum mismatch
  // (see mismatch()) and for a file whose length differs from its layout.
  Status read();

  void cancel();

  std::uint64_t bytes_total() const { return bytes_total_; }
  std::uint64_t bytes_done() const { return bytes_done_.load(std::memory_order_relaxed); }
  const std::optional<ChecksumMismatch>& mismatch() const { return mismatch_; }
  const std::vector<std::uint32_t>& checksums(std::size_t layout) const {
    return checksums_[layout].values();
  }

 private:
  struct Arrived {
    BlockPlace place;
    std::size_t number = 0;                  // in order_
    std::optional<StagingRing::Index> slot;  // nullopt: direct
  };

  Status check_sizes() const;
  Status read_all();
  void work();
  bool has_room() const;
  bool may_send() const;
  bool waits_for_memory() const;
  void populate(std::unique_lock<std::mutex>& lock);
  void finish(std::unique_lock<std::mutex>& lock);
  void send(std::unique_lock<std::mutex>& lock);
  void grow_ring(std::unique_lock<std::mutex>& lock);
  void arrived(const Arrived& block, const Result<std::uint64_t>& result);
  std::vector<PartialChecksum> unpack(const Arrived& arrived) const;
  void check(const Arrived& arrived, std::vector<PartialChecksum> checksums);
  void land(std::unique_lock<std::mutex>& lock, const Arrived& arrived, StagingRing::Index slot,
            Device& device);
  void release(const Arrived& arrived);
  void fail(Error error);

  const Engine engine_;
  const ReadOptions options_;
  std::vector<Target> targets_;
  std::vector<std::vector<Block>> blocks_;
  std::vector<BlockPlace> order_;
  std::uint64_t bytes_total_ = 0;
  std::atomic<std::uint64_t> bytes_done_{0};

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::unique_ptr<StagingRing> ring_;
  std::vector<ChecksumCombiner> checksums_;
  FreshTargets fresh_;
  std::size_t next_ = 0;  // in order_
  std::size_t reading_ = 0;
  std::size_t direct_pending_ = 0;  // sent, and not checksummed yet
  std::size_t working_ = 0;
  std::size_t landing_ = 0;       // being copied to devices
  std::vector<Arrived> arrived_;  // in order of arrival; consumed from the front
  std::size_t taken_ = 0;
  std::optional<Error> error_;
  std::optional<ChecksumMismatch> mismatch_;
  std::unique_ptr<DeviceCopies> devices_ = std::make_unique<DeviceCopies>();
};

}  // namespace trunkline::tensor_file
