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
  bool own = false;                  // made by this run
  bool complete = false;             // every block holds data
  std::optional<Pattern> pattern{};  // of the content, where it is known
};

// What the paths of the options are. Fails with invalid_argument on a path that is neither directory nor
// regular file, and on writing to an existing file.
class BenchFiles {
 public:
  static Result<BenchFiles> find(const BenchOptions& options);
  BenchFiles(BenchFiles&&) = default;
  BenchFiles& operator=(BenchFiles&&) = delete;
  ~BenchFiles();  // removes its own files unless they are kept

  std::vector<BenchFile>& all() { return files_; }
  const std::vector<BenchFile>& all() const { return files_; }
  bool existing() const { return existing_; }  // any of the files was there before
  std::uint64_t total_bytes() const;

  // Whether the filesystems have room for the run's own files; the message says how much is missing where.
  Status check_space() const;

  static Status create_empty(BenchFile& file);  // exclusively: what has the name is not touched
  static Status remove(BenchFile& file);        // fine when it is not there
  static Status preallocate(BenchFile& file);   // reserves all blocks of a new file, durably
  static Status drop_page_cache(const BenchFile& file);

  void keep() { keep_ = true; }

 private:
  BenchFiles() = default;

  std::vector<BenchFile> files_;
  bool existing_ = false;
  bool keep_ = false;
};

}  // namespace trunkline::cli
