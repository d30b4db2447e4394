// The names under which files are written before they get their own, and which of them nobody writes any
// more.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "os/file_lock.h"
#include "os/unique_fd.h"

namespace trunkline::os {

// A path in `directory` that is most likely free: ".trunkline-<16 hex digits>.tmp".
std::string temporary_name(const std::string& directory);

// Whether temporary_name() gives names like this one.
bool is_temporary_name(std::string_view name);

// Tells others that this process writes a temporary file, from its creation until it has its own name or is
// gone: a lock on the open file. The kernel ends it with the process, however that dies.
class WriterClaim {
 public:
  // `fd` is open for writing, and stays open until the claim ends. Where the filesystem has no locks there is
  // no claim, and nobody removes anything there either.
  explicit WriterClaim(int fd);

  // Between creation and claim the file looks like that of a dead writer: who removes those has it. Leave it
  // to him, and begin anew under another name.
  bool lost() const { return lost_; }

 private:
  FileLock lock_;
  bool lost_;
};

// The claim of a writer that died, taken over by who removes its file. Everything that removes temporary
// files asks for it first: whatever lock it holds otherwise, the writer may be another process that has none.
class DeadWriter {
 public:
  // Nothing where `path` is not a file, its writer lives, or nobody can tell: on filesystems that other
  // machines may have mounted, a lock that can be taken excludes no one.
  static std::unique_ptr<DeadWriter> find(const std::string& path);
  // The same of a name in an open directory.
  static std::unique_ptr<DeadWriter> find(int directory, const char* name);

 private:
  explicit DeadWriter(UniqueFd fd);

  UniqueFd fd_;
  FileLock lock_;  // while it is held nobody writes the file, and nobody gives its name to another
};

// Removes the temporary files in `directory` whose writers died. Nothing is said of what cannot be removed,
// or looked at: it is in nobody's way. Only on filesystems of this machine, where a lock excludes every
// writer.
void remove_dead_temporary_files(const std::string& directory);

}  // namespace trunkline::os
