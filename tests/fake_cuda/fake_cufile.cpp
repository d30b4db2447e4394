// A fake cuFile on top of the fake CUDA driver: files are read without read(2), as with DMA, or with it, as
// in cuFile's compatibility mode. It keeps track of registrations.
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>

#include "fake_cuda.h"
#include "fake_driver.h"

namespace {

constexpr int kSuccess = 0;
constexpr int kNotInitialized = 5001;
constexpr int kCudaError = 5011;
constexpr int kInvalidPointer = 5012;
constexpr int kInvalidValue = 5022;
constexpr int kMemoryRegistered = 5023;
constexpr int kMemoryNotRegistered = 5024;
constexpr int kFileRegistered = 5028;
constexpr unsigned kNvme = 1U << 4;
constexpr unsigned kAllKnownAndAligned = 0xF;
constexpr std::size_t kPage = 4096;

enum Mode : int { direct, compatible, pretending, wrong, nothing, by_io_uring, by_aio };

struct File {
  int fd = -1;
  int under_way = 0;
};

struct State {
  std::mutex mutex;
  bool opened = false;
  int mode = direct;
  long result = 0;
  unsigned result_after = 0;
  unsigned result_times = 0;
  std::uint64_t transfers = 0;
  std::uint64_t unregistered = 0;
  std::set<std::shared_ptr<File>> files;
  std::map<std::uint64_t, std::size_t> memory;
  std::map<void*, unsigned> streams;
};

State& state() {
  static auto* kept = new State;
  return *kept;
}

struct Outcome {
  int code;
  int cuda_code;
};

Outcome begin(const char* function, bool needs_driver = true) {
  if (const int code = fake::begin(function); code != kSuccess)
    return code > 5000 ? Outcome{code, 0} : Outcome{kCudaError, code};
  const std::scoped_lock lock(state().mutex);
  if (needs_driver && !state().opened) return {kNotInitialized, 0};
  return {kSuccess, 0};
}

std::shared_ptr<File> file_locked(void* handle) {
  const auto found =
      std::ranges::find_if(state().files, [handle](const auto& file) { return file.get() == handle; });
  return found == state().files.end() ? nullptr : *found;
}

// The start of the registered memory that contains the address; 0: there is none.
std::uint64_t base_locked(std::uint64_t address) {
  auto found = state().memory.upper_bound(address);
  if (found == state().memory.begin()) return 0;
  --found;
  return address < found->first + found->second ? found->first : 0;
}

struct Freed {
  void operator()(void* memory) const { std::free(memory); }
};

// Bypasses the page cache, according to how the file was opened; sizes that are not whole pages use a bounce
// buffer.
ssize_t with_calls(bool to_file, int fd, std::byte* memory, std::size_t bytes, off_t offset) {
  const std::size_t whole = (bytes + kPage - 1) / kPage * kPage;
  const std::unique_ptr<void, Freed> buffer(std::aligned_alloc(kPage, whole));
  if (to_file) {
    std::memcpy(buffer.get(), memory, bytes);
    return ::pwrite(fd, buffer.get(), bytes, offset);
  }
  const ssize_t got = ::pread(fd, buffer.get(), bytes, offset);
  if (got > 0) std::memcpy(memory, buffer.get(), static_cast<std::size_t>(got));
  return got;
}

// An io_uring ring, using only its system calls: one request at a time.
class Ring {
 public:
  Ring() {
    io_uring_params shape{};
    fd_ = static_cast<int>(::syscall(SYS_io_uring_setup, 4, &shape));
    if (fd_ < 0) return;
    const auto map = [this](std::size_t bytes, off_t which) {
      return static_cast<std::byte*>(
          ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, which));
    };
    submissions_ = map(shape.sq_off.array + shape.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING);
    completions_ = map(shape.cq_off.cqes + shape.cq_entries * sizeof(io_uring_cqe), IORING_OFF_CQ_RING);
    entries_ = reinterpret_cast<io_uring_sqe*>(map(shape.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES));
    shape_ = shape;
  }

  ssize_t read(int file, void* memory, std::size_t bytes, off_t offset) {
    const std::scoped_lock lock(mutex_);
    if (fd_ < 0) return -1;
    unsigned& tail = *counter(submissions_, shape_.sq_off.tail);
    const unsigned index = tail % shape_.sq_entries;
    entries_[index] = {};
    entries_[index].opcode = IORING_OP_READ;
    entries_[index].fd = file;
    entries_[index].off = static_cast<std::uint64_t>(offset);
    entries_[index].addr = reinterpret_cast<std::uint64_t>(memory);
    entries_[index].len = static_cast<unsigned>(bytes);
    counter(submissions_, shape_.sq_off.array)[index] = index;
    std::atomic_ref(tail).store(tail + 1);
    if (::syscall(SYS_io_uring_enter, fd_, 1, 1, IORING_ENTER_GETEVENTS, nullptr, 0) != 1) return -1;
    unsigned& head = *counter(completions_, shape_.cq_off.head);
    const auto* results = reinterpret_cast<const io_uring_cqe*>(completions_ + shape_.cq_off.cqes);
    const ssize_t got = results[head % shape_.cq_entries].res;
    std::atomic_ref(head).store(head + 1);
    return got;
  }

 private:
  static unsigned* counter(std::byte* ring, unsigned offset) {
    return reinterpret_cast<unsigned*>(ring + offset);
  }

  std::mutex mutex_;
  int fd_ = -1;
  io_uring_params shape_{};
  std::byte* submissions_ = nullptr;
  std::byte* completions_ = nullptr;
  io_uring_sqe* entries_ = nullptr;
};

// The same through persistent queues, as cuFile may use them; reads whole pages.
ssize_t with_ring(int fd, std::byte* memory, std::size_t bytes, off_t offset) {
  static auto* ring = new Ring;
  const std::unique_ptr<void, Freed> buffer(std::aligned_alloc(kPage, bytes));
  const ssize_t got = ring->read(fd, buffer.get(), bytes, offset);
  if (got > 0) std::memcpy(memory, buffer.get(), static_cast<std::size_t>(got));
  return got;
}

ssize_t with_aio(int fd, std::byte* memory, std::size_t bytes, off_t offset) {
  static const aio_context_t context = [] {
    aio_context_t made = 0;
    return ::syscall(SYS_io_setup, 4, &made) == 0 ? made : 0;
  }();
  if (context == 0) return -1;
  const std::unique_ptr<void, Freed> buffer(std::aligned_alloc(kPage, bytes));
  iocb request{};
  request.aio_lio_opcode = IOCB_CMD_PREAD;
  request.aio_fildes = static_cast<unsigned>(fd);
  request.aio_buf = reinterpret_cast<std::uint64_t>(buffer.get());
  request.aio_nbytes = bytes;
  request.aio_offset = offset;
  iocb* requests[] = {&request};
  io_event event{};
  if (::syscall(SYS_io_submit, context, 1, requests) != 1 ||
      ::syscall(SYS_io_getevents, context, 1, 1, &event, nullptr) != 1)
    return -1;
  const auto got = static_cast<ssize_t>(event.res);
  if (got > 0) std::memcpy(memory, buffer.get(), static_cast<std::size_t>(got));
  return got;
}

// Like DMA: no call of this process returns the bytes.
ssize_t without_calls(int fd, std::byte* memory, std::size_t bytes, off_t offset) {
  struct stat status{};
  if (::fstat(fd, &status) != 0) return -1;
  if (offset >= status.st_size) return 0;
  const std::size_t there = std::min(bytes, static_cast<std::size_t>(status.st_size - offset));
  void* mapped = ::mmap(nullptr, there, PROT_READ, MAP_SHARED, fd, offset);
  if (mapped == MAP_FAILED) return -1;
  std::memcpy(memory, mapped, there);
  ::munmap(mapped, there);
  return static_cast<ssize_t>(there);
}

// What the test has ordered for the transfer that runs now.
struct Order {
  int mode = direct;
  std::optional<long> result;  // instead of what is moved
};

Order next_order() {
  const std::scoped_lock lock(state().mutex);
  Order order{.mode = state().mode, .result = {}};
  if (state().result_times == 0) return order;
  if (state().result_after > 0) {
    --state().result_after;
  } else {
    --state().result_times;
    order.result = state().result;
  }
  return order;
}

// Returns what cuFile reports.
ssize_t move_bytes(bool to_file, int fd, std::byte* memory, std::size_t bytes, off_t offset) {
  const Order order = next_order();
  if (order.result && *order.result <= 0) return *order.result;
  std::size_t most = order.result ? std::min(bytes, static_cast<std::size_t>(*order.result)) : bytes;
  if (to_file) most = most / kPage * kPage;  // the part that can be written; the rest must be written again
  ssize_t done = 0;
  if (order.mode == nothing && !to_file)
    done = static_cast<ssize_t>(most);
  else if (to_file || order.mode == compatible || order.mode == pretending)
    done = with_calls(to_file, fd, memory, most, offset);
  else if (order.mode == by_io_uring)
    done = with_ring(fd, memory, most, offset);
  else if (order.mode == by_aio)
    done = with_aio(fd, memory, most, offset);
  else
    done = without_calls(fd, memory, most, offset);
  if (order.result && done >= 0) done = *order.result;
  if (order.mode == wrong && done > 0 && !to_file) memory[done / 2] ^= std::byte{1};
  return done;
}

Outcome transfer(const char* function, bool to_file, void* handle, void* memory, std::size_t* bytes,
                 off_t* file_offset, off_t* memory_offset, ssize_t* moved, void* stream) {
  if (const Outcome refused = begin(function); refused.code != kSuccess) return refused;
  const auto base = reinterpret_cast<std::uint64_t>(memory);
  const std::uint64_t address = base + static_cast<std::uint64_t>(*memory_offset);
  if (!fake::is_memory_of_current(address, *bytes)) {
    fake::complain(std::string(function) + " on memory that is not the device's");
    return {kInvalidPointer, 0};
  }
  std::shared_ptr<File> file;
  {
    const std::scoped_lock lock(state().mutex);
    file = file_locked(handle);
    if (file == nullptr) {
      fake::complain(std::string(function) + " on a file that is not registered");
      return {kInvalidValue, 0};
    }
    const std::uint64_t registered = base_locked(address);
    if (registered != 0 && registered != base)
      fake::complain(std::string(function) + " with another base than that of the registered memory");
    if (registered == 0) ++state().unregistered;
    ++state().transfers;
    const auto known = state().streams.find(stream);
    const bool aligned =
        (*bytes | static_cast<std::uint64_t>(*file_offset) | static_cast<std::uint64_t>(*memory_offset)) %
            kPage ==
        0;
    if (known != state().streams.end() && known->second == kAllKnownAndAligned && !aligned)
      fake::complain(std::string(function) + ": the stream was promised multiples of a page");
    ++file->under_way;
  }
  // The file may be closed when the stream has run this, or has dropped it.
  const std::shared_ptr<void> until_done(nullptr, [file](void*) {
    const std::scoped_lock lock(state().mutex);
    --file->under_way;
  });
  const bool added = fake::add_work(stream, address, *bytes, [=](std::byte* where) {
    static_cast<void>(until_done);
    *moved = move_bytes(to_file, file->fd, where, *bytes, *file_offset);
  });
  if (!added) {
    fake::complain(std::string(function) + " on a stream that is not the current context's");
    return {kInvalidValue, 0};
  }
  return {kSuccess, 0};
}

}  // namespace

namespace fake {

void forget_memory(std::uint64_t device) {
  bool registered = false;
  {
    const std::scoped_lock lock(state().mutex);
    registered = state().memory.contains(device);
  }
  if (registered) complain("cuMemFree of memory that cuFile still has");
}

void reset_cufile() {
  const std::scoped_lock lock(state().mutex);
  state().mode = direct;
  state().result_times = 0;
  state().transfers = 0;
  state().unregistered = 0;
}

std::uint64_t live_in_cufile(const std::string& what) {
  const std::scoped_lock lock(state().mutex);
  return what == "files" ? state().files.size() : state().memory.size();
}

}  // namespace fake

// NOLINTBEGIN(readability-identifier-naming)
extern "C" {

struct Properties {
  unsigned major_version;
  unsigned minor_version;
  std::size_t sizes[2];
  unsigned status_flags;
  unsigned control_flags;
  unsigned others[6];
};

struct Descriptor {
  int type;
  union {
    int fd;
    void* handle;
  };
  const void* operations;
};

Outcome cuFileDriverOpen() {
  const Outcome outcome = begin("cuFileDriverOpen", false);
  const std::scoped_lock lock(state().mutex);
  if (outcome.code == kSuccess) state().opened = true;
  return outcome;
}

Outcome cuFileDriverGetProperties(Properties* properties) {
  if (const Outcome refused = begin("cuFileDriverGetProperties"); refused.code != kSuccess) return refused;
  const std::scoped_lock lock(state().mutex);
  *properties = {};
  properties->major_version = 2;
  properties->status_flags = state().mode == compatible ? 0 : kNvme;
  return {kSuccess, 0};
}

Outcome cuFileHandleRegister(void** handle, Descriptor* descriptor) {
  if (const Outcome refused = begin("cuFileHandleRegister"); refused.code != kSuccess) return refused;
  const std::scoped_lock lock(state().mutex);
  const auto known = std::ranges::find_if(
      state().files, [descriptor](const auto& file) { return file->fd == descriptor->fd; });
  if (known != state().files.end()) return {kFileRegistered, 0};
  if (descriptor->type != 1 || ::fcntl(descriptor->fd, F_GETFL) < 0) return {kInvalidValue, 0};
  auto file = std::make_shared<File>();
  file->fd = descriptor->fd;
  *handle = file.get();
  state().files.insert(std::move(file));
  return {kSuccess, 0};
}

void cuFileHandleDeregister(void* handle) {
  const std::scoped_lock lock(state().mutex);
  const auto file = file_locked(handle);
  if (file == nullptr) {
    fake::complain("cuFileHandleDeregister of what is not registered");
    return;
  }
  if (file->under_way != 0) fake::complain("cuFileHandleDeregister while transfers are under way");
  if (::fcntl(file->fd, F_GETFL) < 0) fake::complain("cuFileHandleDeregister of a file that was closed");
  state().files.erase(file);
}

Outcome cuFileBufRegister(const void* memory, std::size_t bytes, int /*flags*/) {
  if (const Outcome refused = begin("cuFileBufRegister"); refused.code != kSuccess) return refused;
  const auto address = reinterpret_cast<std::uint64_t>(memory);
  if (!fake::is_memory_of_current(address, bytes)) return {kInvalidPointer, 0};
  const std::scoped_lock lock(state().mutex);
  for (const auto& [base, length] : state().memory) {
    if (address < base + length && base < address + bytes) return {kMemoryRegistered, 0};
  }
  state().memory[address] = bytes;
  return {kSuccess, 0};
}

Outcome cuFileBufDeregister(const void* memory) {
  const std::scoped_lock lock(state().mutex);
  if (state().memory.erase(reinterpret_cast<std::uint64_t>(memory)) != 0) return {kSuccess, 0};
  fake::complain("cuFileBufDeregister of what is not registered");
  return {kMemoryNotRegistered, 0};
}

Outcome cuFileStreamRegister(void* stream, unsigned flags) {
  if (const Outcome refused = begin("cuFileStreamRegister"); refused.code != kSuccess) return refused;
  const std::scoped_lock lock(state().mutex);
  state().streams[stream] = flags;
  return {kSuccess, 0};
}

Outcome cuFileStreamDeregister(void* stream) {
  const std::scoped_lock lock(state().mutex);
  if (state().streams.erase(stream) == 0) fake::complain("cuFileStreamDeregister of what is not registered");
  return {kSuccess, 0};
}

Outcome cuFileReadAsync(void* handle, void* memory, std::size_t* bytes, off_t* file_offset,
                        off_t* memory_offset, ssize_t* moved, void* stream) {
  return transfer("cuFileReadAsync", false, handle, memory, bytes, file_offset, memory_offset, moved, stream);
}

Outcome cuFileWriteAsync(void* handle, void* memory, std::size_t* bytes, off_t* file_offset,
                         off_t* memory_offset, ssize_t* moved, void* stream) {
  return transfer("cuFileWriteAsync", true, handle, memory, bytes, file_offset, memory_offset, moved, stream);
}

void fakeCufileMode(int mode) {
  const std::scoped_lock lock(state().mutex);
  state().mode = mode;
}

void fakeCufileResult(long moved, unsigned after, unsigned times) {
  const std::scoped_lock lock(state().mutex);
  state().result = moved;
  state().result_after = after;
  state().result_times = times;
}

std::uint64_t fakeCufileTransfers() {
  const std::scoped_lock lock(state().mutex);
  return state().transfers;
}

std::uint64_t fakeCufileUnregistered() {
  const std::scoped_lock lock(state().mutex);
  return state().unregistered;
}
}
// NOLINTEND(readability-identifier-naming)
