// The settings among which `trunkline tune` chooses.
#pragma once

#include <cstdint>
#include <vector>

#include "cli/tune/gain_model.h"
#include "tuning/tuning.h"

namespace trunkline::cli {

// All settings of an engine and its files, none left open.
struct Candidate {
  BackendKind backend = BackendKind::threads;
  unsigned lanes = 1;
  unsigned queue_depth = 1;
  std::uint64_t block_bytes = 0;
  bool direct = true;

  bool operator==(const Candidate&) const = default;
  std::uint64_t bytes_in_flight() const { return block_bytes * lanes * queue_depth; }
};

// What there is to choose from on this machine and these paths.
struct Choices {
  Candidate defaults = {};
  std::vector<BackendKind> backends = {};  // that work
  unsigned cores = 1;
  bool can_be_direct = true;
};

// All combinations that make sense, the defaults first; the others in an order without a pattern, the same
// each time, so that any number of the first ones is a fair sample.
std::vector<Candidate> candidates(const Choices& choices);

// In how many settings they differ.
unsigned distance(const Candidate& a, const Candidate& b);

// Where it is among all settings, for predictions: coordinates 1 apart are rather unlike.
Point point_of(const Candidate& candidate);

// What is kept of a candidate: nothing where it is the defaults, which later versions may improve.
tuning::Settings settings_of(const Candidate& candidate, const Candidate& defaults);

}  // namespace trunkline::cli
