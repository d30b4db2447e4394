// A configuration of DeepSpeed with an `aio` section.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "cli/tune/candidates.h"
#include "trunkline/error.h"

namespace trunkline::cli {

// The section: exactly the keys that DeepSpeed reads (deepspeed/runtime/swap_tensor/aio_config.py of 0.19),
// integers and booleans.
nlohmann::ordered_json deepspeed_aio(const Candidate& candidate);

// Whether export_deepspeed() would reject the file, to be known before measuring for a minute: it exists and
// `merge` is false, or it is not a JSON object.
Status check_export(const std::string& file, bool merge);

// Writes a new file; with `merge`, replaces these keys in the `aio` section of a file that exists, and
// nothing else.
Status export_deepspeed(const std::string& file, bool merge, const Candidate& candidate);

}  // namespace trunkline::cli
