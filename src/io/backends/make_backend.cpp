#include "io/backends/backend.h"

namespace trunkline::io {

Result<std::unique_ptr<Backend>> make_backend(BackendKind kind, unsigned depth) {
  switch (kind) {
    case BackendKind::io_uring:
      return make_io_uring_backend(depth);
    case BackendKind::libaio:
      return make_libaio_backend(depth);
    case BackendKind::threads:
      return make_threads_backend(depth);
    case BackendKind::memory:
      return make_memory_backend(depth);
    case BackendKind::automatic:
      break;
  }
  return std::unexpected(make_error(ErrorKind::invalid_argument, "backend: a lane requires a specific one"));
}

}  // namespace trunkline::io
