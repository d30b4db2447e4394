// How tests steer the stand-in for the CUDA driver (fake_cuda.cpp), beside the driver's own functions.
#pragma once

#include <cstddef>
#include <cstdint>

// Names are those of the driver, and like them.
// NOLINTBEGIN(readability-identifier-naming)
extern "C" {

// The stand-in has two devices. Settings as at the start, counters and complaints at zero; what is allocated
// stays.
void fakeCudaReset();

// Each copy and each fill takes this long on its stream.
void fakeCudaDelay(unsigned microseconds);
// The same with a random time below this.
void fakeCudaDelayUpTo(unsigned microseconds);

// What is added to a stream after this waits for fakeCudaRelease(); so does every copy that has not begun.
void fakeCudaHold(void* handle);
void fakeCudaHoldCopies();
void fakeCudaRelease();

// A CUDA graph is captured on this stream, in the global mode; null: no longer.
void fakeCudaCapture(void* stream);

// From the call after `after` others on, `times` calls of `function` ("cuMemcpyHtoDAsync_v2") fail with
// `code`.
void fakeCudaFail(const char* function, int code, unsigned after, unsigned times);

// Whether a failure that was set is still to come.
bool fakeCudaPending(const char* function);

// A copy or fill that begins after `after` others on any stream breaks the device: from then on events report
// an error (700, an illegal address), as do all calls. Until fakeCudaReset().
void fakeCudaBreakDuringWork(unsigned after);

// Work of a kernel: fills device memory with a pattern on a stream.
int fakeCudaFill(std::uint64_t device, std::size_t bytes, unsigned char value, void* handle);

// Looks at and changes device memory at once, past all streams.
void fakeCudaPeek(void* target, std::uint64_t device, std::size_t bytes);
void fakeCudaPoke(std::uint64_t device, const void* source, std::size_t bytes);

// Where the bytes of device memory can be touched, for tests that compute with them.
void* fakeCudaShadow(std::uint64_t device);

// What no driver could accept: empty, or lines of text. Valid until the next call on this thread.
const char* fakeCudaComplaints();

// Copies between the device and host memory that was not registered.
std::uint64_t fakeCudaPageableCopies();
std::uint64_t fakeCudaCopies();
// Still there: allocations, streams, events, registrations of host memory; "files" and "direct memory" that
// cuFile was told of.
std::uint64_t fakeCudaLive(const char* what);

// How cuFile's stand-in behaves: 0 as where DMA reaches the storage; 1 in its compatibility mode; 2 the same,
// while it says the other; 3 as 0, but the bytes are wrong; 4 as 0, but nothing is read; 5 and 6 as 2, by
// io_uring and by Linux AIO.
void fakeCufileMode(int mode);

// From the transfer after `after` others on, `times` of them report `moved` bytes, and move as many at most.
void fakeCufileResult(long moved, unsigned after, unsigned times);

// Transfers, and those of them with memory that was not registered.
std::uint64_t fakeCufileTransfers();
std::uint64_t fakeCufileUnregistered();

int cuMemAlloc_v2(std::uint64_t* device, std::size_t bytes);
int cuMemFree_v2(std::uint64_t device);
int cuStreamCreate(void** stream, unsigned flags);
int cuStreamDestroy_v2(void* handle);
int cuStreamSynchronize(void* handle);
int cuDevicePrimaryCtxRetain(void** context, int device);
int cuCtxPushCurrent_v2(void* context);
int cuCtxPopCurrent_v2(void** context);
}
// NOLINTEND(readability-identifier-naming)
