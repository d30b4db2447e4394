// What `trunkline doctor` finds out about a machine.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "os/environment.h"
#include "os/pci.h"
#include "os/topology.h"
#include "trunkline/device.h"
#include "trunkline/engine.h"

namespace trunkline::cli {

struct BackendFinding {
  BackendKind kind = BackendKind::threads;
  bool works = false;
  std::string why;  // why it is not available
  std::vector<std::string> features;
};

struct PathFinding {
  std::string path;
  std::optional<Explanation> explanation;
  std::optional<os::StorageLocation> location;
  std::optional<Error> error;         // why the path cannot be used
  std::optional<unsigned> numa_node;  // of the path's device
};

struct GpuFinding {
  CudaDeviceInfo info;
  os::PciLink link;
};

struct CudaFinding {
  std::string why;  // why there is none
  int version = 0;  // of the driver, 12040: 12.4
  std::string library;
  std::vector<GpuFinding> gpus;
  bool nvidia_fs = false;   // the kernel module of GPUDirect Storage is loaded
  std::string why_not_gds;  // why no file can use GPUDirect Storage; empty: it depends on the path
};

struct Findings {
  os::Environment environment;
  CudaFinding cuda;
  std::vector<BackendFinding> backends;  // best first
  std::optional<EngineConfig> config;    // of an engine with default options; nullopt: no backend works
  std::vector<PathFinding> paths;
  bool has_proc = true;  // /proc is mounted
  bool has_sys = true;   // /sys is mounted

  bool usable() const;  // some backend works, and every path can be used
};

// Tries each backend by running an operation on it, and each path by creating or opening a file there.
Findings examine(const std::vector<std::string>& paths);

}  // namespace trunkline::cli
