#include "checkpoint/tensor_places.h"

#include <algorithm>
#include <unordered_set>

namespace trunkline::checkpoint {

TensorPlaces::TensorPlaces(const Manifest& manifest) : shards_(manifest.shards.size()) {
  for (const Tensor& tensor : manifest.tensors) {
    for (const Piece& piece : tensor.pieces) {
      if (piece.bytes > 0)
        shards_[piece.shard].push_back({piece.offset, piece.offset + piece.bytes, &tensor.name});
    }
  }
  for (auto& places : shards_) std::ranges::sort(places, {}, &Place::begin);
}

// Scans all that begin before the end, since pieces may overlap; only called for damaged ranges.
std::vector<std::string> TensorPlaces::in(std::uint64_t shard, std::uint64_t begin, std::uint64_t end) const {
  std::vector<std::string> names;
  std::unordered_set<const std::string*> seen;  // a file of the wrong size may affect a million tensors
  for (const Place& place : shards_[shard]) {
    if (place.begin >= end) break;
    if (place.end > begin && seen.insert(place.name).second) names.push_back(*place.name);
  }
  return names;
}

}  // namespace trunkline::checkpoint
