// Several directories, each on its own disk, used as one: files are striped over all of them, without root
// and without RAID.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "trunkline/file.h"

namespace trunkline {

struct VolumeOptions {
  std::uint64_t stripe_bytes = 1ULL << 20;  // stripe unit of new files: a multiple of 4096, 4 KiB .. 1 GiB
};

// A file NAME of a volume of k directories consists of its members NAME.0 .. NAME.k-1, one in each directory,
// and a descriptor NAME.stripe beside each (docs/formats/stripe.md). Thread-safe.
class Volume {
 public:
  // Directories must exist, be distinct, and keep their order between uses (descriptors check it).
  static Result<Volume> create(std::vector<std::string> directories, const VolumeOptions& options = {});

  // A File like any other. `corrupt` when a member is missing, belongs to another file, or has a size that
  // does not fit the others; `format` when a descriptor is invalid or of a newer version. `name` is a plain
  // file name.
  Result<File> open(const Engine& engine, const std::string& name, const OpenOptions& options = {}) const;
  Result<File> open(const std::string& name, const OpenOptions& options = {}) const;  // on the default engine

  // Removes members and descriptors, including what is left of a partly removed file. system (ENOENT) when
  // there is nothing of that name.
  Status remove(const std::string& name) const;

  // Names of striped files, sorted: those that have a descriptor in any of the directories.
  Result<std::vector<std::string>> list() const;

  // Absolute paths: relative ones were resolved against the working directory when the volume was created.
  const std::vector<std::string>& directories() const { return directories_; }
  std::uint64_t stripe_bytes() const { return options_.stripe_bytes; }

 private:
  Volume(std::vector<std::string> directories, const VolumeOptions& options)
      : directories_(std::move(directories)), options_(options) {}

  std::vector<std::string> directories_;
  VolumeOptions options_;
};

}  // namespace trunkline
