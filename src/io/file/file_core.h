// The open file behind File handles: its members, and the operations pending on it.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/trace.h"
#include "device/device.h"
#include "io/file/layout.h"
#include "os/file_pair.h"
#include "os/fork_takeover.h"
#include "trunkline/file.h"

namespace trunkline {
namespace io {

struct Member {
  std::string path;
  os::FilePair pair;
  // Set when the kernel rejects a direct transfer that it should have accepted: from then on the page cache
  // is used.
  std::atomic<bool> direct_refused{false};
  // The file as GPUs access it directly, once one does (FileCore::gpu_reaches).
  std::shared_ptr<const GdsFile> gds;
  // Set when a GPUDirect Storage transfer that should have worked fails: from then on bytes are copied.
  std::atomic<bool> gds_refused{false};
  trace::Text trace_text;  // the path
};

}  // namespace io

// Thread-safe except for the constructor. A forked child can go on using the file: its first call discards
// the parent's counts and locks, which describe what the parent's threads were doing at the fork.
class FileCore : public std::enable_shared_from_this<FileCore> {
 public:
  FileCore(std::optional<Engine> engine, std::string name, const OpenOptions& options, io::Layout layout_in);
  FileCore(const FileCore&) = delete;
  FileCore& operator=(const FileCore&) = delete;

  // Determines the size from the members; `corrupt` when their sizes do not fit each other.
  Status adopt_sizes();

  const std::string name;
  const OpenOptions options;
  const io::Layout layout;
  std::deque<io::Member> members;
  std::uint64_t tuned_block_bytes = 0;  // of operations that go through the lanes; 0: the engine's
  trace::Text trace_text;               // the name

  // The engine given at opening, else the process's default engine.
  Result<Engine> engine() const;

  // Whether `op` may run now on [offset, offset + bytes); counts it as pending if so. end() must follow, with
  // the epoch.
  Status begin(Op op, std::uint64_t offset, std::uint64_t bytes, unsigned& write_epoch);
  void end(Op op, unsigned write_epoch);

  // Makes room for a write up to offset + bytes: sizes of striped members, and blocks for a long write. If it
  // fails, it has not changed the length of the file.
  Status extend(std::uint64_t offset, std::uint64_t bytes, std::uint64_t block_bytes);
  // Whether extend() would make system calls, or wait for another thread that does.
  bool extends(std::uint64_t offset, std::uint64_t bytes, std::uint64_t block_bytes);

  Result<std::uint64_t> size();
  Status truncate(std::uint64_t bytes);
  Status sync();
  Status close();
  std::uint64_t pending() const { return pending_.load(); }

  // Whether transfers with the memory of `device` use GPUDirect Storage, or why not. Determined at the first
  // call. Call between begin() and end().
  Status gpu_reaches(Device& device, GpuPath path);

 private:
  Status check_open() const;
  void forget_parent_operations();
  void await_writes();
  Status grow_plain(std::uint64_t offset, std::uint64_t bytes);
  Status grow_members(std::uint64_t offset, std::uint64_t bytes, bool preallocates);
  void shrink_back(std::uint64_t bytes);
  Result<std::uint64_t> bytes_of_members() const;
  Status preallocate_members(std::uint64_t offset, std::uint64_t bytes);
  Status allocation_status(int code, const io::Member& member, std::uint64_t start, std::uint64_t length);
  Status resize_members(std::uint64_t bytes, bool shrink);

  const std::optional<Engine> engine_;
  std::atomic<bool> closed_{false};
  std::atomic<bool> can_preallocate_;
  std::atomic<std::uint64_t> known_bytes_{0};  // the file is at least this long, unless others shrink it
  std::mutex size_mutex_;

  std::atomic<std::uint64_t> pending_{0};
  // Pending writes, by the epoch in which they were submitted. A sync flips the epoch and waits for the old
  // one to empty, so that it waits for earlier writes and not for later ones.
  std::atomic<std::uint64_t> pending_writes_[2] = {0, 0};
  std::atomic<unsigned> epoch_{0};
  os::ForkTakeover ownership_;  // of the counts above and the locks
  std::mutex sync_mutex_;

  std::mutex gpu_mutex_;
  std::map<std::pair<Device*, GpuPath>, Status> gpu_reaches_;  // results of gpu_reaches()

  mutable std::mutex failure_mutex_;
  std::atomic<bool> sync_failed_{false};
  std::optional<Error> sync_error_;
};

}  // namespace trunkline
