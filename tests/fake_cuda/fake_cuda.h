// How tests control the fake CUDA driver (fake_cuda.cpp), besides the driver's own functions.
#pragma once

#include <cstddef>
#include <cstdint>

// Names follow the driver's conventions.
// NOLINTBEGIN(readability-identifier-naming)
extern "C" {

// Resets all settings, and clears counters and complaints; allocations stay.
void fakeCudaReset();

// Each copy and each fill takes this long on its stream.
void fakeCudaDelay(unsigned microseconds);
// The same with a random time below this.
void fakeCudaDelayUpTo(unsigned microseconds);

// What is added to a stream after this waits for fakeCudaRelease(); so does every copy that has not started.
void fakeCudaHold(void* handle);
void fakeCudaHoldCopies();
void fakeCudaRelease();

// A CUDA graph is being captured on this stream, in the global mode; null: capture ends.
void fakeCudaCapture(void* stream);

// After `after` further calls of `function` ("cuMemcpyHtoDAsync_v2"), the next `times` calls fail with
// `code`.
void fakeCudaFail(const char* function, int code, unsigned after, unsigned times);

// Whether an injected failure is still to come.
bool fakeCudaPending(const char* function);

// The copy or fill that starts after `after` others on any stream breaks the device: from then on events
// report an error (700, an illegal address), as do all calls. Lasts until fakeCudaReset().
void fakeCudaBreakDuringWork(unsigned after);

// The work of a kernel: fills device memory with a pattern on a stream.
int fakeCudaFill(std::uint64_t device, std::size_t bytes, unsigned char value, void* handle);

// Accesses device memory immediately, bypassing all streams.
void fakeCudaPeek(void* target, std::uint64_t device, std::size_t bytes);
void fakeCudaPoke(std::uint64_t device, const void* source, std::size_t bytes);

// Where the bytes of device memory can be accessed, for tests that compute with them.
void* fakeCudaShadow(std::uint64_t device);

// Calls that no real driver would accept: empty, or lines of text. Valid until the next call on this thread.
const char* fakeCudaComplaints();

// Copies between the device and unregistered host memory.
std::uint64_t fakeCudaPageableCopies();
std::uint64_t fakeCudaCopies();
// How often other streams were told to wait for a point in this one.
std::uint64_t fakeCudaAwaited(void* stream);
// How many still exist: allocations, streams, events, registrations of host memory; "files" and "direct
// memory" registered with cuFile.
std::uint64_t fakeCudaLive(const char* what);

// How the fake cuFile behaves: 0: DMA reaches the storage; 1: compatibility mode; 2: compatibility mode, but
// it reports the opposite; 3: like 0, but the bytes are wrong; 4: like 0, but nothing is read; 5 and 6: like
// 2, using io_uring and Linux AIO.
void fakeCufileMode(int mode);

// After `after` further transfers, the next `times` transfers report `moved` bytes, and move at most that
// many.
void fakeCufileResult(long moved, unsigned after, unsigned times);

// The number of transfers, and of those with unregistered memory.
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
