// The engines that a test runs on: every backend that works here, named in the test's name.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "trunkline/engine.h"
#include "trunkline/fault.h"
#include "trunkline/units.h"

namespace trunkline::test {

inline const std::vector<BackendKind>& all_backends() {
  static const std::vector<BackendKind> kinds = {BackendKind::io_uring, BackendKind::libaio,
                                                 BackendKind::threads, BackendKind::memory};
  return kinds;
}

inline std::string backend_name(const testing::TestParamInfo<BackendKind>& info) {
  return std::string(to_string(info.param));
}

// Options with which small files take every path: small blocks, and a budget for few of them. Where
// `disturbed`, commands are interrupted and cut short at random, which must not change a result.
inline EngineOptions small_engine(BackendKind kind, bool disturbed, unsigned queue_depth) {
  EngineOptions options{.backend = kind,
                        .lanes = 2,
                        .queue_depth = queue_depth,
                        .block_bytes = 64 * kKiB,
                        .pinned_budget_bytes = 16 * kMiB};
  if (disturbed) {
    options.faults = Faults::create();
    options.faults->disturb(11, 0.1, 0.3);
  }
  return options;
}

// A fixture over backends: skips one that the kernel does not support, with the reason.
class OnEveryBackend : public testing::TestWithParam<BackendKind> {
 protected:
  void SetUp() override {
    if (auto engine = Engine::create({.backend = GetParam(), .lanes = 1}); !engine)
      GTEST_SKIP() << engine.error().message;
  }

  Engine make_engine(EngineOptions options = {}) {
    options.backend = GetParam();
    auto engine = Engine::create(options);
    EXPECT_TRUE(engine) << engine.error().message;
    EXPECT_EQ(engine->config().backend, GetParam());
    return std::move(*engine);
  }
};

}  // namespace trunkline::test
