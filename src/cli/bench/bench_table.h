// The results of a benchmark as a readable table.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace trunkline::cli {

// Built from the output of bench_json(), so that both report the same.
std::string bench_table(const nlohmann::ordered_json& document);

}  // namespace trunkline::cli
