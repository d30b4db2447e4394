// Which tensors a range of a shard belongs to.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"

namespace trunkline::checkpoint {

class TensorPlaces {
 public:
  explicit TensorPlaces(const Manifest& manifest);

  // Names of the tensors with bytes in [begin, end) of the shard, in the order of their bytes.
  std::vector<std::string> in(std::uint64_t shard, std::uint64_t begin, std::uint64_t end) const;

 private:
  struct Place {
    std::uint64_t begin;
    std::uint64_t end;
    const std::string* name;
  };
  std::vector<std::vector<Place>> shards_;  // by their begin
};

}  // namespace trunkline::checkpoint
