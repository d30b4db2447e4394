// The queues of asynchronous I/O in this process: io_uring rings and Linux AIO contexts.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

namespace trunkline::os {

// Marks a queue as one of this library's for its lifetime.
class OwnQueue {
 public:
  OwnQueue() = default;
  static OwnQueue ring(int fd);                     // of io_uring
  static OwnQueue context(std::uintptr_t address);  // io_context_t of Linux AIO
  OwnQueue(OwnQueue&& other) noexcept;
  OwnQueue& operator=(OwnQueue&& other) noexcept;
  OwnQueue(const OwnQueue&) = delete;
  OwnQueue& operator=(const OwnQueue&) = delete;
  ~OwnQueue();

 private:
  explicit OwnQueue(std::uint64_t key);
  std::atomic<std::uint64_t>* slot_ = nullptr;
};

// A value that changes when a queue that is not this library's accepts or completes something, and when one
// appears or disappears. bytes_read_by_calls() does not include what such a queue reads. nullopt where /proc
// does not report it. A ring without a descriptor (IORING_SETUP_REGISTERED_FD_ONLY) is not seen, nor is one
// that appears and disappears between two calls.
std::optional<std::uint64_t> progress_of_other_queues();

}  // namespace trunkline::os
