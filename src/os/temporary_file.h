// The temporary names under which files are written, and how to tell which of them have no writer any more.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "os/file_lock.h"
#include "os/unique_fd.h"

namespace trunkline::os {

// A path in `directory` that is most likely free: ".trunkline-<16 hex digits>.tmp".
std::string temporary_name(const std::string& directory);

// Whether temporary_name() generates names like this one.
bool is_temporary_name(std::string_view name);

// Shows others that this process is writing a temporary file, from the file's creation until it is renamed or
// removed: a lock on the open file. The kernel releases it when the process ends, however it ends.
class WriterClaim {
 public:
  // `fd` is open for writing, and stays open until the claim ends. Where the filesystem does not support
  // locks there is no claim, but nobody removes temporary files there either.
  explicit WriterClaim(int fd);

  // Between creation and claim the file looks like a dead writer's, and someone who removes such files may
  // hold the lock. Leave the file to them, and start over under another name.
  bool lost() const { return lost_; }

 private:
  FileLock lock_;
  bool lost_;
};

// A dead writer's claim, taken over in order to remove its file. Everything that removes temporary files
// acquires this claim first: another lock is not enough, since the writer may be a process that does not use
// it.
class DeadWriter {
 public:
  // nullptr where `path` is not a file, its writer is alive, or that cannot be determined: on filesystems
  // that other machines may have mounted, holding the lock excludes no one.
  static std::unique_ptr<DeadWriter> find(const std::string& path);
  // The same for a name in an open directory.
  static std::unique_ptr<DeadWriter> find(int directory, const char* name);

 private:
  explicit DeadWriter(UniqueFd fd);

  UniqueFd fd_;
  FileLock lock_;  // while it is held nobody writes the file or renames another file to its name
};

// Removes the temporary files in `directory` whose writers died. Files that cannot be examined or removed are
// silently left: they do no harm. Works only on this machine's filesystems, where a lock excludes every
// writer.
void remove_dead_temporary_files(const std::string& directory);

// The same, for callers that come here again and again, such as saves: a directory of many files is listed so
// seldom that the process spends at most a hundredth of its time on that.
void remove_dead_temporary_files_sometimes(const std::string& directory);

}  // namespace trunkline::os
