// Times as text, in UTC.
#pragma once

#include <ctime>
#include <string>

namespace trunkline {

// "2026-01-31T23:59:59Z": ISO 8601's extended format.
std::string utc_time(std::time_t seconds);

// "20260131T235959Z", its basic format: for names of files, which sort by it and do without colons.
std::string utc_time_for_name(std::time_t seconds);

}  // namespace trunkline
