// The files that a benchmark reads and writes: its own, which it removes, and existing ones, which it only
// reads.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/bench/options.h"
#include "cli/bench/pattern.h"
#include "trunkline/error.h"

namespace trunkline::cli {

struct BenchFile {
  std::string path;
  std::size_t target = 0;  // index in BenchOptions::paths
  std::uint64_t bytes = 0;
  bool own = false;                  // created by this run
  bool complete = false;             // every block holds data
  std::optional<Pattern> pattern{};  // of the content, if known
};

// Classifies the paths in the options. Fails with invalid_argument on a path that is neither a directory nor
// a regular file, on writing to an existing file, and on directories beside existing files.
class BenchFiles {
 public:
  static Result<BenchFiles> find(const BenchOptions& options);
  BenchFiles(BenchFiles&&) = default;
  BenchFiles& operator=(BenchFiles&&) = delete;
  ~BenchFiles();  // removes its own files unless they are kept

  std::vector<BenchFile>& all() { return files_; }
  const std::vector<BenchFile>& all() const { return files_; }
  bool existing() const { return existing_; }  // any of the files existed before
  std::uint64_t total_bytes() const;

  // Checks that the filesystems have room for the run's own files; the message says how much is missing
  // where.
  Status check_space() const;

  static Status create_empty(BenchFile& file);  // O_EXCL: an existing file is not touched
  // Succeeds when it does not exist. Fails on a file that this run did not make.
  static Status remove(BenchFile& file);
  static Status preallocate(BenchFile& file);  // allocates all blocks of a new file, durably
  static Status drop_page_cache(const BenchFile& file);

  void keep() { keep_ = true; }

 private:
  BenchFiles() = default;

  std::vector<BenchFile> files_;
  bool existing_ = false;
  bool keep_ = false;
};

}  // namespace trunkline::cli
