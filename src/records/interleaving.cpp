#include "records/interleaving.h"

#include <algorithm>

namespace trunkline::records {

Interleaving::Interleaving(const InterleavingOptions& options, std::uint64_t samples)
    : file_samples_(options.file_samples), chunk_(options.chunk) {
  const std::uint64_t all = file_samples_ == 0 ? 0 : samples / file_samples_;
  files_ = std::min(options.files, all);
  if (files_ < 2) {
    files_ = 0;
    return;
  }
  shortest_run_ = all / files_;
  longer_runs_ = all % files_;
}

std::uint64_t Interleaving::operator()(std::uint64_t position) const {
  if (files_ == 0) return position;
  const std::uint64_t group_samples = files_ * file_samples_;
  const std::uint64_t group = position / group_samples;
  // After the whole groups: what the longer runs have left, then the samples after the last whole file.
  const std::uint64_t side_by_side = group < shortest_run_ ? files_ : longer_runs_;
  const std::uint64_t within = position - group * group_samples;
  if (within >= side_by_side * file_samples_) return position;
  const Place place = place_in(within, side_by_side);
  const std::uint64_t run_begin = place.file * shortest_run_ + std::min(place.file, longer_runs_);
  return (run_begin + group) * file_samples_ + place.sample;
}

Interleaving::Place Interleaving::place_in(std::uint64_t position, std::uint64_t files) const {
  const std::uint64_t rounds = file_samples_ / chunk_;
  const std::uint64_t round = std::min(position / (files * chunk_), rounds);
  const std::uint64_t chunk = round < rounds ? chunk_ : file_samples_ % chunk_;  // the last may be shorter
  const std::uint64_t within = position - round * files * chunk_;
  return {.file = within / chunk, .sample = round * chunk_ + within % chunk};
}

}  // namespace trunkline::records
