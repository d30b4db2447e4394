// Parses the output of `fio --output-format=json`.
#pragma once

#include <string>
#include <string_view>

#include "cli/bench/measurement.h"
#include "trunkline/error.h"

namespace trunkline::cli {

// Totals over the jobs: bytes are added, the time is that of the longest job, latencies are averages weighted
// by count (percentiles too, since fio keeps no histogram here). Fails with `format` when the text is not
// such output, and with `system` when a job reports an error.
Result<FioMeasurement> parse_fio_output(std::string_view json, const Case& what);

}  // namespace trunkline::cli
