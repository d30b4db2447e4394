// The files of a data set that are open: some of them, those that were used last.
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>

#include "records/sample_table.h"
#include "trunkline/file.h"
#include "trunkline/volume.h"

namespace trunkline::records {

// For use by one thread.
class OpenFiles {
 public:
  // Files of `volume` where one is given, else paths.
  OpenFiles(Engine engine, std::shared_ptr<const SampleTable> table, std::optional<Volume> volume);

  // How many stay open.
  std::size_t capacity() const { return capacity_; }

  // Opens those that are not open on several threads: what a disk takes to find a file passes at the same
  // time for many. open() returns them, or what failed, until the next call.
  void open_ahead(std::span<const std::uint32_t> files);

  // Fails with `corrupt` where the file is not the one that was indexed: another size, time or inode.
  Result<File> open(std::uint32_t file);

  // Whether a file that is open still is the one that was indexed; `corrupt` if not. Thread-safe.
  Status check_unchanged(const File& opened, std::uint32_t file) const;

 private:
  using Entry = std::pair<std::uint32_t, File>;

  Result<File> open_now(std::uint32_t file) const;

  Engine engine_;
  std::shared_ptr<const SampleTable> table_;
  std::optional<Volume> volume_;
  std::size_t capacity_;
  std::list<Entry> entries_;  // the one used last is first
  std::unordered_map<std::uint32_t, std::list<Entry>::iterator> by_file_;
  std::unordered_map<std::uint32_t, Result<File>> ahead_;
};

}  // namespace trunkline::records
