#include "io/backends/run_command.h"

#include <unistd.h>

#include <cerrno>

namespace trunkline::io {

std::int64_t run_command(const Command& command) {
  const auto offset = static_cast<off_t>(command.offset);
  ssize_t result = 0;
  switch (command.op) {
    case Op::read:
      result = ::pread(command.fd, command.data, command.length, offset);
      break;
    case Op::write:
      result = ::pwrite(command.fd, command.data, command.length, offset);
      break;
    case Op::sync:
      result = ::fsync(command.fd);
      break;
  }
  return result < 0 ? -errno : result;
}

}  // namespace trunkline::io
