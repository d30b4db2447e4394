// An order in which several files are read side by side.
#pragma once

#include <cstdint>

namespace trunkline::records {

struct InterleavingOptions {
  std::uint64_t file_samples = 0;  // samples of each file; 0: all in their order
  std::uint64_t files = 1;         // side by side
  std::uint64_t chunk = 1;         // consecutive samples of one file, before the next file's turn
};

// A bijection of 0 .. samples - 1, in constant memory. Files that are read side by side are far apart in the
// list of files, which names those of one directory after another: all directories are read at a time.
// Samples after the last whole file come last.
class Interleaving {
 public:
  Interleaving(const InterleavingOptions& options, std::uint64_t samples);

  std::uint64_t operator()(std::uint64_t position) const;

 private:
  // The sample at a position among those of `files` files side by side, as file and sample of it.
  struct Place {
    std::uint64_t file;
    std::uint64_t sample;
  };
  Place place_in(std::uint64_t position, std::uint64_t files) const;

  std::uint64_t file_samples_;
  std::uint64_t chunk_;
  std::uint64_t files_ = 0;  // side by side; 0: nothing is reordered
  // Each of these has a run of consecutive files: the first `longer_runs_` one file more than the others.
  std::uint64_t shortest_run_ = 0;
  std::uint64_t longer_runs_ = 0;
};

}  // namespace trunkline::records
