// Runs fio for comparison, on the same files.
#pragma once

#include <string>

#include "cli/bench/fio_command.h"
#include "cli/bench/measurement.h"
#include "trunkline/error.h"

namespace trunkline::cli {

class FioPeer {
 public:
  // Finds fio; where it is not installed, fails with unsupported and says how to install it.
  static Result<FioPeer> find();

  const std::string& version() const { return version_; }

  Result<FioMeasurement> measure(const FioJob& job) const;

 private:
  explicit FioPeer(std::string version) : version_(std::move(version)) {}

  std::string version_;
};

}  // namespace trunkline::cli
