// A fake CUDA driver for machines without a GPU: the same symbols over host memory, with two devices. Streams
// are threads, so that work really is asynchronous. Device memory cannot be accessed through its addresses,
// so that code that mistakes it for host memory is exposed. The target of a copy holds garbage until the copy
// ends, so that code that reads it too early is exposed. Every failure that a real driver reports can be
// provoked.
#include "fake_cuda.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_driver.h"

namespace {

constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kOutOfMemory = 2;
constexpr int kNotInitialized = 3;
constexpr int kInvalidDevice = 101;
constexpr int kInvalidContext = 201;
constexpr int kInvalidHandle = 400;
constexpr int kCaptureImplicit = 906;
constexpr int kIllegalAddress = 700;
constexpr int kAlreadyRegistered = 712;
constexpr int kNotRegistered = 713;
constexpr std::size_t kDeviceBytes = std::size_t{1} << 30;
constexpr int kDevices = 2;
constexpr int kRubbish = 0xDB;
constexpr int kRelaxedCapture = 2;

struct Event {
  int device = 0;
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t recorded = 0;
  std::uint64_t reached = 0;
  void* stream = nullptr;  // where it was last recorded

  void wait_for(std::uint64_t which) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return reached >= which; });
  }
};

class Stream {
 public:
  explicit Stream(int device) : device_(device), thread_([this] { work(); }) {}
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() {
    {
      const std::scoped_lock lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  int device() const { return device_; }
  void add(std::function<void()> item) {
    {
      const std::scoped_lock lock(mutex_);
      items_.push_back(std::move(item));
      ++added_;
    }
    changed_.notify_all();
  }
  void synchronize() {
    std::unique_lock lock(mutex_);
    const std::uint64_t all = added_;
    changed_.wait(lock, [&] { return done_ >= all; });
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !items_.empty() || stopping_; });
      if (items_.empty()) return;
      std::function<void()> item = std::move(items_.front());
      items_.pop_front();
      lock.unlock();
      item();
      item = nullptr;
      lock.lock();
      ++done_;
      changed_.notify_all();
    }
  }

  const int device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> items_;
  std::uint64_t added_ = 0;
  std::uint64_t done_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

struct Allocation {
  int device = 0;
  std::size_t bytes = 0;
  std::byte* shadow = nullptr;  // the same memory, where it is accessible
};

struct Failure {
  int code = 0;
  unsigned after = 0;
  unsigned times = 0;
};

struct Driver {
  std::mutex mutex;
  bool initialised = false;
  bool broken = false;
  unsigned moving = 0;  // transfers whose bytes are being moved
  std::chrono::microseconds delay{0};
  bool random_delay = false;
  std::minstd_rand random;
  std::map<std::string, Failure> failures;
  int break_after = -1;
  std::string complaints;
  std::uint64_t pageable = 0;
  std::uint64_t copies = 0;
  std::map<void*, std::uint64_t> awaited;  // by stream: waits of other streams for points in it
  std::size_t allocated[kDevices] = {};
  bool retained[kDevices] = {};
  Stream* capturing = nullptr;
  std::condition_variable released;
  unsigned holds = 0;  // ended by fakeCudaRelease
  bool hold_copies = false;
  std::map<std::uint64_t, Allocation> allocations;
  std::map<std::uintptr_t, std::size_t> registered;
  std::set<Stream*> streams;
  std::map<void*, std::shared_ptr<Event>> events;
  std::unique_ptr<Stream> default_stream[kDevices];
  std::map<std::pair<std::thread::id, int>, std::unique_ptr<Stream>> thread_streams;
};

Driver& driver();

// A forked child may access it too, whatever other threads did at the fork.
Driver* make_driver() {
  ::pthread_atfork([] { driver().mutex.lock(); }, [] { driver().mutex.unlock(); },
                   [] { driver().mutex.unlock(); });
  return new Driver;
}

Driver& driver() {
  static auto* kept = make_driver();
  return *kept;
}

char context_tags[kDevices];
// Nothing with a destructor: a driver is also called while its thread ends.
thread_local std::array<void*, 16> contexts;
thread_local std::size_t context_count = 0;
thread_local int capture_mode = 0;  // global

// The device of the current context; -1: there is none.
int current_device() {
  if (context_count == 0) return -1;
  return static_cast<int>(static_cast<char*>(contexts[context_count - 1]) - context_tags);
}

void complain_locked(const std::string& what) { driver().complaints += what + "\n"; }

// The result of a call of `function` before it does anything; 0: it continues. The driver's lock is held.
int begin_locked(const char* function, bool needs_context = true) {
  Driver& state = driver();
  if (!state.initialised) return kNotInitialized;
  if (auto found = state.failures.find(function); found != state.failures.end()) {
    Failure& failure = found->second;
    if (failure.after > 0) {
      --failure.after;
    } else if (failure.times > 0) {
      --failure.times;
      return failure.code;
    }
  }
  if (state.broken) return kIllegalAddress;
  if (needs_context && current_device() < 0) {
    complain_locked(std::string(function) + " without a current context");
    return kInvalidContext;
  }
  return kSuccess;
}

// The same for calls that a thread must not make while a stream is being captured, unless it opted out of the
// check.
int begin_unsafe_locked(const char* function) {
  const int code = begin_locked(function);
  if (code == kSuccess && driver().capturing != nullptr && capture_mode != kRelaxedCapture)
    complain_locked(std::string(function) + " invalidates the capture of a stream");
  return code;
}

// The allocation that contains the memory; nullptr where there is none.
const std::pair<const std::uint64_t, Allocation>* allocation_locked(std::uint64_t address,
                                                                    std::size_t bytes) {
  auto& allocations = driver().allocations;
  auto found = allocations.upper_bound(address);
  if (found == allocations.begin()) return nullptr;
  --found;
  const auto& [start, allocation] = *found;
  if (address - start > allocation.bytes || bytes > allocation.bytes - (address - start)) return nullptr;
  return &*found;
}

// The accessible copy of device memory; nullptr where it is not allocated.
std::byte* shadow_locked(std::uint64_t address, std::size_t bytes) {
  const auto* found = allocation_locked(address, bytes);
  return found == nullptr ? nullptr : found->second.shadow + (address - found->first);
}

bool is_registered_locked(const void* memory, std::size_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  auto found = driver().registered.upper_bound(address);
  if (found == driver().registered.begin()) return false;
  --found;
  return address + bytes <= found->first + found->second;
}

// The default streams, with the handles CU_STREAM_LEGACY (or null) and CU_STREAM_PER_THREAD, are those of the
// current context.
Stream* stream_locked(void* handle) {
  Driver& state = driver();
  const auto number = reinterpret_cast<std::uintptr_t>(handle);
  if (number <= 2) {
    const int device = std::max(0, current_device());
    auto& stream = number == 2 ? state.thread_streams[{std::this_thread::get_id(), device}]
                               : state.default_stream[device];
    if (stream == nullptr) stream = std::make_unique<Stream>(device);
    return stream.get();
  }
  auto* stream = static_cast<Stream*>(handle);
  return state.streams.contains(stream) ? stream : nullptr;
}

// The work of a copy or a fill on its stream: `move` is called with the accessible memory.
void work_on(std::uint64_t device, std::size_t bytes, bool is_copy, void* filled,
             const std::function<void(std::byte*)>& move) {
  Driver& state = driver();
  std::chrono::microseconds delay{0};
  std::byte* memory = nullptr;
  {
    std::unique_lock lock(state.mutex);
    if (is_copy) state.released.wait(lock, [&] { return !state.hold_copies; });
    if (state.broken) return;
    if (state.break_after == 0) {
      state.broken = true;
      return;
    }
    if (state.break_after > 0) --state.break_after;
    ++state.moving;
    delay = state.delay;
    if (state.random_delay && delay.count() > 0)
      delay = std::chrono::microseconds(state.random() % static_cast<unsigned>(delay.count()));
  }
  const std::shared_ptr<void> until_moved(nullptr, [](void*) {
    const std::scoped_lock lock(driver().mutex);
    --driver().moving;
  });
  if (filled != nullptr) std::memset(filled, kRubbish, bytes);
  if (delay.count() > 0) std::this_thread::sleep_for(delay);
  {
    const std::scoped_lock lock(state.mutex);
    memory = shadow_locked(device, bytes);
    if (memory == nullptr) {
      complain_locked("work on device memory that is not allocated (any more)");
      state.broken = true;
      return;
    }
  }
  move(memory);
}

int copy(const char* function, std::uint64_t device, const void* host, std::size_t bytes, void* handle,
         void* filled, std::function<void(std::byte*)> move) {
  Driver& state = driver();
  Stream* stream = nullptr;
  bool registered = false;
  {
    const std::scoped_lock lock(state.mutex);
    if (const int code = begin_locked(function); code != kSuccess) return code;
    stream = stream_locked(handle);
    const auto* memory = allocation_locked(device, bytes);
    if (stream == nullptr || stream->device() != current_device()) {
      complain_locked(std::string(function) + " on a stream that is not the current context's");
      return kInvalidHandle;
    }
    if (memory == nullptr || memory->second.device != stream->device()) {
      complain_locked(std::string(function) + " on memory that is not the device's");
      return kInvalidValue;
    }
    if (stream == state.capturing) complain_locked(std::string(function) + " on a stream that is captured");
    registered = is_registered_locked(host, bytes);
    ++state.copies;
    if (!registered) ++state.pageable;
  }
  stream->add(
      [device, bytes, filled, move = std::move(move)] { work_on(device, bytes, true, filled, move); });
  if (!registered) stream->synchronize();  // like the real driver with pageable memory
  return kSuccess;
}

}  // namespace

namespace fake {

int begin(const char* function) {
  const std::scoped_lock lock(driver().mutex);
  return begin_locked(function);
}

void complain(const std::string& what) {
  const std::scoped_lock lock(driver().mutex);
  complain_locked(what);
}

bool is_memory_of_current(std::uint64_t address, std::size_t bytes) {
  const std::scoped_lock lock(driver().mutex);
  const auto* memory = allocation_locked(address, bytes);
  return memory != nullptr && memory->second.device == current_device();
}

bool add_work(void* handle, std::uint64_t device, std::size_t bytes, std::function<void(std::byte*)> move) {
  Stream* stream = nullptr;
  {
    const std::scoped_lock lock(driver().mutex);
    stream = stream_locked(handle);
    if (stream == nullptr || stream->device() != current_device()) return false;
  }
  stream->add([device, bytes, move = std::move(move)] { work_on(device, bytes, true, nullptr, move); });
  return true;
}

}  // namespace fake

// NOLINTBEGIN(readability-identifier-naming)
extern "C" {

int cuInit(unsigned /*flags*/) {
  const std::scoped_lock lock(driver().mutex);
  const bool before = std::exchange(driver().initialised, true);
  const int code = begin_locked("cuInit", false);
  if (code != kSuccess) driver().initialised = before;
  return code;
}

int cuDriverGetVersion(int* version) {
  *version = 12040;
  return kSuccess;
}

int cuGetErrorName(int code, const char** name) {
  static const std::map<int, const char*> names = {
      {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
      {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
      {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED"},
      {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
      {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
      {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},
      {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {kAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
      {kNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
  };
  const auto found = names.find(code);
  if (found == names.end()) return kInvalidValue;
  *name = found->second;
  return kSuccess;
}

int cuGetErrorString(int /*code*/, const char** text) {
  *text = "a failure of the stand-in";
  return kSuccess;
}

int cuDeviceGetCount(int* count) {
  const std::scoped_lock lock(driver().mutex);
  if (const int code = begin_locked("cuDeviceGetCount", false); code != kSuccess) return code;
  *count = kDevices;
  return kSuccess;
}

int cuDeviceGet(int* device, int index) {
  const std::scoped_lock lock(driver().mutex);
  if (const int code = begin_locked("cuDeviceGet", false); code != kSuccess) return code;
  if (index < 0 || index >= kDevices) return kInvalidDevice;
  *device = index;
  return kSuccess;
}

int cuDeviceGetName(char* name, int bytes, int /*device*/) {
  std::strncpy(name, "Stand-in GPU", static_cast<std::size_t>(bytes));
  return kSuccess;
}

int cuDeviceTotalMem_v2(std::size_t* bytes, int /*device*/) {
  *bytes = kDeviceBytes;
  return kSuccess;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  static const std::map<int, int> values = {{33, 23}, {34, 0}, {50, 0}, {75, 9}, {76, 0}, {116, 1}};
  const auto found = values.find(attribute);
  if (found == values.end()) return kInvalidValue;
  *value = found->second + (attribute == 33 ? device : 0);
  return kSuccess;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  const std::scoped_lock lock(driver().mutex);
  if (const int code = begin_locked("cuDevicePrimaryCtxRetain", false); code != kSuccess) return code;
  if (device < 0 || device >= kDevices) return kInvalidDevice;
  driver().retained[device] = true;
  *context = &context_tags[device];
  return kSuccess;
}

int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  const std::scoped_lock lock(driver().mutex);
  if (const int code = begin_locked("cuDevicePrimaryCtxGetState", false); code != kSuccess) return code;
  if (device < 0 || device >= kDevices) return kInvalidDevice;
  *flags = 0;
  *active = driver().retained[device] ? 1 : 0;
  return kSuccess;
}

int cuCtxPushCurrent_v2(void* context) {
  const std::scoped_lock lock(driver().mutex);
  if (const int code = begin_locked("cuCtxPushCurrent_v2", false); code != kSuccess) return code;
  if (context != &context_tags[0] && context != &context_tags[1]) return kInvalidContext;
  if (context_count == contexts.size()) return kOutOfMemory;
  contexts[context_count++] = context;
  return kSuccess;
}

int cuCtxPopCurrent_v2(void** context) {
  if (context_count == 0) return kInvalidContext;
  *context = contexts[--context_count];
  return kSuccess;
}

int cuStreamCreate(void** stream, unsigned /*flags*/) {
  const std::scoped_lock lock(driver().mutex);
  if (const int code = begin_unsafe_locked("cuStreamCreate"); code != kSuccess) return code;
  *stream = *driver().streams.insert(new Stream(current_device())).first;
  return kSuccess;
}

int cuStreamIsCapturing(void* handle, int* status) {
  const std::scoped_lock lock(driver().mutex);
  if (const int code = begin_locked("cuStreamIsCapturing"); code != kSuccess) return code;
  const Stream* stream = stream_locked(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (reinterpret_cast<std::uintptr_t>(handle) <= 1 && driver().capturing != nullptr) return kCaptureImplicit;
  *status = stream == driver().capturing ? 1 : 0;
  return kSuccess;
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return kSuccess;
}

int cuStreamDestroy_v2(void* handle) {
  auto* stream = static_cast<Stream*>(handle);
  {
    const std::scoped_lock lock(driver().mutex);
    if (driver().streams.erase(stream) == 0) {
      complain_locked("cuStreamDestroy of something that is not a stream");
      return kInvalidHandle;
    }
  }
  delete stream;
  return kSuccess;
}

int cuStreamSynchronize(void* handle) {
  Stream* stream = nullptr;
  {
    const std::scoped_lock lock(driver().mutex);
    if (const int code = begin_unsafe_locked("cuStreamSynchronize"); code != kSuccess) return code;
    stream = stream_locked(handle);
    if (stream == nullptr) return kInvalidHandle;
  }
  stream->synchronize();
  const std::scoped_lock lock(driver().mutex);
  return driver().broken ? kIllegalAddress : kSuccess;
}

int cuEventCreate(void** event, unsigned /*flags*/) {
  const std::scoped_lock lock(driver().mutex);
  if (const int code = begin_locked("cuEventCreate"); code != kSuccess) return code;
  auto made = std::make_shared<Event>();
  made->device = current_device();
  *event = made.get();
  driver().events[made.get()] = made;
  return kSuccess;
}

int cuEventDestroy_v2(void* event) {
  const std::scoped_lock lock(driver().mutex);
  if (driver().events.erase(event) == 0) {
    complain_locked("cuEventDestroy of something that is not an event");
    return kInvalidHandle;
  }
  return kSuccess;
}

int cuEventRecord(void* handle, void* stream_handle) {
  std::shared_ptr<Event> event;
  Stream* stream = nullptr;
  std::uint64_t which = 0;
  {
    const std::scoped_lock lock(driver().mutex);
    if (const int code = begin_locked("cuEventRecord"); code != kSuccess) return code;
    const auto found = driver().events.find(handle);
    stream = stream_locked(stream_handle);
    if (found == driver().events.end() || stream == nullptr) return kInvalidHandle;
    if (found->second->device != stream->device()) return kInvalidHandle;
    if (stream == driver().capturing) complain_locked("cuEventRecord on a stream that is captured");
    event = found->second;
  }
  {
    const std::scoped_lock lock(event->mutex);
    which = ++event->recorded;
    event->stream = stream_handle;
  }
  stream->add([event, which] {
    {
      const std::scoped_lock lock(event->mutex);
      event->reached = std::max(event->reached, which);
    }
    event->changed.notify_all();
  });
  return kSuccess;
}

int cuEventSynchronize(void* handle) {
  std::shared_ptr<Event> event;
  {
    const std::scoped_lock lock(driver().mutex);
    if (const int code = begin_unsafe_locked("cuEventSynchronize"); code != kSuccess) return code;
    const auto found = driver().events.find(handle);
    if (found == driver().events.end()) return kInvalidHandle;
    event = found->second;
  }
  std::uint64_t which = 0;
  {
    const std::scoped_lock lock(event->mutex);
    which = event->recorded;
  }
  event->wait_for(which);
  const std::scoped_lock lock(driver().mutex);
  return driver().broken ? kIllegalAddress : kSuccess;
}

int cuStreamWaitEvent(void* stream_handle, void* handle, unsigned /*flags*/) {
  std::shared_ptr<Event> event;
  Stream* stream = nullptr;
  {
    const std::scoped_lock lock(driver().mutex);
    if (const int code = begin_locked("cuStreamWaitEvent"); code != kSuccess) return code;
    const auto found = driver().events.find(handle);
    stream = stream_locked(stream_handle);
    if (found == driver().events.end() || stream == nullptr) return kInvalidHandle;
    event = found->second;
  }
  std::uint64_t which = 0;
  void* recorded_in = nullptr;
  {
    const std::scoped_lock lock(event->mutex);
    which = event->recorded;
    recorded_in = event->stream;
  }
  if (recorded_in != nullptr && recorded_in != stream_handle) {
    const std::scoped_lock lock(driver().mutex);
    ++driver().awaited[recorded_in];
  }
  stream->add([event, which] { event->wait_for(which); });
  return kSuccess;
}

int cuMemcpyHtoDAsync_v2(std::uint64_t device, const void* host, std::size_t bytes, void* stream) {
  return copy("cuMemcpyHtoDAsync_v2", device, host, bytes, stream, nullptr,
              [host, bytes](std::byte* memory) { std::memcpy(memory, host, bytes); });
}

int cuMemcpyDtoHAsync_v2(void* host, std::uint64_t device, std::size_t bytes, void* stream) {
  return copy("cuMemcpyDtoHAsync_v2", device, host, bytes, stream, host,
              [host, bytes](const std::byte* memory) { std::memcpy(host, memory, bytes); });
}

int cuMemHostRegister_v2(void* memory, std::size_t bytes, unsigned /*flags*/) {
  const std::scoped_lock lock(driver().mutex);
  if (const int code = begin_unsafe_locked("cuMemHostRegister_v2"); code != kSuccess) return code;
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  for (const auto& [start, length] : driver().registered) {
    if (address < start + length && start < address + bytes) return kAlreadyRegistered;
  }
  driver().registered[address] = bytes;
  return kSuccess;
}

int cuMemHostUnregister(void* memory) {
  const std::scoped_lock lock(driver().mutex);
  if (driver().registered.erase(reinterpret_cast<std::uintptr_t>(memory)) == 0) {
    complain_locked("cuMemHostUnregister of memory that is not registered");
    return kNotRegistered;
  }
  return kSuccess;
}

int cuPointerGetAttribute(void* value, int attribute, std::uint64_t address) {
  const std::scoped_lock lock(driver().mutex);
  if (const int code = begin_locked("cuPointerGetAttribute", false); code != kSuccess) return code;
  const auto* found = allocation_locked(address, 1);
  if (attribute != 9 || found == nullptr) return kInvalidValue;
  *static_cast<int*>(value) = found->second.device;
  return kSuccess;
}

int cuMemAlloc_v2(std::uint64_t* device, std::size_t bytes) {
  const std::scoped_lock lock(driver().mutex);
  if (const int code = begin_unsafe_locked("cuMemAlloc_v2"); code != kSuccess) return code;
  if (bytes == 0) return kInvalidValue;
  const int owner = current_device();
  if (bytes > kDeviceBytes - driver().allocated[owner]) return kOutOfMemory;
  const int file = ::memfd_create("fake_cuda", MFD_CLOEXEC);
  if (file < 0 || ::ftruncate(file, static_cast<off_t>(bytes)) != 0) std::abort();
  void* shadow = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  void* address = ::mmap(nullptr, bytes, PROT_NONE, MAP_SHARED, file, 0);
  ::close(file);
  if (shadow == MAP_FAILED || address == MAP_FAILED) std::abort();
  *device = reinterpret_cast<std::uintptr_t>(address);
  driver().allocations[*device] = {owner, bytes, static_cast<std::byte*>(shadow)};
  driver().allocated[owner] += bytes;
  return kSuccess;
}

int cuMemFree_v2(std::uint64_t device) {
  fake::forget_memory(device);
  const std::scoped_lock lock(driver().mutex);
  const auto found = driver().allocations.find(device);
  if (found == driver().allocations.end()) {
    complain_locked("cuMemFree of memory that is not allocated");
    return kInvalidValue;
  }
  ::munmap(reinterpret_cast<void*>(device), found->second.bytes);  // NOLINT(performance-no-int-to-ptr)
  ::munmap(found->second.shadow, found->second.bytes);
  driver().allocated[found->second.device] -= found->second.bytes;
  driver().allocations.erase(found);
  return kSuccess;
}

void fakeCudaRelease() {
  const std::scoped_lock lock(driver().mutex);
  ++driver().holds;
  driver().hold_copies = false;
  driver().released.notify_all();
}

void fakeCudaHoldCopies() {
  const std::scoped_lock lock(driver().mutex);
  driver().hold_copies = true;
}

void fakeCudaHold(void* handle) {
  Stream* stream = nullptr;
  unsigned holds = 0;
  {
    const std::scoped_lock lock(driver().mutex);
    stream = stream_locked(handle);
    holds = driver().holds;
  }
  if (stream == nullptr) std::abort();
  stream->add([holds] {
    std::unique_lock lock(driver().mutex);
    driver().released.wait(lock, [holds] { return driver().holds != holds; });
  });
}

void fakeCudaReset() {
  fakeCudaRelease();
  // On a broken device nobody has waited for them.
  const auto is_moving = [] {
    const std::scoped_lock lock(driver().mutex);
    return driver().broken && driver().moving != 0;
  };
  while (is_moving()) std::this_thread::yield();
  fake::reset_cufile();
  const std::scoped_lock lock(driver().mutex);
  Driver& state = driver();
  state.broken = false;
  state.break_after = -1;
  state.delay = std::chrono::microseconds{0};
  state.random_delay = false;
  state.capturing = nullptr;
  state.failures.clear();
  state.complaints.clear();
  state.pageable = 0;
  state.copies = 0;
  state.awaited.clear();
}

void fakeCudaDelay(unsigned microseconds) {
  const std::scoped_lock lock(driver().mutex);
  driver().delay = std::chrono::microseconds{microseconds};
  driver().random_delay = false;
}

void fakeCudaDelayUpTo(unsigned microseconds) {
  const std::scoped_lock lock(driver().mutex);
  driver().delay = std::chrono::microseconds{microseconds};
  driver().random_delay = true;
}

void fakeCudaCapture(void* stream) {
  const std::scoped_lock lock(driver().mutex);
  driver().capturing = static_cast<Stream*>(stream);
}

void fakeCudaFail(const char* function, int code, unsigned after, unsigned times) {
  const std::scoped_lock lock(driver().mutex);
  driver().failures[function] = {code, after, times};
}

bool fakeCudaPending(const char* function) {
  const std::scoped_lock lock(driver().mutex);
  const auto found = driver().failures.find(function);
  return found != driver().failures.end() && found->second.times > 0;
}

void fakeCudaBreakDuringWork(unsigned after) {
  const std::scoped_lock lock(driver().mutex);
  driver().break_after = static_cast<int>(after);
}

int fakeCudaFill(std::uint64_t device, std::size_t bytes, unsigned char value, void* handle) {
  Stream* stream = nullptr;
  {
    const std::scoped_lock lock(driver().mutex);
    stream = stream_locked(handle);
    if (stream == nullptr) return kInvalidHandle;
  }
  stream->add([device, bytes, value] {
    work_on(device, bytes, false, nullptr,
            [bytes, value](std::byte* memory) { std::memset(memory, value, bytes); });
  });
  return kSuccess;
}

void fakeCudaPeek(void* target, std::uint64_t device, std::size_t bytes) {
  const std::scoped_lock lock(driver().mutex);
  const std::byte* memory = shadow_locked(device, bytes);
  if (memory == nullptr) std::abort();
  std::memcpy(target, memory, bytes);
}

void fakeCudaPoke(std::uint64_t device, const void* source, std::size_t bytes) {
  const std::scoped_lock lock(driver().mutex);
  std::byte* memory = shadow_locked(device, bytes);
  if (memory == nullptr) std::abort();
  std::memcpy(memory, source, bytes);
}

void* fakeCudaShadow(std::uint64_t device) {
  const std::scoped_lock lock(driver().mutex);
  return shadow_locked(device, 1);
}

const char* fakeCudaComplaints() {
  thread_local std::string copy;
  const std::scoped_lock lock(driver().mutex);
  copy = driver().complaints;
  return copy.c_str();
}

std::uint64_t fakeCudaPageableCopies() {
  const std::scoped_lock lock(driver().mutex);
  return driver().pageable;
}

std::uint64_t fakeCudaCopies() {
  const std::scoped_lock lock(driver().mutex);
  return driver().copies;
}

std::uint64_t fakeCudaAwaited(void* stream) {
  const std::scoped_lock lock(driver().mutex);
  const auto found = driver().awaited.find(stream);
  return found == driver().awaited.end() ? 0 : found->second;
}

std::uint64_t fakeCudaLive(const char* what) {
  const std::string name = what;
  if (name == "files" || name == "direct memory") return fake::live_in_cufile(name);
  const std::scoped_lock lock(driver().mutex);
  if (name == "allocations") return driver().allocations.size();
  if (name == "streams") return driver().streams.size();
  if (name == "events") return driver().events.size();
  if (name == "registrations") return driver().registered.size();
  std::abort();
}
}
// NOLINTEND(readability-identifier-naming)
