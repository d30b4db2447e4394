// What traces show of transfers and of the operations that they are part of.
#pragma once

#include <cstdint>

#include "base/trace.h"
#include "device/device.h"
#include "io/lane/transfer.h"

namespace trunkline::io {

inline constexpr trace::Kind kQueueWait{"wait for room in the queue", trace::Category::wait};
inline constexpr trace::Kind kSlotWait{"wait for a bounce slot", trace::Category::wait,
                                       trace::Kind::Fields::bytes};
inline constexpr trace::Kind kOperationWait{"wait for the operation", trace::Category::wait};
inline constexpr trace::Kind kCopyIn{"copy into the slot", trace::Category::copy, trace::Kind::Fields::bytes};
inline constexpr trace::Kind kCopyOut{"copy out of the slot", trace::Category::copy,
                                      trace::Kind::Fields::bytes};

// A command that ended at `now`: from submitted_ns, with what the kernel returned. The last one of a transfer
// has the bytes of its payload, as the engine's statistics count them; those that are sent again have none.
void trace_command(const Transfer& transfer, const Outcome& outcome, std::int64_t result, std::uint64_t now);

// The same of GPUDirect Storage, which moved so many bytes of the payload.
void trace_gds(const Transfer& transfer, std::uint64_t bytes, std::int64_t result);

// A copy between a slot and the memory of a device, from `start_ns` until now.
void trace_copy(const Transfer& transfer, std::uint64_t start_ns);

// An operation, from `start_ns` until now.
trace::Event operation_event(Op op, std::uint64_t start_ns, trace::ThreadNumber caller);

}  // namespace trunkline::io
