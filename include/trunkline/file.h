// Files: any size, offset and pointer; blocking and non-blocking.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "trunkline/engine.h"

namespace trunkline {

enum class Mode {
  read,        // "r": must exist
  read_write,  // "r+": must exist
  write,       // "w": created, or emptied when it exists; may be read too
  create,      // "x": must not exist; may be read too
};
Result<Mode> parse_mode(std::string_view text);  // also with a "b", as in "rb"

enum class Direct {
  automatic,  // direct where the filesystem supports it and it is faster
  always,     // opening fails with unsupported where direct I/O is not possible
  never,      // through the page cache
  // Like automatic, but through the page cache if it holds nearly all of the file when the file is opened:
  // for reading a whole file once. Requires Linux 6.5 (cachestat), and a file that the process may write; not
  // supported on overlayfs.
  unless_cached,
};

struct OpenOptions {
  Mode mode = Mode::read;
  Direct direct = Direct::automatic;
  // Allocate the blocks of a long write that extends the file before the write is sent, where the filesystem
  // supports it.
  bool preallocate = true;
};

class FileCore;  // src/io/file/file_core.h

// A shared handle to an open file; copies refer to the same file. Every member function is thread-safe.
// Operations on overlapping ranges run in no particular order unless one is awaited before the next is
// submitted. Concurrent overlapping writes leave the bytes of either, and may make every later sync() fail:
// the kernel gives up on a page that is written both through the page cache and past it.
//
// Reads fill all of the memory or fail: reading past the end is end_of_file. Writes write everything or
// fail; after a failed or cancelled write the bytes of its range are unspecified and all others are
// untouched.
class File {
 public:
  File() = default;  // no file; only valid() may be called
  explicit File(std::shared_ptr<FileCore> core) : core_(std::move(core)) {}

  static Result<File> open(const Engine& engine, const std::string& path, const OpenOptions& options = {});

  // A file of the process's default engine, looked up at each call (so the file works after a fork).
  static Result<File> open(const std::string& path, const OpenOptions& options = {});

  bool valid() const { return core_ != nullptr; }
  const std::string& path() const;
  Mode mode() const;

  // Bytes moved, always all of `memory`.
  Result<std::uint64_t> pread(MemoryView memory, std::uint64_t offset) const;
  Result<std::uint64_t> pwrite(MemoryView memory, std::uint64_t offset) const;

  // Memory must stay valid until the Future is done; a Keepalive, if given, is held until then. Blocks only
  // while the engine's queue is full. An invalid request fails only its Future.
  Future async_pread(MemoryView memory, std::uint64_t offset, Keepalive keepalive = {}) const;
  Future async_pwrite(MemoryView memory, std::uint64_t offset, Keepalive keepalive = {}) const;

  // Reads many ranges into `memory` as one operation, which costs much less than one for each: see
  // FileRanges. The Future reports the sum of the lengths. Engine::submit does the same for the ranges of
  // many files.
  Future async_read_ranges(MemoryView memory, std::vector<FileRange> ranges, Keepalive keepalive = {}) const;
  Result<std::uint64_t> read_ranges(MemoryView memory, std::vector<FileRange> ranges) const;

  Result<std::uint64_t> size() const;          // bytes
  Status truncate(std::uint64_t bytes) const;  // waits for the writes submitted before

  // Waits for the writes submitted before, then makes data and size durable (fsync). A failure is final for
  // this file: every later sync and write returns it again, since the kernel may have dropped the dirty pages
  // (Rebello et al., "Can Applications Recover from fsync Failures?", USENIX ATC 2020).
  Status sync() const;

  // Operations that were submitted and are not done yet.
  std::uint64_t pending() const;

  // Waits for all pending operations on the file, then closes it. Idempotent. Later operations fail with
  // `closed`.
  Status close() const;

  const std::shared_ptr<FileCore>& core() const { return core_; }

 private:
  std::shared_ptr<FileCore> core_;
};

}  // namespace trunkline
