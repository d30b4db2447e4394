#include "io/file/file_core.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <limits>
#include <memory>
#include <utility>

#include "io/engine_core.h"
#include "io/gpu/gds_policy.h"
#include "io/operation.h"
#include "os/allocation.h"
#include "os/file_lock.h"

namespace trunkline {
namespace {

// A lock of the parent may never be released: the thread that holds it does not exist in the child.
void renew(std::mutex& mutex) { std::construct_at(&mutex); }

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
      can_preallocate_(options_in.preallocate) {}

Status FileCore::adopt_sizes() {
  std::uint64_t total = 0;
  std::vector<std::uint64_t> sizes;
  // Another process may be growing the members, one after the other.
  std::optional<os::FileLock> file_lock;
  if (layout.members > 1) file_lock.emplace(members.front().pair.buffered.get(), os::FileLock::Kind::shared);
  for (const io::Member& member : members) {
    auto bytes = os::file_bytes(member.pair.buffered.get(), member.path);
    if (!bytes) return std::unexpected(bytes.error());
    sizes.push_back(*bytes);
    total += *bytes;
  }
  for (unsigned index = 0; index < layout.members; ++index) {
    const std::uint64_t expected = layout.member_bytes(index, total);
    if (sizes[index] == expected) continue;
    return std::unexpected(make_error(
        ErrorKind::corrupt,
        fmt::format("cannot open {}: member {} has {} bytes, but the sizes of the others require {}; "
                    "it was cut off, or belongs to another file",
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
  ownership_.take_over([this] {
    // Operations pending in the parent are pending there, and will never end here.
    pending_ = 0;
    pending_writes_[0] = 0;
    pending_writes_[1] = 0;
    renew(size_mutex_);
    renew(sync_mutex_);
    renew(failure_mutex_);
    renew(gpu_mutex_);
  });
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
    Error error = make_error(
        ErrorKind::system,
        fmt::format("cannot write {} (EBADF): it was opened with mode \"r\"; open it with \"r+\"", name),
        name);
    error.code = EBADF;
    return std::unexpected(std::move(error));
  }
  forget_parent_operations();
  if (op != Op::read && sync_failed_.load()) {
    const std::scoped_lock lock(failure_mutex_);
    return std::unexpected(*sync_error_);
  }
  pending_.fetch_add(1);
  // close() sets its flag before it waits for the count to drop, so either it sees this operation or this
  // sees the flag.
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
  const std::scoped_lock lock(size_mutex_);
  if (end <= known_bytes_.load()) return {};
  const bool preallocates = bytes > block_bytes && can_preallocate_.load();
  if (layout.members > 1) {
    if (auto grown = grow_members(offset, bytes, preallocates); !grown) return grown;
  } else if (preallocates) {
    if (auto grown = grow_plain(offset, bytes); !grown) return grown;
  }  // otherwise the write itself extends a plain file
  known_bytes_ = end;
  return {};
}

bool FileCore::extends(std::uint64_t offset, std::uint64_t bytes, std::uint64_t block_bytes) {
  if (bytes == 0 || offset + bytes <= known_bytes_.load()) return false;
  if (layout.members > 1 || (bytes > block_bytes && can_preallocate_.load())) return true;
  const std::unique_lock lock(size_mutex_, std::try_to_lock);
  return !lock.owns_lock();  // its holder may be growing the file
}

// Other handles and processes may write to the file meanwhile, without a lock. Truncating it here, even to a
// length that was read a moment before, could cut off what they wrote. The caller holds size_mutex_.
Status FileCore::grow_plain(std::uint64_t offset, std::uint64_t bytes) {
  const io::Member& member = members.front();
  // Memory is allocated and zeroed as it is written: preallocating would only zero it twice.
  if (member.pair.in_memory) return {};
  const int code = os::allocate_or_keep_length(member.pair.buffered.get(), offset, bytes);
  return allocation_status(code, member, offset, bytes);
}

// The members of a striped file always have the sizes that follow from the length of the whole. The caller
// holds size_mutex_.
Status FileCore::grow_members(std::uint64_t offset, std::uint64_t bytes, bool preallocates) {
  // Others that have the file open may grow it too: the size must not change between reading and setting it,
  // or the end that another has written is cut off.
  const os::FileLock file_lock(members.front().pair.buffered.get(), os::FileLock::Kind::exclusive);
  const auto before = bytes_of_members();
  if (!before) return std::unexpected(before.error());
  Status grown = resize_members(offset + bytes, false);
  if (grown && preallocates) grown = preallocate_members(offset, bytes);
  // Everyone who writes beyond that length grows the file first, and waits for the lock.
  if (!grown) shrink_back(*before);
  return grown;
}

// Truncates a striped file to the length `bytes` again, which frees the blocks beyond it. Only under the file
// lock, which everyone who grows a striped file holds. Failures are ignored: the error that led here is the
// one to report.
void FileCore::shrink_back(std::uint64_t bytes) {
  for (unsigned index = 0; index < layout.members; ++index) {
    const io::Member& member = members[index];
    const std::uint64_t wanted = layout.member_bytes(index, bytes);
    const auto present = os::file_bytes(member.pair.buffered.get(), member.path);
    // A shorter member is about to be grown by writes that were accepted. One of exactly this length may have
    // blocks beyond it.
    if (!present || *present < wanted) continue;
    while (::ftruncate(member.pair.buffered.get(), static_cast<off_t>(wanted)) != 0 && errno == EINTR) {
    }
  }
}

Result<std::uint64_t> FileCore::bytes_of_members() const {
  std::uint64_t total = 0;
  for (const io::Member& member : members) {
    auto bytes = os::file_bytes(member.pair.buffered.get(), member.path);
    if (!bytes) return bytes;
    total += *bytes;
  }
  return total;
}

Status FileCore::preallocate_members(std::uint64_t offset, std::uint64_t bytes) {
  for (unsigned index = 0; index < layout.members; ++index) {
    const io::Member& member = members[index];
    if (member.pair.in_memory) continue;  // as in grow_plain()
    const std::uint64_t start = layout.member_bytes(index, offset);
    const std::uint64_t length = layout.member_bytes(index, offset + bytes) - start;
    if (length == 0) continue;
    const int code = os::allocate(member.pair.buffered.get(), start, length);
    if (auto status = allocation_status(code, member, start, length); !status) return status;
  }
  return {};
}

Status FileCore::allocation_status(int code, const io::Member& member, std::uint64_t start,
                                   std::uint64_t length) {
  if (code == ENOSPC || code == EDQUOT || code == EFBIG || code == EIO) {
    return std::unexpected(system_error(
        code, fmt::format("allocate {} bytes at {} of {}", length, start, member.path), member.path));
  }
  if (code != 0) can_preallocate_ = false;  // not supported by this filesystem
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
          errno, fmt::format("set the size of {} to {} bytes", member.path, wanted), member.path));
    }
  }
  return {};
}

Result<std::uint64_t> FileCore::size() {
  // Counted as pending: otherwise a concurrent close could let the descriptor numbers be reused for another
  // file.
  unsigned unused = 0;
  if (auto started = begin(Op::read, 0, 0, unused); !started) return std::unexpected(started.error());
  Result<std::uint64_t> total = bytes_of_members();
  end(Op::read, unused);
  return total;
}

Status FileCore::truncate(std::uint64_t bytes) {
  forget_parent_operations();
  {
    // A write beyond the new end that is still in flight would make one member of a striped file longer
    // again.
    const std::scoped_lock lock(sync_mutex_);
    await_writes();
  }
  unsigned epoch = 0;
  if (auto started = begin(Op::write, 0, bytes, epoch); !started) return started;
  Status status;
  {
    const std::scoped_lock lock(size_mutex_);
    std::optional<os::FileLock> file_lock;
    if (layout.members > 1)
      file_lock.emplace(members.front().pair.buffered.get(), os::FileLock::Kind::exclusive);
    const auto before = bytes_of_members();
    if (!before) status = std::unexpected(before.error());
    if (status) status = resize_members(bytes, true);
    if (status)
      known_bytes_ = bytes;
    else if (layout.members > 1 && before && bytes > *before)
      shrink_back(*before);  // members that were grown before the one that failed
  }
  end(Op::write, epoch);
  return status;
}

// Returns when all writes submitted before are done. The caller holds sync_mutex_.
void FileCore::await_writes() {
  // 1. A write that read the epoch just before the last flip may be counted in what is about to become the
  // current epoch.
  const unsigned next = 1 - epoch_.load();
  wait_for_zero(pending_writes_[next]);
  // 2. Later writes are counted in the new epoch; earlier ones are waited for.
  epoch_.store(next);
  wait_for_zero(pending_writes_[1 - next]);
}

Status FileCore::sync() {
  auto engine_now = engine();
  if (!engine_now) return std::unexpected(engine_now.error());
  forget_parent_operations();
  const std::scoped_lock lock(sync_mutex_);
  unsigned unused = 0;
  if (auto started = begin(Op::sync, 0, 0, unused); !started) return started;
  await_writes();
  // Makes data and size durable.
  const auto synced = engine_now->core()->run_sync(shared_from_this());
  if (synced) return {};
  const std::scoped_lock failure(failure_mutex_);
  sync_error_ = synced.error();
  sync_failed_ = true;
  return std::unexpected(*sync_error_);
}

Status FileCore::gpu_reaches(Device& device, GpuPath path) {
  const auto refused = [this](const std::string& why) {
    return std::unexpected(make_error(ErrorKind::unsupported, why, name));
  };
  if (path == GpuPath::bounce) return refused("gpu=\"bounce\" was requested");  // regardless of the members
  const std::scoped_lock lock(gpu_mutex_);
  const std::pair key(&device, path);
  const auto known = gpu_reaches_.find(key);
  if (known != gpu_reaches_.end()) return known->second;
  const auto find_out = [&]() -> Status {
    for (io::Member& member : members) {
      if (const auto why = io::why_never_gds(path, member.pair))
        return refused(fmt::format("GPUDirect Storage cannot be used for {}: {}", member.path, *why));
      const GdsSource source{.fd = member.pair.direct.get(),
                             .path = member.path,
                             .directory = std::filesystem::path(member.path).parent_path().string(),
                             .known = member.gds};
      auto opened = device.open_gds(source, io::gds_probe_for(path));
      if (!opened) return std::unexpected(opened.error());
      if (member.gds == nullptr) member.gds = *std::move(opened);
    }
    return {};
  };
  Status found = find_out();
  // Other errors may be temporary, such as a GPU without memory for a probe.
  if (found || found.error().kind == ErrorKind::unsupported) gpu_reaches_.emplace(key, found);
  return found;
}

Status FileCore::close() {
  forget_parent_operations();
  const bool first = !closed_.exchange(true);
  wait_for_zero(pending_);
  if (!first) return {};
  for (io::Member& member : members) {
    member.gds.reset();
    member.pair.direct.reset();
    member.pair.buffered.reset();
  }
  return {};
}

}  // namespace trunkline
