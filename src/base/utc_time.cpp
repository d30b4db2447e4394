#include "base/utc_time.h"

#include <fmt/format.h>

namespace trunkline {
namespace {

std::tm in_utc(std::time_t seconds) {
  std::tm utc{};
  ::gmtime_r(&seconds, &utc);
  return utc;
}

}  // namespace

std::string utc_time(std::time_t seconds) {
  const std::tm utc = in_utc(seconds);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}Z", utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday,
                     utc.tm_hour, utc.tm_min, utc.tm_sec);
}

std::string utc_time_for_name(std::time_t seconds) {
  const std::tm utc = in_utc(seconds);
  return fmt::format("{:04}{:02}{:02}T{:02}{:02}{:02}Z", utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday,
                     utc.tm_hour, utc.tm_min, utc.tm_sec);
}

}  // namespace trunkline
