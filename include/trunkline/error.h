// The one error type of the library. Nothing throws across its boundary: every operation that can fail
// returns Result<T>, and the Python package turns an Error into one exception family.
#pragma once

#include <cstdint>
#include <expected>
#include <string>
#include <string_view>

namespace trunkline {

enum class ErrorKind {
  invalid_argument,  // the caller's mistake; the message names the argument
  system,            // a system call failed; `code` is its errno
  end_of_file,       // a read reaches past the end of the file
  unsupported,       // this machine, filesystem or build cannot do it; the message says what was tried
  cancelled,         // the operation was cancelled before it was complete
  timed_out,         // the wait ended before the operation, which is still running
  out_of_budget,     // the pinned-memory budget cannot hold the request
  corrupt,           // stored bytes contradict what was recorded about them
  format,            // a file is not in the expected format, or of a newer version
  device,            // a GPU or its driver failed; the message has its error
  closed,            // the file or engine was closed, or belongs to the parent of a fork
};

struct Error {
  ErrorKind kind = ErrorKind::system;
  int code = 0;         // errno value that fits the error, 0 where none does
  std::string message;  // what was being done, to what, why it failed, and what to try next
  std::string path;     // the file concerned, empty where there is none
};

template <class T>
using Result = std::expected<T, Error>;
using Status = Result<void>;

// An Error of a failed system call: "cannot ACTION: no space left on device (ENOSPC); the filesystem is full,
// ...". `action` says what was to be done and to what, for example "write 4096 bytes at 0 of /data/a.bin".
Error system_error(int code, std::string_view action, std::string_view path = {});

Error make_error(ErrorKind kind, std::string message, std::string_view path = {});

// "no space left on device (ENOSPC); the filesystem is full, ...", for messages that begin differently.
std::string errno_reason(int code);

// "EIO" for EIO; "errno 4711" for a number without a name.
std::string errno_name(int code);

std::string_view to_string(ErrorKind kind);

}  // namespace trunkline
