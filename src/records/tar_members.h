// Tar archives as WebDataset uses them: ustar, with GNU's long names and pax headers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "records/window_reader.h"
#include "trunkline/error.h"

namespace trunkline::records {

struct TarMember {
  std::string name;
  std::uint64_t begin = 0;  // of its first header
  std::uint64_t data = 0;   // of its data
  std::uint64_t bytes = 0;  // of its data
  unsigned archive = 0;     // which one it is in, of several that were concatenated
  bool is_link = false;     // its data are elsewhere

  std::uint64_t end() const { return data + bytes; }
};

// The name of a sample and of its part: "a/b.seg.png" is part "seg.png" of sample "a/b".
struct SampleName {
  std::string_view key;
  std::string_view extension;
};

// nullopt for names that belong to no sample: without a dot after the first letter of the last component, or
// in "__meta__".
std::optional<SampleName> sample_name(std::string_view name);

// Goes through the regular files and the links in an archive, or in several that were concatenated.
class TarMembers {
 public:
  TarMembers(WindowReader& reader, std::string path) : reader_(reader), path_(std::move(path)) {}

  // The next file; nullopt at the end. After an error no more can be found.
  Result<std::optional<TarMember>> next();

  // Whether the archive that was read last ended with the marker that it must have, rather than with the
  // file.
  bool has_end_marker() const { return has_end_marker_; }

  // Where the next header is, or where the last error was found.
  std::uint64_t offset() const { return offset_; }

 private:
  struct Extended;  // what headers before the member's own say

  Result<bool> read_extended(char type, std::uint64_t bytes, Extended& extended);
  Result<bool> skip_end_marker();
  Error bad_header(std::string_view block) const;
  Error error_at(ErrorKind kind, std::string_view why) const;

  WindowReader& reader_;
  const std::string path_;
  std::uint64_t offset_ = 0;
  unsigned archive_ = 0;
  bool has_end_marker_ = false;
};

}  // namespace trunkline::records
