// What a scan of a file finds.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "trunkline/error.h"

namespace trunkline::records {

struct Skipped {
  std::uint64_t offset;  // of what is damaged, in the file
  std::string reason;
};

struct Ranges {
  std::vector<std::uint64_t> offsets;  // ascending
  std::vector<std::uint64_t> lengths;
  std::vector<Skipped> skipped;
};

// `skip`: the damaged sample, and the rest of the file where no more can be found, is left out and reported.
enum class OnDamage { fail, skip };

struct ScanOptions {
  OnDamage on_damage = OnDamage::fail;
  const std::atomic<bool>* stop = nullptr;  // a scan ends soon after it is set, with `cancelled`
};

inline bool stopped(const ScanOptions& options) {
  return options.stop != nullptr && options.stop->load(std::memory_order_relaxed);
}

inline Error stopped_error(const std::string& path) {
  return make_error(ErrorKind::cancelled, "the scan of " + path + " was stopped", path);
}

// Only damage can be skipped; other errors end the scan.
inline bool is_damage(const Error& error) {
  return error.kind == ErrorKind::corrupt || error.kind == ErrorKind::format ||
         error.kind == ErrorKind::unsupported;
}

}  // namespace trunkline::records
