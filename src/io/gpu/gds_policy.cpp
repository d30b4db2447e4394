#include "io/gpu/gds_policy.h"

#include <fmt/format.h>

namespace trunkline::io {

std::optional<std::string> why_never_gds(GpuPath path, const os::FilePair& file) {
  if (path == GpuPath::bounce) return "gpu=\"bounce\" was requested";
  if (!file.limits.usable) return fmt::format("direct I/O is not used: {}", file.limits.why);
  return std::nullopt;
}

}  // namespace trunkline::io
