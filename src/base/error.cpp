#include "trunkline/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

namespace trunkline {
namespace {

struct Hint {
  int code;
  std::string_view text;
};

// What the errno's own text, which precedes it, does not say: the likely cause in an I/O library, and what to
// try next.
constexpr std::array kHints{
    Hint{ENOSPC,
         "the filesystem is full (of bytes or of inodes), see df and df -i; free some or write elsewhere"},
    Hint{EDQUOT,
         "the quota of this user, group or project is used up, see quota; free some or write elsewhere"},
    Hint{EIO, "the device or the network storage reported it, see dmesg and the device's health (smartctl)"},
    Hint{EBADF,
         "the file was not opened for this, or was closed while in use; check the mode it was opened with"},
    Hint{EINVAL,
         "the kernel rejected an argument; with direct I/O it is usually the alignment: try without direct "
         "I/O"},
    Hint{EACCES, "check the permissions of the file and of every directory above it, for this user"},
    Hint{EPERM,
         "the kernel does not allow it for this process: an immutable file, a security policy (seccomp, LSM) "
         "or a "
         "missing capability; check lsattr and the container's profile"},
    Hint{EROFS, "remount it writable or use another path"},
    Hint{ENOENT, "check the path; a directory in it may be what is missing"},
    Hint{EEXIST, "remove it first, or use another name; opening a file with \"w\" replaces it"},
    Hint{EMFILE, "this process is at its limit of open files; raise it (ulimit -n) or close some"},
    Hint{ENFILE, "the machine is at its limit of open files; raise fs.file-max or close some"},
    Hint{ENOMEM,
         "memory or a limit on it (memlock, cgroup) is used up; see ulimit -l and the container's limits, or "
         "use smaller buffers"},
    Hint{EFBIG, "the file would exceed the largest size that the filesystem or ulimit -f allows"},
    Hint{EISDIR, "name a file in it"},
    Hint{ENOTDIR, "a part of the path is a file; check the path"},
    Hint{ENAMETOOLONG, "shorten the path or the longest name in it"},
    Hint{ELOOP, "the path leads through too many symbolic links; check for a loop"},
    Hint{ENOTEMPTY, "remove what it holds, or use another"},
    Hint{EXDEV,
         "the two paths are on different filesystems; on overlayfs (a container), directories of the image "
         "cannot be renamed: copy them first"},
    Hint{EBUSY, "something else is using it; see lsof and mount"},
    Hint{ETXTBSY, "the file is a program that is running"},
    Hint{ENODEV, "the device is gone or does not support this; see lsblk and dmesg"},
    Hint{ENXIO, "the device is gone or does not support this; see lsblk and dmesg"},
    Hint{ENOTCONN, "the network filesystem lost it; remount and open again"},
    Hint{ESTALE, "the network filesystem lost it; remount and open again"},
    Hint{ETIMEDOUT, "the storage did not answer in time; see dmesg and the network"},
    Hint{ENOSYS, "this kernel lacks the system call, or a sandbox hides it; see trunkline doctor"},
    Hint{EOPNOTSUPP, "the filesystem or device does not support this; see trunkline doctor"},
    Hint{EAGAIN, "try again, or with fewer concurrent operations"},
    Hint{ESPIPE, "it is a pipe or socket, which has no offsets; use a regular file or a block device"},
    Hint{EFAULT,
         "the memory handed in is not mapped (or not writable) in this process; was it freed too early?"},
};

std::string_view hint(int code) {
  const auto* const found = std::ranges::find(kHints, code, &Hint::code);
  return found == kHints.end() ? std::string_view() : found->text;
}

// "No such file or directory" begins with a small letter there; "RPC version wrong" does not.
std::string within_sentence(std::string text) {
  const auto is_upper = [](char letter) { return letter >= 'A' && letter <= 'Z'; };
  if (text.size() > 1 && is_upper(text[0]) && !is_upper(text[1]))
    text[0] = static_cast<char>(text[0] - 'A' + 'a');
  return text;
}

}  // namespace

std::string errno_name(int code) {
  const char* name = strerrorname_np(code);
  return code != 0 && name != nullptr ? std::string(name) : fmt::format("errno {}", code);
}

std::string errno_reason(int code) {
  // strerrordesc_np rather than strerror: thread-safe, and the same text in every locale.
  const char* description = strerrordesc_np(code);
  if (code == 0 || description == nullptr) return errno_name(code);
  std::string reason = fmt::format("{} ({})", within_sentence(description), errno_name(code));
  if (const std::string_view next = hint(code); !next.empty()) reason += fmt::format("; {}", next);
  return reason;
}

Error system_error(int code, std::string_view action, std::string_view path) {
  if (code == ENOENT && path.starts_with("/proc/")) {
    return {
        ErrorKind::system, code,
        fmt::format("cannot {}: no such file or directory (ENOENT); mount /proc (mount -t proc proc /proc)",
                    action),
        std::string(path)};
  }
  if (std::error_code error; code == ENOENT && !path.empty() && !path.starts_with('/')) {
    const std::string current = std::filesystem::current_path(error).string();
    if (!error) {
      return {
          ErrorKind::system, code,
          fmt::format("cannot {}: no such file or directory (ENOENT); check the path (the current directory "
                      "is {})",
                      action, current),
          std::string(path)};
    }
  }
  return {ErrorKind::system, code, fmt::format("cannot {}: {}", action, errno_reason(code)),
          std::string(path)};
}

Error make_error(ErrorKind kind, std::string message, std::string_view path) {
  // The errno that fits the kind, for callers that know only errno (Python's OSError).
  int code = 0;
  switch (kind) {
    case ErrorKind::invalid_argument:
      code = EINVAL;
      break;
    case ErrorKind::unsupported:
      code = EOPNOTSUPP;
      break;
    case ErrorKind::cancelled:
      code = ECANCELED;
      break;
    case ErrorKind::timed_out:
      code = ETIMEDOUT;
      break;
    case ErrorKind::out_of_budget:
      code = ENOMEM;
      break;
    case ErrorKind::closed:
      code = EBADF;
      break;
    case ErrorKind::end_of_file:
      code = ENODATA;
      break;
    case ErrorKind::device:
      code = EIO;
      break;
    case ErrorKind::system:
    case ErrorKind::corrupt:
    case ErrorKind::format:
      break;
  }
  return {kind, code, std::move(message), std::string(path)};
}

std::string_view to_string(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::invalid_argument:
      return "invalid_argument";
    case ErrorKind::system:
      return "system";
    case ErrorKind::end_of_file:
      return "end_of_file";
    case ErrorKind::unsupported:
      return "unsupported";
    case ErrorKind::cancelled:
      return "cancelled";
    case ErrorKind::timed_out:
      return "timed_out";
    case ErrorKind::out_of_budget:
      return "out_of_budget";
    case ErrorKind::corrupt:
      return "corrupt";
    case ErrorKind::format:
      return "format";
    case ErrorKind::device:
      return "device";
    case ErrorKind::closed:
      return "closed";
  }
  return "unknown";
}

}  // namespace trunkline
