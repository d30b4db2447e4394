// Memory of a chosen alignment, and bytes that differ at every position.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "trunkline/memory.h"

namespace trunkline::test {

// `bytes` of memory that starts `misalignment` past a page boundary.
class TestMemory {
 public:
  explicit TestMemory(std::size_t bytes, std::size_t misalignment = 0)
      : storage_(bytes + 2 * 4096), bytes_(bytes) {
    const auto address = reinterpret_cast<std::uintptr_t>(storage_.data());
    start_ = storage_.data() + ((4096 - address % 4096) % 4096) + misalignment;
  }
  std::span<std::byte> span() { return {start_, bytes_}; }
  std::byte* data() { return start_; }
  std::size_t size() const { return bytes_; }
  MemoryView view() { return {start_, bytes_}; }

 private:
  std::vector<std::byte> storage_;
  std::size_t bytes_;
  std::byte* start_;
};

inline void fill_random(std::span<std::byte> bytes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  while (!bytes.empty()) {
    const std::uint64_t value = random();
    const std::size_t count = std::min(bytes.size(), sizeof value);
    std::memcpy(bytes.data(), &value, count);
    bytes = bytes.subspan(count);
  }
}

}  // namespace trunkline::test
