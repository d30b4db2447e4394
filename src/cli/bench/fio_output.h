// Reads what `fio --output-format=json` prints.
#pragma once

#include <string>
#include <string_view>

#include "cli/bench/measurement.h"
#include "trunkline/error.h"

namespace trunkline::cli {

// Totals over the jobs: bytes are added, the time is that of the longest job, latencies are means weighted by
// count (of percentiles too: fio keeps no histogram here). Fails with `format` when it is no such output,
// `system` when a job reports an error.
Result<FioMeasurement> parse_fio_output(std::string_view json, Op op);

}  // namespace trunkline::cli
