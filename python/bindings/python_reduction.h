// A reduction over ranks that Python carries out, such as that of MPI.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>

#include "workload/collective_barrier.h"

namespace trunkline::python {

// Calls `begin(value)` and `poll()` of a Python object; poll() returns None or the largest value. To be
// called without the GIL, but for the constructor, raise_pending() and the destructor.
class PythonReduction final : public workload::MaxReduction {
 public:
  explicit PythonReduction(const nanobind::object& reduction);

  Result<void> begin(std::int64_t value) override;
  Result<std::optional<std::int64_t>> poll() override;

  // Raises what the object raised in the call that failed, if one did: also KeyboardInterrupt.
  void raise_pending();

 private:
  Error keep_exception();

  nanobind::object begin_;
  nanobind::object poll_;
  std::exception_ptr exception_;
};

}  // namespace trunkline::python
