#include "io/file_core.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <limits>
#include <utility>

#include "io/engine_core.h"
#include "io/operation.h"
#include "os/fork_generation.h"

namespace trunkline {
namespace {

void wait_for_zero(const std::atomic<std::uint64_t>& count) {
  for (std::uint64_t left = count.load(); left != 0; left = count.load()) count.wait(left);
}

void count_down(std::atomic<std::uint64_t>& count) {
  count.fetch_sub(1);
  count.notify_all();
}

}  // namespace

FileCore::FileCore(std::optional<Engine> engine, std::string name_in, const OpenOptions& options_in,
                   io::Layout layout_in)
    : name(std::move(name_in)),
      options(options_in),
      layout(layout_in),
      engine_(std::move(engine)),
      can_preallocate_(options_in.preallocate),
      generation_(os::fork_generation()) {}

Status FileCore::adopt_sizes() {
  std::uint64_t total = 0;
  std::vector<std::uint64_t> sizes;
  for (const io::Member& member : members) {
    auto bytes = os::file_bytes(member.pair.buffered.get(), member.path);
    if (!bytes) return std::unexpected(bytes.error());
    sizes.push_back(*bytes);
    total += *bytes;
  }
  for (unsigned index = 0; index < layout.members; ++index) {
    const std::uint64_t expected = layout.member_bytes(index, total);
    if (sizes[index] == expected) continue;
    return std::unexpected(make_error(ErrorKind::corrupt,
                                      fmt::format("opening {}: member {} has {} bytes where the sizes of all "
                                                  "members ask for {}; it was cut off, or "
                                                  "belongs to another file",
                                                  name, members[index].path, sizes[index], expected),
                                      members[index].path));
  }
  known_bytes_ = total;
  return {};
}

Result<Engine> FileCore::engine() const {
  if (engine_) return *engine_;
  return Engine::default_engine();
}

Status FileCore::check_open() const {
  if (!closed_.load()) return {};
  return std::unexpected(make_error(ErrorKind::closed, fmt::format("{} is closed", name), name));
}

void FileCore::forget_parent_operations() {
  unsigned known = generation_.load();
  const unsigned now = os::fork_generation();
  // What was pending in the parent is pending there, and will never end here.
  if (known != now && generation_.compare_exchange_strong(known, now)) {
    pending_ = 0;
    pending_writes_[0] = 0;
    pending_writes_[1] = 0;
  }
}

Status FileCore::begin(Op op, std::uint64_t offset, std::uint64_t bytes, unsigned& write_epoch) {
  if (offset > std::numeric_limits<std::int64_t>::max() - bytes ||
      bytes > std::numeric_limits<std::int64_t>::max()) {
    return std::unexpected(
        make_error(ErrorKind::invalid_argument,
                   fmt::format("offset: {} + {} bytes of {} is beyond the largest file offset (2^63 - 1)",
                               offset, bytes, name),
                   name));
  }
  if (op != Op::read && options.mode == Mode::read) {
    return std::unexpected(system_error(
        EBADF, fmt::format("writing {}, which was opened with mode \"r\"; open it with \"r+\"", name), name));
  }
  if (op != Op::read && sync_failed_.load()) {
    const std::scoped_lock lock(failure_mutex_);
    return std::unexpected(*sync_error_);
  }
  forget_parent_operations();
  pending_.fetch_add(1);
  // Closing sets its flag before it waits for the count, so either it sees this operation or this sees the
  // flag.
  if (auto open = check_open(); !open) {
    count_down(pending_);
    return open;
  }
  if (op == Op::write) {
    write_epoch = epoch_.load();
    pending_writes_[write_epoch].fetch_add(1);
  }
  return {};
}

void FileCore::end(Op op, unsigned write_epoch) {
  if (op == Op::write) count_down(pending_writes_[write_epoch]);
  count_down(pending_);
}

Status FileCore::extend(std::uint64_t offset, std::uint64_t bytes, std::uint64_t block_bytes) {
  const std::uint64_t end = offset + bytes;
  if (end <= known_bytes_.load()) return {};
  if (bytes > block_bytes && can_preallocate_.load()) {
    if (auto status = preallocate(offset, bytes); !status) return status;
  }
  const std::scoped_lock lock(size_mutex_);
  if (end <= known_bytes_.load()) return {};
  // Members of a striped file always have the sizes that the length of the whole gives them; a plain file
  // grows with the write itself.
  if (layout.members > 1) {
    if (auto status = resize_members(end, false); !status) return status;
  }
  known_bytes_ = end;
  return {};
}

Status FileCore::preallocate(std::uint64_t offset, std::uint64_t bytes) {
  for (unsigned index = 0; index < layout.members; ++index) {
    const io::Member& member = members[index];
    // Memory is allocated, and zeroed, as it is written: doing so before would only do it twice.
    if (member.pair.in_memory) continue;
    const std::uint64_t start = layout.member_bytes(index, offset);
    const std::uint64_t length = layout.member_bytes(index, offset + bytes) - start;
    if (length == 0) continue;
    int code = 0;
    do
      code = ::fallocate(member.pair.buffered.get(), 0, static_cast<off_t>(start),
                         static_cast<off_t>(length)) == 0
                 ? 0
                 : errno;
    while (code == EINTR);
    if (code == ENOSPC || code == EDQUOT || code == EFBIG || code == EIO) {
      return std::unexpected(system_error(
          code, fmt::format("allocating {} bytes at {} of {}", length, start, member.path), member.path));
    }
    if (code != 0) can_preallocate_ = false;  // not on this filesystem
  }
  return {};
}

Status FileCore::resize_members(std::uint64_t bytes, bool shrink) {
  for (unsigned index = 0; index < layout.members; ++index) {
    io::Member& member = members[index];
    const std::uint64_t wanted = layout.member_bytes(index, bytes);
    if (!shrink) {
      auto present = os::file_bytes(member.pair.buffered.get(), member.path);
      if (!present) return std::unexpected(present.error());
      if (*present >= wanted) continue;
    }
    if (::ftruncate(member.pair.buffered.get(), static_cast<off_t>(wanted)) != 0) {
      return std::unexpected(system_error(
          errno, fmt::format("setting the size of {} to {} bytes", member.path, wanted), member.path));
    }
  }
  return {};
}

Result<std::uint64_t> FileCore::size() const {
  if (auto open = check_open(); !open) return std::unexpected(open.error());
  std::uint64_t total = 0;
  for (const io::Member& member : members) {
    auto bytes = os::file_bytes(member.pair.buffered.get(), member.path);
    if (!bytes) return bytes;
    total += *bytes;
  }
  return total;
}

Status FileCore::truncate(std::uint64_t bytes) {
  unsigned epoch = 0;
  if (auto started = begin(Op::write, 0, bytes, epoch); !started) return started;
  Status status;
  {
    const std::scoped_lock lock(size_mutex_);
    status = resize_members(bytes, true);
    if (status) known_bytes_ = bytes;
  }
  end(Op::write, epoch);
  return status;
}

Status FileCore::sync() {
  auto engine_now = engine();
  if (!engine_now) return std::unexpected(engine_now.error());
  const std::scoped_lock lock(sync_mutex_);
  unsigned unused = 0;
  if (auto started = begin(Op::sync, 0, 0, unused); !started) return started;
  // 1 a write that read the epoch just before the last flip may be counted in what is the next epoch now
  const unsigned next = 1 - epoch_.load();
  wait_for_zero(pending_writes_[next]);
  // 2 later writes are counted in the next epoch, those before are waited for
  epoch_.store(next);
  wait_for_zero(pending_writes_[1 - next]);
  // 3 data and size to the device
  const auto synced = engine_now->core()->run_sync(shared_from_this());
  if (synced) return {};
  const std::scoped_lock failure(failure_mutex_);
  sync_error_ = synced.error();
  sync_failed_ = true;
  return std::unexpected(*sync_error_);
}

Status FileCore::close() {
  forget_parent_operations();
  if (closed_.exchange(true)) return {};
  wait_for_zero(pending_);
  for (io::Member& member : members) {
    member.pair.direct.reset();
    member.pair.buffered.reset();
  }
  return {};
}

}  // namespace trunkline
