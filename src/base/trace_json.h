// A recording as JSON in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "base/trace.h"

namespace trunkline::trace {

struct JsonOptions {
  // What the file at a path lies on ("/dev/nvme0n1p2"): a counter each shows the bytes in flight.
  std::function<std::string(const std::string& path)> device_of;
};

// Viewers want slices of one track to nest. So what overlaps gets tracks enough that it does not: transfers
// in a group of tracks for each lane, copies in one for each GPU; and operations are asynchronous slices.
void write_json(const Recording& recording, const JsonOptions& options,
                const std::function<void(std::string_view)>& write);

}  // namespace trunkline::trace
