// Whether GPUDirect Storage is used: the rules, apart from finding out what a device can do. Pure.
#pragma once

#include <optional>
#include <string>

#include "device/device.h"
#include "os/file_pair.h"
#include "trunkline/engine.h"

namespace trunkline::io {

// gpu="gds": operations fail where it does not work, instead of being copied through slots.
inline bool is_gds_required(GpuPath path) { return path == GpuPath::gds; }

// What a probe has to show. Who requires it gets what works, be it in compatibility mode; on its own an
// engine uses only what is really direct.
inline GdsProbe gds_probe_for(GpuPath path) {
  return is_gds_required(path) ? GdsProbe::works : GdsProbe::real;
}

// Why a file is out of the question, whatever the device; nothing where it is not.
std::optional<std::string> why_never_gds(GpuPath path, const os::FilePair& file);

}  // namespace trunkline::io
