// The engine: the I/O lanes that all its files share.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "trunkline/buffer.h"
#include "trunkline/error.h"
#include "trunkline/fault.h"
#include "trunkline/future.h"
#include "trunkline/memory.h"
#include "trunkline/stats.h"

namespace trunkline {

class EngineCore;  // src/io/engine_core.h
class File;

enum class BackendKind { automatic, io_uring, libaio, threads, memory };
// Those that hand commands to the kernel, best first: where none is named, the first that works is used.
inline constexpr std::array kKernelBackends = {BackendKind::io_uring, BackendKind::libaio,
                                               BackendKind::threads};
std::string_view to_string(BackendKind kind);
Result<BackendKind> parse_backend(std::string_view name);  // "auto" "io_uring" "libaio" "threads" "memory"

// The I/O path for GPU memory. automatic: GPUDirect Storage (gds) where a probe shows that it really is
// direct, else copies through pinned buffers (bounce). gds: also used where only cuFile claims that it works;
// operations fail where it does not.
enum class GpuPath { automatic, gds, bounce };
std::string_view to_string(GpuPath path);
Result<GpuPath> parse_gpu_path(std::string_view name);  // "auto" "gds" "bounce"

// An option that is not given follows what `trunkline tune` measured, if anything, else a default. Of a
// tuning, block size and direct I/O follow each file's filesystem and device. Backend, lanes and queue depth
// are decided when an engine is created: by the tuning of `paths`; without `paths`, by what all of the user's
// tunings of this machine agree on.
struct EngineOptions {
  // automatic: the first of io_uring, libaio, threads whose probe passes. If a named backend is not
  // available, creation fails. memory: files live in this process (an anonymous file per path), for tests.
  BackendKind backend = BackendKind::automatic;
  std::optional<unsigned> lanes = {};        // I/O threads, 1 .. 64
  std::optional<unsigned> queue_depth = {};  // transfers in flight per lane, 1 .. 4096
  // Largest transfer; a multiple of 4096, 4 KiB .. 1 GiB; default 4 MiB. Transfers that are copied (through
  // the page cache or a bounce buffer) are at most 1 MiB.
  std::optional<std::uint64_t> block_bytes = {};
  std::optional<std::uint64_t> pinned_budget_bytes =
      {};  // hard bound on buffers of this engine; default 1/4 of memory
  GpuPath gpu = GpuPath::automatic;
  // What the engine will work on: files or directories, those of a volume together. Nothing is opened there.
  std::vector<std::string> paths = {};
  std::shared_ptr<Faults> faults = {};  // injected at completions when given
};

// The options as resolved on this machine.
struct EngineConfig {
  BackendKind backend;
  unsigned lanes;
  unsigned queue_depth;
  std::uint64_t block_bytes;
  std::uint64_t slot_bytes;  // largest transfer that is copied; a blocking operation of at most this size
                             // runs on the caller's thread when nothing is queued
  std::uint64_t pinned_budget_bytes;
  GpuPath gpu;
  std::vector<std::string> features;  // of the backend: "defer_taskrun", "registered_buffers", ...
};

struct Refusal {
  std::string what;  // "io_uring", "direct I/O", "registered buffers", "huge pages", "memory lock", ...
  std::string why;
};

// Which settings `trunkline tune` measured for a path, and whether an engine follows them there.
struct TuningExplanation {
  bool in_effect = false;     // all of them
  std::string time = {};      // when they were measured, "2026-01-31T23:59:59Z"; empty: the path is not tuned
  std::string settings = {};  // "libaio, 4 lanes, queue depth 32, blocks of 1 MiB", or "the defaults"
  std::string why = {};       // why they are in effect, or not
};

// Which I/O path an engine uses for a file, and why.
struct Explanation {
  std::string backend;
  bool direct = false;
  std::string why;                     // why direct, or why not
  std::uint64_t memory_alignment = 1;  // bytes; what a copy-free direct transfer requires of the address ...
  std::uint64_t offset_alignment = 1;  // ... and of offset and length
  std::string device;      // "/dev/nvme0n1p2", or the filesystem's source where it is not a block device
  std::string filesystem;  // "ext4", "tmpfs", ...
  std::string mount;       // mount point
  std::string gpu;         // I/O path of GPU memory: "gds", "bounce", or "unknown" while no GPU is in use
  std::string gpu_why;
  TuningExplanation tuning;
  std::vector<Refusal> refused;
};

// A range of a file, and where its bytes go.
struct FileRange {
  std::uint64_t offset = 0;    // bytes from the file's start
  std::uint64_t length = 0;    // bytes
  std::uint64_t position = 0;  // bytes from the start of the memory
  std::uint32_t file = 0;      // index into FileRanges::files
};

// Many ranges that are read as one operation. They are read in the order of their offsets, and neighbours
// together; ranges of a file may overlap. Where positions overlap, the memory holds the bytes of either
// range.
struct FileRanges {
  std::vector<File> files;
  std::vector<FileRange> ranges;
};

// One read or write of a batch, or one read of many ranges.
struct Request {
  Op op = Op::read;  // read or write
  const File* file = nullptr;
  MemoryView memory = {};
  std::uint64_t offset = 0;  // bytes from the file's start
  Keepalive keepalive = {};
  // If given, the ranges to read, in place of `file` and `offset`. Its Future reports the sum of their
  // lengths; an error names the range.
  std::shared_ptr<const FileRanges> ranges = {};
};

// A shared handle: copies refer to the same engine. Every member function is thread-safe. The last handle
// (files hold one too) finishes all pending operations and joins the lanes.
class Engine {
 public:
  Engine() = default;  // no engine; only valid() may be called
  explicit Engine(std::shared_ptr<EngineCore> core) : core_(std::move(core)) {}

  // Fails with invalid_argument, or with unsupported when a named backend is not available (the message says
  // why).
  static Result<Engine> create(const EngineOptions& options = {});

  // The process-wide engine, created with defaults at first use; the environment variable TRUNKLINE_BACKEND
  // selects its backend. A forked child gets a new one.
  static Result<Engine> default_engine();

  bool valid() const { return core_ != nullptr; }
  const EngineConfig& config() const;

  // Submits all of `requests` in order, with one wake-up of the lanes; blocks while the queue is full.
  // Returns one Future per request; an invalid request fails only its own Future.
  std::vector<Future> submit(std::span<const Request> requests) const;

  // `path` is a file, or a directory in which a probe file may be created and removed.
  Result<Explanation> explain(const std::string& path) const;

  EngineStats stats() const;

  // Page-aligned memory from this engine's budget; out_of_budget when it does not fit beside what is in use.
  Result<Buffer> allocate(std::uint64_t bytes) const;

  // Finishes what was submitted, then rejects further operations (`closed`). Idempotent.
  void close() const;

  const std::shared_ptr<EngineCore>& core() const { return core_; }

 private:
  std::shared_ptr<EngineCore> core_;
};

}  // namespace trunkline
