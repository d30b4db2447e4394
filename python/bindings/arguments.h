// Python arguments to C++ values; TypeError and ValueError name the argument that is wrong.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "trunkline/file.h"
#include "trunkline/future.h"

namespace trunkline::python {

// A path of str, bytes or os.PathLike, as os.fsencode encodes it. No NUL bytes.
std::string path_argument(nanobind::handle value, const char* name);
std::vector<std::string> paths_argument(nanobind::handle value, const char* name);

// A whole number of at least 0: an int or what has __index__.
std::uint64_t count_argument(nanobind::handle value, const char* name);

// Bytes: an int, or a str such as "400MB" or "4GiB".
std::uint64_t size_argument(nanobind::handle value, const char* name);

// None gives nullopt.
std::optional<unsigned> optional_count_argument(nanobind::handle value, const char* name, unsigned least = 0,
                                                unsigned most = std::numeric_limits<unsigned>::max());
std::optional<std::uint64_t> optional_size_argument(nanobind::handle value, const char* name);

// Seconds, at least 0; None is without end.
Future::Timeout timeout_argument(nanobind::handle value);

BackendKind backend_argument(nanobind::handle value);

GpuPath gpu_path_argument(nanobind::handle value);

OpenOptions open_options_argument(nanobind::handle mode, nanobind::handle direct);

// "bytes", "torch.Tensor": the type's name as error messages show it.
std::string shown_type(nanobind::handle value);

}  // namespace trunkline::python
