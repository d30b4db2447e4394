// The Python class Faults.
#pragma once

#include <memory>
#include <vector>

#include "trunkline/fault.h"

namespace trunkline::python {

struct FaultsObject {
  FaultsObject();

  // Releases what is held in any engine of the process, so that its operations can be finished.
  static void release_all();

  std::shared_ptr<Faults> faults;

 private:
  static std::vector<std::weak_ptr<Faults>>& registry();
};

}  // namespace trunkline::python
