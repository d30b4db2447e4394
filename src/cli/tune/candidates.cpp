#include "cli/tune/candidates.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <random>

#include "trunkline/units.h"

namespace trunkline::cli {
namespace {

constexpr std::array<std::uint64_t, 4> kBlocks{256 * kKiB, kMiB, 4 * kMiB, 16 * kMiB};
constexpr std::array<unsigned, 3> kDepths{8, 32, 128};
constexpr std::array<unsigned, 4> kLanes{1, 2, 4, 8};
// More would only take memory: it is what a disk of 10 GB/s moves in 50 ms.
constexpr std::uint64_t kMostInFlight = 512 * kMiB;
// Lanes share the copying of bytes, which ends where the cores do; waiting needs fewer.
constexpr unsigned kLanesForEachCore = 2;

bool makes_sense(const Candidate& candidate, const Choices& choices) {
  if (candidate.lanes > kLanesForEachCore * choices.cores) return false;
  if (candidate.bytes_in_flight() > kMostInFlight) return false;
  if (candidate.direct) return choices.can_be_direct;
  // Through the page cache no piece exceeds 1 MiB, and libaio waits for each in turn.
  return candidate.block_bytes <= kMiB && candidate.backend != BackendKind::libaio;
}

}  // namespace

std::vector<Candidate> candidates(const Choices& choices) {
  std::vector<Candidate> all{choices.defaults};
  for (const BackendKind backend : choices.backends) {
    for (const unsigned lanes : kLanes) {
      for (const unsigned depth : kDepths) {
        for (const std::uint64_t block : kBlocks) {
          for (const bool direct : {true, false}) {
            const Candidate candidate{backend, lanes, depth, block, direct};
            if (makes_sense(candidate, choices) && candidate != choices.defaults) all.push_back(candidate);
          }
        }
      }
    }
  }
  std::mt19937 random(1);  // NOLINT(bugprone-random-generator-seed,cert-msc51-cpp): the same each time
  std::shuffle(all.begin() + 1, all.end(), random);
  return all;
}

unsigned distance(const Candidate& a, const Candidate& b) {
  return static_cast<unsigned>(a.backend != b.backend) + static_cast<unsigned>(a.lanes != b.lanes) +
         static_cast<unsigned>(a.queue_depth != b.queue_depth) +
         static_cast<unsigned>(a.block_bytes != b.block_bytes) + static_cast<unsigned>(a.direct != b.direct);
}

Point point_of(const Candidate& candidate) {
  constexpr double kPerDoubling = 0.35;
  const auto doublings = [](std::uint64_t value) { return std::log2(static_cast<double>(value)); };
  // Threads block in system calls, libaio in some; io_uring is the farthest from threads.
  const double backend = candidate.backend == BackendKind::io_uring ? 0
                         : candidate.backend == BackendKind::libaio ? 0.7
                                                                    : 1.4;
  return {backend, kPerDoubling * doublings(candidate.lanes), kPerDoubling * doublings(candidate.queue_depth),
          kPerDoubling * doublings(candidate.block_bytes), candidate.direct ? 0.0 : 1.5};
}

tuning::Settings settings_of(const Candidate& candidate, const Candidate& defaults) {
  if (candidate == defaults) return {};
  tuning::Settings settings{.backend = candidate.backend,
                            .lanes = candidate.lanes,
                            .queue_depth = candidate.queue_depth,
                            .block_bytes = candidate.block_bytes};
  if (candidate.direct != defaults.direct) settings.direct = candidate.direct;
  return settings;
}

}  // namespace trunkline::cli
