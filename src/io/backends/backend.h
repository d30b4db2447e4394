// The interface that a lane drives: a queue of commands to the kernel.
//
// A lane calls push() and reap() from its own thread only; wake() may be called from any. A backend holds at
// most the depth that it was created with. The lane respects that limit, so push() cannot fail: if a command
// fails, its completion's result says so.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "trunkline/engine.h"
#include "trunkline/error.h"

namespace trunkline::io {

struct Command {
  Op op = Op::read;
  int fd = -1;
  bool direct = false;      // fd was opened with O_DIRECT
  bool registered = false;  // data lies in memory that register_memory() accepted
  std::byte* data = nullptr;
  std::uint64_t length = 0;  // bytes
  std::uint64_t offset = 0;  // bytes from the file's start
  std::uint32_t tag = 0;     // below the depth; free again once its completion is reaped
};

struct Completion {
  std::uint32_t tag = 0;
  std::int64_t result = 0;  // bytes moved, or a negative errno value
};

// How long a lane may delay a completion to wait for others. Bounded, since those may be on a device that
// hangs.
constexpr std::chrono::milliseconds kMaxWait{5};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::vector<std::string> features() const { return {}; }

  // Queues a command; it is sent at the next reap() at the latest.
  virtual void push(const Command& command) = 0;

  // Sends what was pushed, then waits until a command completes or wake() is called, and appends all
  // available completions. With `wanted` above 1 it may wait for that many, up to kMaxWait, to save a busy
  // lane a trip through the scheduler for each; a backend may also return promptly.
  virtual void reap(std::vector<Completion>& completions, unsigned wanted) = 0;

  // Ends the current reap(), or the next one if none is running; immediately, unless that waits for several
  // completions.
  virtual void wake() = 0;

  // Registers memory with the kernel that many commands will use. A failure only costs speed.
  virtual Status register_memory(std::span<std::byte> memory) {
    (void)memory;
    return std::unexpected(make_error(ErrorKind::unsupported, "this backend has no registered buffers"));
  }
};

// Creates a backend and proves that it works by running one operation. Must be called on the lane's thread: a
// ring may belong to the thread that created it. `kind` is not automatic.
Result<std::unique_ptr<Backend>> make_backend(BackendKind kind, unsigned depth);

Result<std::unique_ptr<Backend>> make_io_uring_backend(unsigned depth);
Result<std::unique_ptr<Backend>> make_libaio_backend(unsigned depth);
Result<std::unique_ptr<Backend>> make_threads_backend(unsigned depth);
Result<std::unique_ptr<Backend>> make_memory_backend(unsigned depth);

}  // namespace trunkline::io
