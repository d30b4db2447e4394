#include "io/lane/reads_in_flight.h"

#include <algorithm>

namespace trunkline::io {

InFlightBucket& InFlightBucket::operator+=(const InFlightBucket& other) {
  read_ns += other.read_ns;
  byte_ns += other.byte_ns;
  return *this;
}

ReadsInFlight::ReadsInFlight(std::int64_t now) : start_(now) { sums_.make_room(now, now); }

void ReadsInFlight::add(std::int64_t begin, std::int64_t end, std::uint64_t bytes) {
  begin = std::max(begin, start_);
  if (end <= begin) return;
  sums_.make_room(begin, end);
  sums_.split(begin, end, [bytes](InFlightBucket& bucket, std::int64_t from, std::int64_t to) {
    bucket.read_ns += to - from;
    bucket.byte_ns += static_cast<double>(to - from) * static_cast<double>(bytes);
  });
}

}  // namespace trunkline::io
