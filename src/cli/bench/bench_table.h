// The results of a benchmark for people.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace trunkline::cli {

// Of what bench_json() made, so that both say the same.
std::string bench_table(const nlohmann::ordered_json& document);

}  // namespace trunkline::cli
