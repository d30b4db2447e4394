// A tuning to test with.
#pragma once

#include "tuning/tuning.h"

namespace trunkline::test {

inline tuning::Tuning some_tuning() {
  return {.machine = "0123456789abcdef",
          .time = "2026-01-31T23:59:59Z",
          .paths = {"/data"},
          .storages = {{.filesystem = "ext4", .device = "/dev/nvme0n1p2", .id = "00000000000000ff"}},
          .settings = {.backend = BackendKind::libaio,
                       .lanes = 3,
                       .queue_depth = 7,
                       .block_bytes = 1ULL << 20,
                       .direct = false},
          .rates = {{100, 200}, {300, 400}, {500, 600}, {700, 18'446'744'073'709'551'615ULL}}};
}

}  // namespace trunkline::test
