// Linux native asynchronous I/O (io_submit(2)): truly asynchronous only for direct I/O. The fallback where
// io_uring is not available. Called libaio after the library through which it is best known, but needs none.
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>
#include <utility>

#include "io/backends/backend.h"
#include "io/backends/linux_aio.h"
#include "io/backends/wake_event.h"
#include "os/async_queues.h"

namespace trunkline::io {
namespace {

class LibaioBackend final : public Backend {
 public:
  LibaioBackend(WakeEvent wake, unsigned depth) : wake_(std::move(wake)), blocks_(depth), events_(depth + 1) {
    pending_.reserve(depth + 1);
  }
  LibaioBackend(const LibaioBackend&) = delete;
  LibaioBackend& operator=(const LibaioBackend&) = delete;
  ~LibaioBackend() override {
    own_ = {};
    if (context_ != 0) aio::destroy(context_);
  }

  Status set_up() {
    const int code = -static_cast<int>(aio::setup(static_cast<unsigned>(events_.size()), &context_));
    if (code != 0) return std::unexpected(system_error(code, "set up libaio (io_setup)"));
    own_ = os::OwnQueue::context(context_);
    // The probe: a real poll through the context, on the wake-up event.
    wake_.signal();
    std::vector<Completion> completions;
    reap(completions, 1);
    if (wake_result_ <= 0 || (wake_result_ & POLLIN) == 0)
      return std::unexpected(
          system_error(wake_result_ < 0 ? -wake_result_ : EIO, "make a test poll through libaio"));
    return {};
  }

  void push(const Command& command) override {
    iocb& block = blocks_[command.tag];
    switch (command.op) {
      case Op::read:
        block = aio::transfer(IOCB_CMD_PREAD, command.fd, command.data, command.length, command.offset);
        break;
      case Op::write:
        block = aio::transfer(IOCB_CMD_PWRITE, command.fd, command.data, command.length, command.offset);
        break;
      case Op::sync:
        block = aio::fsync(command.fd);
        break;
    }
    block.aio_data = command.tag;
    pending_.push_back(&block);
  }

  void reap(std::vector<Completion>& completions, unsigned wanted) override {
    bool woken = false;
    const std::size_t before = completions.size();
    while (!woken && completions.size() == before) {
      if (!wake_armed_) arm_wake();
      send(completions);
      if (completions.size() != before) break;
      woken = collect(completions, std::exchange(wanted, 1));
    }
  }

  void wake() override { wake_.signal(); }

 private:
  void arm_wake() {
    wake_block_ = aio::poll(wake_.fd(), POLLIN);
    wake_block_.aio_data = kWakeTag;
    pending_.push_back(&wake_block_);
    wake_armed_ = true;
  }

  // Sends from the front; a command that the kernel rejects outright completes with that error.
  void send(std::vector<Completion>& completions) {
    std::size_t sent = 0;
    while (sent < pending_.size()) {
      const long result =
          aio::submit(context_, static_cast<long>(pending_.size() - sent), pending_.data() + sent);
      if (result > 0) {
        sent += static_cast<std::size_t>(result);
        in_flight_ += static_cast<unsigned>(result);
      } else if (result == -EAGAIN || result == 0) {
        if (in_flight_ > 0) break;  // the next completion makes room
        std::this_thread::yield();
      } else if (result != -EINTR) {
        refuse(pending_[sent++], static_cast<int>(result), completions);
      }
    }
    pending_.erase(pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(sent));
  }

  void refuse(const iocb* block, int result, std::vector<Completion>& completions) {
    if (block == &wake_block_) {
      wake_armed_ = false;
      wake_result_ = result;
      probe_failed_ = true;
    } else {
      completions.push_back({static_cast<std::uint32_t>(block->aio_data), result});
    }
  }

  bool collect(std::vector<Completion>& completions, unsigned wanted) {
    if (probe_failed_) return true;
    timespec timeout{.tv_sec = 0, .tv_nsec = std::chrono::nanoseconds(kMaxWait).count()};
    const long count = aio::get_events(context_, static_cast<long>(wanted), static_cast<long>(events_.size()),
                                       events_.data(), wanted == 1 ? nullptr : &timeout);
    bool woken = false;
    for (long index = 0; index < count; ++index) {
      const io_event& event = events_[static_cast<std::size_t>(index)];
      --in_flight_;
      const std::int64_t result = event.res;
      if (event.data == kWakeTag) {
        woken = true;
        wake_armed_ = false;
        wake_result_ = static_cast<int>(result);
        drain_wake();
      } else {
        completions.push_back({static_cast<std::uint32_t>(event.data), result});
      }
    }
    return woken;
  }

  void drain_wake() const {
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = ::read(wake_.fd(), &count, sizeof count);
  }

  static constexpr std::uint64_t kWakeTag = ~0ULL;  // tags of commands have 32 bits

  aio_context_t context_ = 0;
  os::OwnQueue own_;
  WakeEvent wake_;
  iocb wake_block_{};
  bool wake_armed_ = false;
  bool probe_failed_ = false;
  int wake_result_ = 0;
  unsigned in_flight_ = 0;
  std::vector<iocb> blocks_;    // by tag
  std::vector<iocb*> pending_;  // pushed, not sent
  std::vector<io_event> events_;
};

}  // namespace

Result<std::unique_ptr<Backend>> make_libaio_backend(unsigned depth) {
  auto wake = WakeEvent::create(EFD_NONBLOCK);
  if (!wake) return std::unexpected(wake.error());
  auto backend = std::make_unique<LibaioBackend>(std::move(*wake), depth);
  if (auto status = backend->set_up(); !status) return std::unexpected(status.error());
  return backend;
}

}  // namespace trunkline::io
