// What the bindings of streams and caches of units share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "trunkline/stream.h"

namespace trunkline::python {

namespace nb = nanobind;

using PartArgument =
    std::tuple<std::size_t, std::uint64_t, std::uint64_t, std::uint64_t, std::optional<std::uint32_t>>;
using UnitArgument = std::tuple<std::string, std::uint64_t, std::vector<PartArgument>>;

StreamUnit unit_argument(const UnitArgument& unit);
StreamVerify verify_argument(nb::handle value);
std::vector<File> files_argument(const std::vector<nb::object>& files);

// Memory that units are handed out from, with the buffer protocol; keeps its owner.
struct StreamMemoryObject {
  nb::object owner;
  MemoryView memory;
};

}  // namespace trunkline::python
