// The lock of a directory of checkpoints: whoever holds it alone may change the directory.
#pragma once

#include <memory>
#include <string>

#include "checkpoint/directory_ops.h"
#include "checkpoint/held_directories.h"
#include "checkpoint/store_descriptor.h"
#include "os/file_lock.h"
#include "os/fork_private_fd.h"
#include "os/unique_fd.h"
#include "trunkline/error.h"

namespace trunkline::checkpoint {

// system (EBUSY): somebody saves into the directory.
std::unexpected<Error> busy_directory(const std::string& directory);

// Held for its lifetime, and by the process that acquired it alone: a forked child does not have it. It is
// advisory: where the filesystem has no locks, nobody is kept out. Not thread-safe.
class DirectoryLock {
 public:
  enum class LockFile { create, use_existing };

  // busy_directory() while another holds it. Without LockFile::create the file of the lock may be missing:
  // has_file().
  static Result<std::unique_ptr<DirectoryLock>> acquire(const std::string& directory, LockFile lock_file);

  bool has_file() const { return fd_->valid(); }

  // Not where the filesystem has no locks, and not where another machine may write, whose locks may end
  // there: its shards are debris until their manifest is there.
  bool excludes_every_writer() const;

  // Whether it is still the lock that others meet: without that, what is written may be debris to them, or
  // the directory may be a copy of the one that was locked. A purge of old files may take the file of the
  // lock: as long as no other is in its place nobody has locked, and it is made anew.
  Status check_or_renew();

  // From now on check_with_volumes() notices volumes that are mounted, or moved, in each other's place: the
  // record of whose they are was read before, and what has their names by now may be another directory's.
  // Those that are missing may come: nothing was read of them.
  void hold_volumes(const StoreDescriptor& descriptor);

  // Before anything is removed or moved: the lock, the directory and the volumes.
  Status check_with_volumes();

  // `ops`, each of which fails once check_with_volumes() does. Not to be used after the lock.
  DirectoryOps guarded(const DirectoryOps& ops);

  // So that a purge of old files does not take it from a run that goes on.
  void touch() const;

 private:
  DirectoryLock(const std::string& directory, int flags);
  Status check() const;

  const std::string directory_path_;
  const os::UniqueFd directory_;
  const std::string path_;
  std::unique_ptr<os::ForkPrivateFd> fd_;
  std::unique_ptr<os::FileLock> lock_;  // ends before its descriptor
  HeldDirectories volumes_;
};

}  // namespace trunkline::checkpoint
