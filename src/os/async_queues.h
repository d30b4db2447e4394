// The queues of asynchronous I/O in this process: rings of io_uring, and contexts of Linux AIO.
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

// Changes when a queue that is not this library's takes or completes something, and when one comes or goes.
// What such a queue reads is not in bytes_read_by_calls(). nullopt where /proc does not tell. A ring without
// a descriptor (IORING_SETUP_REGISTERED_FD_ONLY), and one that comes and goes between two calls, is not seen.
std::optional<std::uint64_t> progress_of_other_queues();

}  // namespace trunkline::os
