// What the lanes of an engine tried in vain: the first reason of each kind, for explain().
#pragma once

#include <array>
#include <cstddef>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "trunkline/engine.h"

namespace trunkline::io {

enum class Refused : std::size_t { registered_buffers, pinned_buffers, gds };

// Thread-safe.
class RefusalLog {
 public:
  // Only the first of a kind counts: later ones follow from it, or repeat it for another lane.
  void note(Refused kind, const Error& why) {
    const std::scoped_lock lock(mutex_);
    std::optional<std::string>& known = first_.at(static_cast<std::size_t>(kind));
    if (known) return;
    known = why.message;
    log::info(log::Component::engine, "{} refused: {}", kNames.at(static_cast<std::size_t>(kind)),
              why.message);
  }

  std::vector<Refusal> all() const {
    const std::scoped_lock lock(mutex_);
    std::vector<Refusal> refusals;
    for (std::size_t kind = 0; kind < first_.size(); ++kind) {
      if (const std::optional<std::string>& why = first_.at(kind))
        refusals.push_back({kNames.at(kind), *why});
    }
    return refusals;
  }

 private:
  static constexpr std::array kNames = {"registered buffers", "pinned bounce buffers", "GPUDirect Storage"};

  mutable std::mutex mutex_;
  std::array<std::optional<std::string>, kNames.size()> first_;
};

}  // namespace trunkline::io
