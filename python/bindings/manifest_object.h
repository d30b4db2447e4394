// The Python class CheckpointManifest.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>

#include "checkpoint/listing.h"
#include "checkpoint/manifest.h"
#include "errors.h"

namespace trunkline::python {

struct ManifestObject {
  std::shared_ptr<const checkpoint::Manifest> manifest;
  std::string directory;

  std::string shard_path(std::size_t shard) const {
    return checkpoint::shard_path(directory, *manifest, shard);
  }
  nanobind::list shard_paths() const {
    nanobind::list paths;
    for (std::size_t i = 0; i < manifest->shards.size(); ++i) paths.append(decode_path(shard_path(i)));
    return paths;
  }
};

}  // namespace trunkline::python
