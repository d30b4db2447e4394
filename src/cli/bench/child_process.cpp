#include "cli/bench/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

#include "cli/interrupt.h"
#include "os/unique_fd.h"

namespace trunkline::cli {
namespace {

constexpr int kTick_ms = 200;  // how quickly an interrupt is noticed

std::string content_of(const os::UniqueFd& file) {
  std::string content(static_cast<std::size_t>(::lseek(file.get(), 0, SEEK_END)), '\0');
  const ssize_t bytes = ::pread(file.get(), content.data(), content.size(), 0);
  content.resize(bytes > 0 ? static_cast<std::size_t>(bytes) : 0);
  return content;
}

// Output goes to memory files, so that no pipe can fill up and nothing must be read while the child runs.
int spawn(const std::vector<std::string>& command, int output, int errors, pid_t& child) {
  std::vector<char*> arguments;
  for (const std::string& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  posix_spawn_file_actions_init(&actions);
  posix_spawnattr_init(&attributes);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, output, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, errors, STDERR_FILENO);
  sigset_t defaults;
  sigemptyset(&defaults);
  sigaddset(&defaults, SIGPIPE);
  posix_spawnattr_setsigdefault(&attributes, &defaults);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF);
  const int code = ::posix_spawnp(&child, arguments[0], &actions, &attributes, arguments.data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  return code;
}

}  // namespace

Result<Finished> run_to_end(const std::vector<std::string>& command) {
  const os::UniqueFd output(::memfd_create("output", MFD_CLOEXEC));
  const os::UniqueFd errors(::memfd_create("errors", MFD_CLOEXEC));
  if (!output.valid() || !errors.valid()) {
    return std::unexpected(system_error(errno, "create memory files for the output of " + command[0]));
  }
  pid_t child = -1;
  if (const int code = spawn(command, output.get(), errors.get(), child); code != 0) {
    return std::unexpected(system_error(code, "run " + command[0]));
  }
  const os::UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, child, 0)));
  bool ended_by_us = false;
  int status = 0;
  while (::waitpid(child, &status, WNOHANG) == 0) {
    if (interrupted() && !ended_by_us) {
      ended_by_us = true;
      ::kill(child, SIGTERM);
    }
    pollfd waiting{.fd = process.get(), .events = POLLIN, .revents = 0};
    ::poll(&waiting, process.valid() ? 1 : 0, process.valid() ? kTick_ms : 10);
  }
  if (interrupted()) return std::unexpected(make_error(ErrorKind::cancelled, "interrupted"));
  return Finished{.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status),
                  .output = content_of(output),
                  .errors = content_of(errors)};
}

}  // namespace trunkline::cli
