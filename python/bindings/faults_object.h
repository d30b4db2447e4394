// The Python class Faults.
#pragma once

#include <memory>
#include <vector>

#include "trunkline/fault.h"

namespace trunkline::python {

struct FaultsObject {
  FaultsObject();

  // Releases what is held in any engine of the process, so that its operations can be finished. Not in those
  // of a forked child's parent: a thread that the child does not have may hold their locks.
  static void release_all();

  std::shared_ptr<Faults> faults;

 private:
  struct Entry {
    std::weak_ptr<Faults> faults;
    unsigned generation;  // of forks
  };
  static std::vector<Entry>& registry();
};

}  // namespace trunkline::python
