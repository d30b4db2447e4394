// io_uring: one ring per lane, owned by the lane's thread (io_uring_setup(2): SINGLE_ISSUER, DEFER_TASKRUN).
#include <fmt/format.h>
#include <liburing.h>
#include <sys/uio.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

#include "io/backends/backend.h"
#include "io/backends/wake_event.h"
#include "os/async_queues.h"

namespace trunkline::io {
namespace {

constexpr std::uint64_t kWakeTag = ~std::uint64_t{0};
constexpr std::uint64_t kMaxRegisteredBytes = 1ULL << 30;  // a single buffer, io_uring_register(2)

struct SetupFlags {
  unsigned flags;
  const char* name;
};
// Best first; older kernels reject unknown flags with EINVAL.
constexpr std::array<SetupFlags, 3> kSetups = {{
    {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, "defer_taskrun"},
    {IORING_SETUP_COOP_TASKRUN, "coop_taskrun"},
    {0, "plain_ring"},
}};

class IoUringBackend final : public Backend {
 public:
  explicit IoUringBackend(WakeEvent wake) : wake_(std::move(wake)) {}
  IoUringBackend(const IoUringBackend&) = delete;
  IoUringBackend& operator=(const IoUringBackend&) = delete;
  ~IoUringBackend() override {
    own_ = {};
    if (ready_) io_uring_queue_exit(&ring_);
  }

  Status set_up(unsigned depth) {
    int code = EINVAL;
    for (const SetupFlags& setup : kSetups) {
      code = -io_uring_queue_init(depth + 1, &ring_, setup.flags);  // one more for the wake-up read
      if (code == 0) {
        setup_name_ = setup.name;
        break;
      }
      if (code != EINVAL) break;
    }
    if (code != 0) return std::unexpected(system_error(code, "set up io_uring"));
    ready_ = true;
    own_ = os::OwnQueue::ring(ring_.ring_fd);
    registered_ring_ = io_uring_register_ring_fd(&ring_) == 1;
    return prove();
  }

  std::vector<std::string> features() const override {
    std::vector<std::string> names{setup_name_};
    if (registered_ring_) names.emplace_back("registered_ring");
    return names;
  }

  void push(const Command& command) override {
    io_uring_sqe* sqe = next_sqe();
    switch (command.op) {
      case Op::read:
        if (command.registered)
          io_uring_prep_read_fixed(sqe, command.fd, command.data, length_of(command), command.offset,
                                   buffer_index(command));
        else
          io_uring_prep_read(sqe, command.fd, command.data, length_of(command), command.offset);
        break;
      case Op::write:
        if (command.registered)
          io_uring_prep_write_fixed(sqe, command.fd, command.data, length_of(command), command.offset,
                                    buffer_index(command));
        else
          io_uring_prep_write(sqe, command.fd, command.data, length_of(command), command.offset);
        break;
      case Op::sync:
        io_uring_prep_fsync(sqe, command.fd, 0);
        break;
    }
    io_uring_sqe_set_data64(sqe, command.tag);
  }

  void reap(std::vector<Completion>& completions, unsigned wanted) override {
    bool woken = false;
    const std::size_t before = completions.size();
    while (!woken && completions.size() == before) {
      arm_wake();
      const int result = submit_and_wait(std::exchange(wanted, 1));
      woken = collect(completions);
      if (result >= 0 || result == -EINTR || result == -ETIME) continue;
      if (!proven_) {  // a seccomp filter may allow setting up a ring but not entering it
        wake_result_ = result;
        return;
      }
      // EBUSY and EAGAIN: the kernel is short of memory for requests; reaping completions has freed some.
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  void wake() override { wake_.signal(); }

  Status register_memory(std::span<std::byte> memory) override {
    std::vector<iovec> pieces;
    for (std::uint64_t start = 0; start < memory.size(); start += kMaxRegisteredBytes)
      pieces.push_back(
          {memory.data() + start, std::min<std::uint64_t>(kMaxRegisteredBytes, memory.size() - start)});
    const int code = -io_uring_register_buffers(&ring_, pieces.data(), static_cast<unsigned>(pieces.size()));
    if (code != 0)
      return std::unexpected(system_error(code, fmt::format("register {} bytes of buffers", memory.size())));
    registered_start_ = memory.data();
    return {};
  }

 private:
  static unsigned length_of(const Command& command) {
    // A block is at most 1 GiB (EngineOptions), and the kernel moves at most 2 GiB - 4 KiB at once.
    return static_cast<unsigned>(command.length);
  }
  int buffer_index(const Command& command) const {
    return static_cast<int>(static_cast<std::uint64_t>(command.data - registered_start_) /
                            kMaxRegisteredBytes);
  }

  // The ring has an entry for each command in flight and one for the wake-up, so there is always room after
  // sending.
  io_uring_sqe* next_sqe() {
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    while (sqe == nullptr) {
      io_uring_submit(&ring_);
      sqe = io_uring_get_sqe(&ring_);
    }
    return sqe;
  }

  int submit_and_wait(unsigned wanted) {
    // Without EXT_ARG (Linux before 5.11) a timeout would take up an entry.
    if (wanted == 1 || (ring_.features & IORING_FEAT_EXT_ARG) == 0) {
      return io_uring_submit_and_wait(&ring_, 1);
    }
    __kernel_timespec timeout{.tv_sec = 0, .tv_nsec = std::chrono::nanoseconds(kMaxWait).count()};
    io_uring_cqe* first = nullptr;
    return io_uring_submit_and_wait_timeout(&ring_, &first, wanted, &timeout, nullptr);
  }

  void arm_wake() {
    if (wake_armed_) return;
    io_uring_sqe* sqe = next_sqe();
    io_uring_prep_read(sqe, wake_.fd(), &wake_count_, sizeof wake_count_, 0);
    io_uring_sqe_set_data64(sqe, kWakeTag);
    wake_armed_ = true;
  }

  // Returns whether a wake-up was among the completions.
  bool collect(std::vector<Completion>& completions) {
    bool woken = false;
    unsigned head = 0;
    unsigned seen = 0;
    io_uring_cqe* cqe = nullptr;
    io_uring_for_each_cqe(&ring_, head, cqe) {
      ++seen;
      if (cqe->user_data == kWakeTag) {
        woken = true;
        wake_armed_ = false;
        wake_result_ = cqe->res;
      } else {
        completions.push_back({static_cast<std::uint32_t>(cqe->user_data), cqe->res});
      }
    }
    io_uring_cq_advance(&ring_, seen);
    return woken;
  }

  // The probe: a real read through the ring, on the wake-up event.
  Status prove() {
    wake_.signal();
    std::vector<Completion> none;
    reap(none, 1);
    if (wake_result_ != static_cast<int>(sizeof wake_count_))
      return std::unexpected(
          system_error(wake_result_ < 0 ? -wake_result_ : EIO, "make a test read through io_uring"));
    proven_ = true;
    return {};
  }

  io_uring ring_{};
  os::OwnQueue own_;
  bool ready_ = false;
  bool registered_ring_ = false;
  const char* setup_name_ = "";
  WakeEvent wake_;
  bool wake_armed_ = false;
  bool proven_ = false;
  int wake_result_ = 0;
  std::uint64_t wake_count_ = 0;
  std::byte* registered_start_ = nullptr;
};

}  // namespace

Result<std::unique_ptr<Backend>> make_io_uring_backend(unsigned depth) {
  auto wake = WakeEvent::create(0);
  if (!wake) return std::unexpected(wake.error());
  auto backend = std::make_unique<IoUringBackend>(std::move(*wake));
  if (auto status = backend->set_up(depth); !status) return std::unexpected(status.error());
  return backend;
}

}  // namespace trunkline::io
