// The Python class Faults.
#pragma once

#include <memory>
#include <vector>

#include "trunkline/fault.h"

namespace trunkline::python {

struct FaultsObject {
  FaultsObject();

  // Releases the commands that are held in any engine of the process, so that its operations can end. In a
  // forked child not those of the parent's engines: a thread that the child does not have may hold their
  // locks.
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
