// Directories of checkpoints for tests: shards of random bytes, and saves of them in one call.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/store.h"
#include "os/read_text.h"
#include "support/temp_directory.h"
#include "support/test_memory.h"
#include "trunkline/checksum.h"

namespace trunkline::test {

using checkpoint::Manifest;
using checkpoint::Placement;
using checkpoint::SaveTransaction;
using checkpoint::Store;
using checkpoint::StoreOptions;

struct Change {
  checkpoint::DirectoryOps::Kind kind;
  std::string path;
};

// Lets `allowed` changes pass and refuses all after them, as if the process had died there.
struct CrashPoint {
  std::size_t allowed = std::numeric_limits<std::size_t>::max();
  std::vector<Change> passed = {};

  checkpoint::DirectoryOps::Watch watch() {
    return [this](checkpoint::DirectoryOps::Kind kind, const std::string& path) -> Status {
      if (passed.size() >= allowed) return std::unexpected(make_error(ErrorKind::cancelled, "crash", path));
      passed.push_back({kind, path});
      return {};
    };
  }
};

class StoreTest : public testing::Test {
 protected:
  std::string directory() const { return root_.file("run"); }
  std::vector<std::string> volumes() const { return {root_.file("v0"), root_.file("v1")}; }

  std::unique_ptr<Store> open(const StoreOptions& options = {}) const {
    auto store = Store::open(directory(), options);
    EXPECT_TRUE(store) << store.error().message;
    return store ? std::move(*store) : nullptr;
  }

  // Writes shards of `bytes` random bytes each where they belong; the manifest that describes them has a
  // tensor "t0", "t1", ... for all of each shard but its first 100 bytes.
  static Manifest write_shards(std::uint64_t step, const Placement& placement, std::size_t bytes = 5000) {
    Manifest manifest{.step = step, .volumes = placement.volumes, .shards = placement.shards};
    for (std::size_t i = 0; i < placement.paths.size(); ++i) {
      std::vector<std::byte> contents(bytes);
      fill_random(contents, 1000 * step + i);
      std::ofstream(placement.paths[i], std::ios::binary)
          .write(reinterpret_cast<const char*>(contents.data()), static_cast<std::streamsize>(bytes));
      manifest.shards[i].bytes = bytes;
      for (std::size_t at = 0; at < bytes; at += manifest.chunk_bytes) {
        const std::size_t length = std::min<std::size_t>(manifest.chunk_bytes, bytes - at);
        manifest.shards[i].crc32c.push_back(crc32c(std::span(contents).subspan(at, length)));
      }
      manifest.tensors.push_back({.name = fmt::format("t{}", i),
                                  .dtype = "U8",
                                  .shape = {bytes - 100},
                                  .pieces = {{.shard = i, .offset = 100, .bytes = bytes - 100}}});
    }
    manifest.state = fmt::format(R"({{"step":{}}})", step);
    return manifest;
  }

  static Manifest write_shards(const SaveTransaction& transaction, std::size_t bytes = 5000) {
    return write_shards(transaction.step(), transaction.placement(), bytes);
  }

  static std::unique_ptr<SaveTransaction> begin(Store& store, std::uint64_t step,
                                                std::uint64_t shards_per_volume = 2) {
    const std::size_t count = std::max<std::size_t>(1, store.descriptor().volumes.size());
    auto transaction = store.begin(step, std::vector<std::uint64_t>(count, shards_per_volume));
    EXPECT_TRUE(transaction) << transaction.error().message;
    return transaction ? std::move(*transaction) : nullptr;
  }

  // What a run does that continues from the checkpoints there are.
  static void load(Store& store) {
    auto position = store.position();
    ASSERT_TRUE(position) << position.error().message;
    store.continue_from(*std::move(position));
  }

  // A whole save; its commit.
  static std::uint64_t save(Store& store, std::uint64_t step, std::optional<std::uint64_t> keep = {},
                            std::size_t bytes = 5000) {
    const auto transaction = begin(store, step);
    if (!transaction) return 0;
    const auto commit = transaction->commit(write_shards(*transaction, bytes));
    EXPECT_TRUE(commit) << commit.error().message;
    const auto collected = transaction->retain(keep);
    EXPECT_TRUE(collected) << collected.error().message;
    EXPECT_TRUE(collected->problems.empty());
    return commit.value_or(0);
  }

  // The same in a run that continues from the checkpoints there are.
  static std::uint64_t load_and_save(Store& store, std::uint64_t step,
                                     std::optional<std::uint64_t> keep = {}) {
    load(store);
    return save(store, step, keep);
  }

  static bool is_whole(const Store& store, const Manifest& manifest) {
    for (std::size_t i = 0; i < manifest.shards.size(); ++i) {
      const auto text = os::read_text(checkpoint::shard_path(store.directory(), manifest, i));
      if (!text || text->size() != manifest.shards[i].bytes) return false;
      if (crc32c(std::as_bytes(std::span(*text))) != manifest.shards[i].crc32c.front()) return false;
    }
    return true;
  }

  // All that lies under the test's directory, relative to it, sorted; directories end with a slash.
  std::vector<std::string> everything() const {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root_.path())) {
      found.push_back(std::filesystem::relative(entry.path(), root_.path()).string() +
                      (entry.is_directory() ? "/" : ""));
    }
    std::ranges::sort(found);
    return found;
  }

  TempDirectory root_;
};

}  // namespace trunkline::test
