#include "cli/environment_json.h"

#include <ctime>
#include <optional>

#include "base/utc_time.h"

namespace trunkline::cli {
namespace {

using Json = nlohmann::ordered_json;

template <class Value>
Json or_null(const std::optional<Value>& value) {
  return value ? Json(*value) : Json();
}

}  // namespace

Json environment_json(const os::Environment& environment) {
  return {{"kernel", environment.kernel},
          {"cpu", environment.cpu},
          {"cores", environment.cores},
          {"memory_bytes", environment.memory_bytes},
          {"memory_available_bytes", environment.memory_available_bytes},
          {"memory_limit_bytes", or_null(environment.memory_limit_bytes)},
          {"memlock_soft_bytes", or_null(environment.memlock_soft_bytes)},
          {"memlock_hard_bytes", or_null(environment.memlock_hard_bytes)},
          {"memlock_exempt", environment.memlock_exempt},
          {"huge_pages", environment.huge_pages},
          {"io_uring_disabled", or_null(environment.io_uring_disabled)},
          {"seccomp_filter", environment.seccomp_filter},
          {"container", environment.container}};
}

Json provenance_json(const os::Environment& environment) {
  return {{"trunkline", TRUNKLINE_VERSION},
          {"time", utc_time(std::time(nullptr))},
          {"environment", environment_json(environment)}};
}

}  // namespace trunkline::cli
