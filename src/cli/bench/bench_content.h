// What benchmark files hold, and how it is verified.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "cli/bench/bench_files.h"
#include "cli/bench/pattern.h"
#include "cli/bench/transfer_ring.h"

namespace trunkline::cli {

// Of writes: the pattern of this seed.
Content made_content(std::uint64_t seed);

// The pattern that a piece of a file must have.
using ExpectedPattern = std::function<Pattern(std::size_t file, const Piece&)>;

// Of reads: fails with `corrupt`, naming the first wrong byte. `files` must outlive it.
Content checked_content(const std::vector<BenchFile>& files, ExpectedPattern expected);

// The first for pieces that are written, the second for those that are read.
Content mixed_content(Content written, Content read);

}  // namespace trunkline::cli
