// The table of an index, as Python passes it to the native readers.
#pragma once

#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "bindings.h"
#include "records/sample_table.h"

namespace trunkline::python {

template <class T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The arrays of a table, which stay alive with it.
struct SampleTableObject {
  Array<std::uint8_t> path_blob;
  std::vector<Array<std::uint64_t>> numbers;
  std::optional<Array<std::int64_t>> mtimes_ns;
  std::shared_ptr<records::SampleTable> table = std::make_shared<records::SampleTable>();

  std::span<const std::uint64_t> keep(const std::optional<Array<std::uint64_t>>& array) {
    if (!array) return {};
    numbers.push_back(*array);
    return {array->data(), array->size()};
  }
};

}  // namespace trunkline::python
