// What a lane drives: a queue of commands to the kernel.
//
// A lane calls push() and reap() from its one thread; wake() may come from any. A backend holds at most the
// depth it was made for, which the lane keeps to, so push() cannot fail: what goes wrong with a command is
// its completion's result.
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
  bool registered = false;  // data lies in the memory that register_memory() took
  std::byte* data = nullptr;
  std::uint64_t length = 0;  // bytes
  std::uint64_t offset = 0;  // bytes from the file's start
  std::uint32_t tag = 0;     // below the depth; free again once its completion was reaped
};

struct Completion {
  std::uint32_t tag = 0;
  std::int64_t result = 0;  // bytes moved, or a negative errno value
};

// How long a lane may keep a completion waiting for others. Bounded, for those may be on a device that hangs.
constexpr std::chrono::milliseconds kPatience{5};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::vector<std::string> features() const { return {}; }

  // Takes a command; it is sent at the next reap() at the latest.
  virtual void push(const Command& command) = 0;

  // Sends what was pushed, then waits until a command is complete or wake() was called, and appends all
  // completions there are. With `wanted` above 1 it may wait for so many, up to kPatience, to save a busy
  // lane a trip through the scheduler for each; a backend is free to be prompt instead.
  virtual void reap(std::vector<Completion>& completions, unsigned wanted) = 0;

  // Ends the current reap(), or the next one if none is under way; at once, unless it waits for several.
  virtual void wake() = 0;

  // Tells the kernel once about memory that many commands will use. Refusal costs speed alone.
  virtual Status register_memory(std::span<std::byte> memory) {
    (void)memory;
    return std::unexpected(make_error(ErrorKind::unsupported, "this backend has no registered buffers"));
  }
};

// Set up and proven by running one operation. Must be called on the lane's thread: a ring may belong to the
// thread that made it. `kind` is not automatic.
Result<std::unique_ptr<Backend>> make_backend(BackendKind kind, unsigned depth);

Result<std::unique_ptr<Backend>> make_io_uring_backend(unsigned depth);
Result<std::unique_ptr<Backend>> make_libaio_backend(unsigned depth);
Result<std::unique_ptr<Backend>> make_threads_backend(unsigned depth);
Result<std::unique_ptr<Backend>> make_memory_backend(unsigned depth);

}  // namespace trunkline::io
