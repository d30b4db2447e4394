// The rules that decide whether GPUDirect Storage is used; finding out what a device can do is separate. Pure
// functions.
#pragma once

#include <optional>
#include <string>

#include "device/device.h"
#include "os/file_pair.h"
#include "trunkline/engine.h"

namespace trunkline::io {

// gpu="gds": operations fail where it does not work, instead of being copied through slots.
inline bool is_gds_required(GpuPath path) { return path == GpuPath::gds; }

// What a probe has to show. If gds is required, anything that works will do, even compatibility mode; by
// default an engine uses only what is really direct.
inline GdsProbe gds_probe_for(GpuPath path) {
  return is_gds_required(path) ? GdsProbe::correct_data : GdsProbe::bypasses_host;
}

// Why a file cannot use GPUDirect Storage on any device; nullopt where it may.
std::optional<std::string> why_never_gds(GpuPath path, const os::FilePair& file);

}  // namespace trunkline::io
