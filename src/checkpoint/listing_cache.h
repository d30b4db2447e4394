// What the folders of steps held when they were read, so that those that have not changed are not read again.
#pragma once

#include <sys/stat.h>
#include <time.h>

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

namespace trunkline::checkpoint {

// With thousands of steps, reading all their folders takes most of the time of a small save. A change of a
// folder changes its times, unless another change came within their resolution (up to two seconds, on FAT):
// a folder that changed shortly before it was read is read again. Only for folders on filesystems of this
// machine: others may show times that are out of date. Not thread-safe.
class ListingCache {
 public:
  using Clock = std::function<timespec()>;

  // `clock`: the time that the filesystem gives to what changes now.
  explicit ListingCache(Clock clock = realtime_clock);

  // The commits of a step whose folder is as it was when it was read; nullptr: read it. `status`: of the
  // folder.
  const std::vector<std::uint64_t>* find(std::uint64_t step, const struct stat& status) const;

  // Adds what was read of a folder, `status` of which was queried before that.
  void add(std::uint64_t step, const struct stat& status, const std::vector<std::uint64_t>& commits);

  // Forgets all other steps. `steps`: ascending.
  void retain(const std::vector<std::uint64_t>& steps);

  // How often a folder was read and added.
  std::uint64_t reads() const { return reads_; }

  static timespec realtime_clock();

 private:
  struct Folder {
    struct stat status = {};
    std::vector<std::uint64_t> commits = {};
  };

  Clock clock_;
  std::map<std::uint64_t, Folder> folders_;
  std::uint64_t reads_ = 0;
};

}  // namespace trunkline::checkpoint
