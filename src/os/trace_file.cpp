#include "os/trace_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <string>
#include <string_view>
#include <system_error>
#include <tuple>
#include <utility>

#include "base/creation_error.h"
#include "base/trace.h"
#include "base/trace_json.h"
#include "os/fork_generation.h"
#include "os/replaced_file.h"
#include "os/temporary_file.h"
#include "os/topology.h"
#include "os/unique_fd.h"
#include "trunkline/trace.h"

namespace trunkline {
namespace {

constexpr const char* kVariable = "TRUNKLINE_TRACE";

// The file of the trace that is recorded; empty while none is.
struct TraceFile {
  std::mutex mutex;
  unsigned generation = os::fork_generation();
  std::string path;
  bool is_from_environment = false;
};

// Never destroyed: it is used at the exit. A forked child has one of its own.
TraceFile& trace_file() {
  static TraceFile* current = new TraceFile;
  if (current->generation != os::fork_generation()) current = new TraceFile;
  return *current;
}

std::string directory_of(const std::string& path) {
  return std::filesystem::path(path).parent_path().string();
}

Result<os::UniqueFd> create(const std::string& temporary, const os::ReplacedFile& file) {
  const std::string& path = file.path();
  os::UniqueFd fd(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, file.create_mode()));
  if (!fd.valid())
    return std::unexpected(creation_error(
        errno, fmt::format("trace to {}: cannot create a file in {}", path, directory_of(path)), path,
        directory_of(path)));
  return fd;
}

Status write_all(int fd, std::string_view text, const std::string& path) {
  while (!text.empty()) {
    const ssize_t written = ::write(fd, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return std::unexpected(system_error(errno, "write the trace " + path, path));
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  return {};
}

std::string device_of(const std::string& path) {
  const auto location = os::locate(path);
  return location ? location->device : std::string();
}

// Whether the process writes its standard output or its errors to a file: /dev/stdout leads there, too.
bool is_standard_stream(const std::string& path) {
  struct stat file{};
  if (::stat(path.c_str(), &file) != 0) return false;
  const auto leads_there = [&](int fd) {
    struct stat stream{};
    return ::fstat(fd, &stream) == 0 && stream.st_dev == file.st_dev && stream.st_ino == file.st_ino;
  };
  return leads_there(STDOUT_FILENO) || leads_there(STDERR_FILENO);
}

// The file that a trace replaces; fails where open(path, "w") would, for a device or a pipe, and for the file
// that the process's output goes to, which would be lost.
Result<os::ReplacedFile> find_file(const std::string& path) {
  if (is_standard_stream(path))
    return std::unexpected(make_error(
        ErrorKind::unsupported,
        fmt::format(
            "cannot trace to {}: the output of this process goes there, and a trace would replace it; choose "
            "another file",
            path),
        path));
  return os::ReplacedFile::find(path, "trace to " + path);
}

Status write_trace(const trace::Recording& recording, const std::string& given) {
  auto file = find_file(given);
  if (!file) return std::unexpected(file.error());
  const std::string& path = file->path();
  const std::string temporary = os::temporary_name(directory_of(path));
  const auto fd = create(temporary, *file);
  if (!fd) return std::unexpected(fd.error());
  const os::WriterClaim claim(fd->get());  // a save into the directory removes files of dead writers
  Status status;
  trace::write_json(recording, {.device_of = device_of}, [&](std::string_view text) {
    if (status) status = write_all(fd->get(), text, path);
  });
  if (status) {
    if (auto copied = file->copy_attributes_to(fd->get()); !copied) status = std::unexpected(copied.error());
  }
  if (status && ::rename(temporary.c_str(), path.c_str()) != 0)
    status = std::unexpected(system_error(errno, fmt::format("rename {} to {}", temporary, path), path));
  if (!status) ::unlink(temporary.c_str());
  return status;
}

Status start(const std::string& given, bool is_from_environment) {
  if (given.empty() || given.find('\0') != std::string::npos)
    return std::unexpected(
        make_error(ErrorKind::invalid_argument, "path: it is empty or contains a NUL byte"));
  std::error_code failed;
  const std::string path = std::filesystem::absolute(given, failed).string();
  if (failed) return std::unexpected(system_error(failed.value(), "trace to " + given, given));
  const auto replaced = find_file(path);
  if (!replaced) return std::unexpected(replaced.error());
  TraceFile& file = trace_file();
  const std::scoped_lock lock(file.mutex);
  if (!file.path.empty()) {
    return std::unexpected(make_error(
        ErrorKind::invalid_argument,
        fmt::format("cannot trace to {}: a trace to {} is being recorded{}, and there can be one at a time",
                    path, file.path,
                    file.is_from_environment ? fmt::format(" ({})", kVariable) : std::string())));
  }
  // What prevents writing shows now, not when there is something to lose.
  const std::string temporary = os::temporary_name(directory_of(replaced->path()));
  if (const auto created = create(temporary, *replaced); !created) return std::unexpected(created.error());
  ::unlink(temporary.c_str());
  if (!trace::begin())
    return std::unexpected(make_error(ErrorKind::invalid_argument, "a trace is being recorded already"));
  file.path = path;
  file.is_from_environment = is_from_environment;
  return {};
}

void report(const Error& error) {
  const std::string text = fmt::format("trunkline: {}: {}\n", kVariable, error.message);
  std::ignore = ::write(STDERR_FILENO, text.data(), text.size());
}

// "%p" stands for the process id: processes that inherit the variable need files of their own.
std::string with_process_id(std::string path) {
  const std::string id = std::to_string(::getpid());
  for (std::size_t at = path.find("%p"); at != std::string::npos; at = path.find("%p", at + id.size()))
    path.replace(at, 2, id);
  return path;
}

}  // namespace

Status start_trace(const std::string& path) { return start(path, false); }

Result<TraceSummary> stop_trace() {
  TraceFile& file = trace_file();
  const std::scoped_lock lock(file.mutex);
  if (file.path.empty())
    return std::unexpected(make_error(ErrorKind::invalid_argument, "no trace is being recorded"));
  const std::string path = std::exchange(file.path, {});
  const trace::Recording recording = trace::collect();
  if (auto written = write_trace(recording, path); !written) return std::unexpected(written.error());
  return TraceSummary{
      .path = path, .events = recording.events.size(), .dropped_events = recording.dropped_events};
}

namespace os {

void start_trace_from_environment() {
  static std::once_flag once;
  std::call_once(once, [] {
    const char* path = std::getenv(kVariable);  // NOLINT(concurrency-mt-unsafe)
    if (path == nullptr || *path == '\0') return;
    if (auto started = start(with_process_id(path), true); !started) return report(started.error());
    std::atexit(finish_trace_from_environment);
  });
}

void finish_trace_from_environment() {
  {
    TraceFile& file = trace_file();
    const std::scoped_lock lock(file.mutex);
    if (file.path.empty() || !file.is_from_environment) return;
  }
  if (auto stopped = stop_trace(); !stopped) report(stopped.error());
}

}  // namespace os
}  // namespace trunkline
