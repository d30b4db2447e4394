// The tunings that an engine follows, by the paths of its files.
#pragma once

#include <sys/types.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tuning/tuning.h"

namespace trunkline::tuning {

// Thread-safe. Never fails: what cannot be read or determined is logged, and counts as not tuned.
class TuningTable {
 public:
  // Reads the user's tunings (tuning_store.h) and keeps those of this machine; of none where they are off.
  static std::shared_ptr<const TuningTable> load();
  explicit TuningTable(std::vector<Tuning> tunings, std::string problem = {});

  bool empty() const { return tunings_.empty(); }

  // Why there are none, if not because nothing was tuned: off, a damaged file, another machine's.
  const std::string& problem() const { return problem_; }

  // The tuning of exactly the filesystems and devices of `paths`: existing files or directories, or files in
  // existing directories. Costs a stat() of each path once their filesystems are known, and nothing where
  // there are no tunings.
  const Tuning* find(std::span<const std::string> paths) const;

  // The same for one file that is open: costs an fstat() once its filesystem is known.
  const Tuning* find_open(int fd, const std::string& path) const;

  // A tuning of `path` together with others, as the directories of a volume.
  const Tuning* find_shared(const std::string& path) const;

  // What all tunings agree on of the settings that only the creation of an engine can follow: backend, lanes
  // and queue depth. None of them where they differ.
  Settings agreed() const;

 private:
  // nullptr where it cannot be determined. Stays valid.
  const Storage* storage_of(dev_t device, const std::string& path) const;
  const Tuning* find_storages(std::vector<Storage> storages) const;

  const std::vector<Tuning> tunings_;
  const std::string problem_;
  mutable std::mutex mutex_;
  mutable std::map<dev_t, std::optional<Storage>> storages_;  // by st_dev; nullopt: cannot be determined
};

}  // namespace trunkline::tuning
