#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "checkpoint/verify.h"
#include "cli/checkpoint/checkpoint_actions.h"
#include "cli/checkpoint/checkpoint_output.h"
#include "cli/text_table.h"
#include "trunkline/units.h"

namespace trunkline::cli {
namespace {

using checkpoint::Manifest;
using checkpoint::Tensor;
using Json = nlohmann::ordered_json;

std::uint64_t bytes_of(const Tensor& tensor) {
  std::uint64_t total = 0;
  for (const checkpoint::Piece& piece : tensor.pieces) total += piece.bytes;
  return total;
}

std::vector<std::uint64_t> shards_of(const Tensor& tensor) {
  std::vector<std::uint64_t> shards;
  for (const checkpoint::Piece& piece : tensor.pieces) {
    if (std::ranges::find(shards, piece.shard) == shards.end()) shards.push_back(piece.shard);
  }
  return shards;
}

// The commit that wrote a shard.
std::uint64_t commit_of(const Manifest& manifest, std::size_t shard) {
  const std::uint64_t commit = manifest.shards[shard].commit;
  return commit == 0 ? manifest.commit : commit;
}

// JSON has no numbers that are not finite.
Json metrics_json(const Manifest& manifest) {
  Json metrics = Json::object();
  for (const checkpoint::Metric& metric : manifest.metrics) {
    metrics[metric.name] =
        std::isfinite(metric.value) ? Json(metric.value) : Json(fmt::format("{}", metric.value));
  }
  return metrics;
}

Json to_json(const CheckpointArguments& arguments, const std::string& directory, const Manifest& manifest) {
  Json document = document_of("show", arguments);
  document["step"] = manifest.step;
  document["commit"] = manifest.commit;
  document["time"] = manifest.time;
  document["world_size"] = manifest.world_size;
  document["metrics"] = metrics_json(manifest);
  document["chunk_bytes"] = manifest.chunk_bytes;
  document["bytes"] = bytes_to_verify(manifest);
  document["bytes_written"] = bytes_written(manifest);
  document["written_share"] = written_share(manifest);
  document["shards"] = Json::array();
  for (std::size_t i = 0; i < manifest.shards.size(); ++i) {
    document["shards"].push_back({{"path", checkpoint::shard_path(directory, manifest, i)},
                                  {"bytes", manifest.shards[i].bytes},
                                  {"commit", commit_of(manifest, i)},
                                  {"chunks", manifest.shards[i].crc32c.size()}});
  }
  document["tensors"] = Json::array();
  for (const Tensor& tensor : manifest.tensors) {
    document["tensors"].push_back({{"name", tensor.name},
                                   {"dtype", tensor.dtype},
                                   {"shape", tensor.shape},
                                   {"bytes", bytes_of(tensor)},
                                   {"shards", shards_of(tensor)}});
  }
  return document;
}

std::string to_text(const std::string& directory, const Manifest& manifest) {
  std::string text =
      fmt::format("step {}, commit {} of {}, saved by {} {}\n", manifest.step, manifest.commit, manifest.time,
                  manifest.world_size, manifest.world_size == 1 ? "process" : "processes");
  for (const checkpoint::Metric& metric : manifest.metrics) {
    text += fmt::format("{}: {}\n", printable(metric.name), metric.value);
  }
  text += "\n";
  if (!manifest.shards.empty()) {
    TextTable shards({"shard", "size", "chunks", "commit", "path"});
    for (std::size_t i = 0; i < manifest.shards.size(); ++i) {
      shards.add({fmt::format("{}", i), format_bytes(manifest.shards[i].bytes),
                  fmt::format("{}", manifest.shards[i].crc32c.size()),
                  fmt::format("{}", commit_of(manifest, i)),
                  printable(checkpoint::shard_path(directory, manifest, i))});
    }
    text += shards.render() + "\n";
  }
  if (!manifest.tensors.empty()) {
    TextTable tensors({"tensor", "dtype", "shape", "size", "shards"});
    for (const Tensor& tensor : manifest.tensors) {
      tensors.add({printable(tensor.name), printable(tensor.dtype),
                   fmt::format("[{}]", fmt::join(tensor.shape, ", ")), format_bytes(bytes_of(tensor)),
                   fmt::format("{}", fmt::join(shards_of(tensor), ","))});
    }
    text += tensors.render() + "\n";
  }
  text += fmt::format("{} in {} tensor{} and {} shard{}\n", format_bytes(bytes_to_verify(manifest)),
                      manifest.tensors.size(), manifest.tensors.size() == 1 ? "" : "s",
                      manifest.shards.size(), manifest.shards.size() == 1 ? "" : "s");
  const std::uint64_t written = bytes_written(manifest);
  if (manifest.unit_bytes != 0) {
    text +=
        fmt::format("{} of that ({:.3g}%) written by this commit; the rest is in shards of earlier ones\n",
                    format_bytes(written), 100 * written_share(manifest));
  }
  return text;
}

}  // namespace

int show_checkpoint(const CheckpointArguments& arguments) {
  const auto store = open_store(arguments);
  if (!store) return fail(arguments, "show", store.error());
  const auto step = chosen_step(**store, arguments);
  if (!step) return fail(arguments, "show", step.error());
  const auto manifest = (*store)->read_manifest(*step);
  if (!manifest) return fail(arguments, "show", manifest.error());
  const std::string& directory = (*store)->directory();
  // Builds only the requested form: each is large where there are many tensors.
  if (arguments.json) return print(arguments, to_json(arguments, directory, *manifest), "", true);
  return print(arguments, {}, to_text(directory, *manifest), true);
}

}  // namespace trunkline::cli
