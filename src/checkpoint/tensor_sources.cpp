#include "checkpoint/tensor_sources.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "base/strict_json.h"
#include "checkpoint/listing.h"
#include "checkpoint/manifest.h"
#include "checkpoint/names.h"
#include "format/safetensors.h"
#include "format/safetensors_checksums.h"
#include "os/read_text.h"

namespace trunkline::checkpoint {
namespace {

constexpr std::string_view kModelFile = "model.safetensors";
constexpr std::string_view kModelIndexFile = "model.safetensors.index.json";
constexpr std::size_t kMaxIndexBytes = std::size_t{100} << 20;
constexpr int kIndexDepth = 16;
constexpr int kMaxAttempts = 10;  // to open the shards of a step that is being replaced

std::unexpected<Error> bad_format(const std::string& path, std::string_view why) {
  return std::unexpected(make_error(ErrorKind::format, fmt::format("cannot read {}: {}", path, why), path));
}

// Whether it is the folder of a step, rather than a model's with such a name.
bool has_manifest(const std::filesystem::path& directory) {
  std::error_code error;
  for (std::filesystem::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    if (commit_of(entry->path().filename().string())) return true;
  }
  return false;
}

Result<std::string> read_head(const File& file, std::uint64_t file_bytes, const std::string& path) {
  if (file_bytes < format::kLengthBytes) {
    return std::unexpected(
        make_error(ErrorKind::corrupt,
                   fmt::format("{} is not a valid safetensors file: it has {} bytes; copy or save it again",
                               path, file_bytes),
                   path));
  }
  std::string head(format::kLengthBytes, '\0');
  const auto bytes_of = [](std::string& text) { return std::as_writable_bytes(std::span(text)); };
  if (auto got = file.pread(bytes_of(head), 0); !got) return std::unexpected(got.error());
  const auto length = format::parse_safetensors_length(
      std::as_bytes(std::span(head)).first<format::kLengthBytes>(), file_bytes, path);
  if (!length) return std::unexpected(length.error());
  head.resize(format::kLengthBytes + *length);
  if (auto got = file.pread(bytes_of(head).subspan(format::kLengthBytes), format::kLengthBytes); !got)
    return std::unexpected(got.error());
  return head;
}

class Opening {
 public:
  Opening(const Engine& engine, bool checksums) : engine_(engine), checksums_(checksums) {}

  Status add_safetensors(const std::string& path);
  Status add_model(const std::string& directory);
  Status add_index(const std::filesystem::path& index);
  Status add_step(const std::string& directory, std::uint64_t step);
  Result<TensorSources> take();

 private:
  Result<File> open(const std::string& path) const {
    return File::open(engine_, path, {.direct = Direct::unless_cached});
  }
  Status add_shards(const std::string& directory, const Manifest& manifest);

  const Engine& engine_;
  const bool checksums_;
  TensorSources sources_;
};

Status Opening::add_safetensors(const std::string& path) {
  auto file = open(path);
  if (!file) return std::unexpected(file.error());
  const auto bytes = file->size();
  if (!bytes) return std::unexpected(bytes.error());
  const auto head = read_head(*file, *bytes, path);
  if (!head) return std::unexpected(head.error());
  auto header = format::parse_safetensors(std::string_view(*head).substr(format::kLengthBytes), *bytes, path);
  if (!header) return std::unexpected(header.error());

  SourceFile source{.file = std::move(*file), .path = path, .bytes = *bytes, .checksums_begin = head->size()};
  if (checksums_) {
    auto found = format::find_safetensors_checksums(header->metadata, *head, *bytes - head->size(), path);
    if (!found) return std::unexpected(found.error());
    if (auto& checksums = *found) {
      source.has_checksums = true;
      source.chunk_bytes = checksums->chunk_bytes;
      source.crc32c = std::move(checksums->crc32c);
    }
  }
  const std::size_t index = sources_.files.size();
  sources_.files.push_back(std::move(source));
  for (format::StoredTensor& tensor : header->tensors) {
    const std::uint64_t size = tensor.end - tensor.begin;
    sources_.tensors.push_back({.name = std::move(tensor.name),
                                .dtype = std::string(format::name_of(tensor.dtype)),
                                .shape = std::move(tensor.shape),
                                .bytes = size});
    sources_.pieces.push_back({{.file = index, .offset = tensor.begin, .bytes = size}});
  }
  header->metadata.erase(std::string(format::kChecksumsKey));
  sources_.metadata.merge(header->metadata);  // of equal keys, those that are there stay
  return {};
}

// By file, the tensors that `weight_map` says it holds.
Result<std::map<std::string, std::vector<std::string>>> files_of_index(const std::string& path) {
  const auto text = os::read_text(path, kMaxIndexBytes);
  if (!text) return std::unexpected(text.error());
  const auto json = parse_json_object(*text, kIndexDepth);
  if (!json) return bad_format(path, json.error());
  const auto map = json->find("weight_map");
  if (map == json->end() || !map->is_object() || map->empty())
    return bad_format(path, "\"weight_map\" is not an object that names the file of each tensor");
  std::map<std::string, std::vector<std::string>> files;
  for (const auto& [tensor, file] : map->items()) {
    if (!file.is_string() || !is_plain_file_name(file.get_ref<const std::string&>()))
      return bad_format(path, fmt::format("the file of tensor \"{}\" is not a plain file name", tensor));
    files[file.get<std::string>()].push_back(tensor);
  }
  return files;
}

Status Opening::add_index(const std::filesystem::path& index) {
  const auto files = files_of_index(index.string());
  if (!files) return std::unexpected(files.error());
  for (const auto& [file, tensors] : *files) {
    const std::size_t first = sources_.tensors.size();
    if (auto added = add_safetensors((index.parent_path() / file).string()); !added) return added;
    std::set<std::string_view> found;
    for (std::size_t i = first; i < sources_.tensors.size(); ++i) found.insert(sources_.tensors[i].name);
    for (const std::string& tensor : tensors) {
      if (!found.contains(tensor))
        return bad_format(index.string(), fmt::format("tensor \"{}\" is not in {}", tensor, file));
    }
  }
  return {};
}

// As trunkline.load in Python and transformers choose: the index may be left from an earlier save.
Status Opening::add_model(const std::string& directory) {
  const std::filesystem::path root(directory);
  std::error_code ignored;
  if (const auto file = root / kModelFile; std::filesystem::exists(file, ignored))
    return add_safetensors(file.string());
  if (const auto index = root / kModelIndexFile; std::filesystem::exists(index, ignored))
    return add_index(index);
  Error error = make_error(
      ErrorKind::system,
      fmt::format("cannot read tensors from directory {}: it has no checkpoint, no {} and no {}; name a "
                  ".safetensors file or another directory",
                  directory, kModelFile, kModelIndexFile),
      directory);
  error.code = ENOENT;
  return std::unexpected(std::move(error));
}

Status Opening::add_shards(const std::string& directory, const Manifest& manifest) {
  for (std::size_t i = 0; i < manifest.shards.size(); ++i) {
    const std::string path = shard_path(directory, manifest, i);
    auto file = open(path);
    if (!file) return std::unexpected(file.error());
    sources_.files.push_back({.file = std::move(*file),
                              .path = path,
                              .bytes = manifest.shards[i].bytes,
                              .chunk_bytes = manifest.chunk_bytes,
                              .crc32c = manifest.shards[i].crc32c,
                              .has_checksums = true});
  }
  return {};
}

// Once the shards are open, what is read is this checkpoint, whatever happens to the directory.
Status Opening::add_step(const std::string& directory, std::uint64_t step) {
  std::optional<Manifest> manifest;
  for (int attempt = 1;; ++attempt) {
    auto read = read_newest_manifest(directory, step);
    if (!read) return std::unexpected(read.error());
    const bool is_same = manifest && manifest->commit == read->commit;
    manifest = std::move(*read);
    sources_.files.clear();
    auto added = add_shards(directory, *manifest);
    if (added) break;
    // A save of the same step may have replaced them since the manifest was read.
    if (added.error().code != ENOENT || is_same || attempt == kMaxAttempts) return added;
  }
  for (Tensor& tensor : manifest->tensors) {
    TensorInfo info{
        .name = std::move(tensor.name), .dtype = std::move(tensor.dtype), .shape = std::move(tensor.shape)};
    std::vector<SourcePiece> pieces;
    for (const Piece& piece : tensor.pieces) {
      info.bytes += piece.bytes;
      pieces.push_back({.file = piece.shard, .offset = piece.offset, .bytes = piece.bytes});
    }
    sources_.tensors.push_back(std::move(info));
    sources_.pieces.push_back(std::move(pieces));
  }
  return {};
}

Result<TensorSources> Opening::take() {
  std::set<std::string_view> names;
  for (std::size_t i = 0; i < sources_.tensors.size(); ++i) {
    const std::string& name = sources_.tensors[i].name;
    if (names.insert(name).second) continue;
    const std::string& path = sources_.files[sources_.pieces[i].front().file].path;
    return bad_format(path, fmt::format("tensor \"{}\" is also in another file of the model", name));
  }
  return std::move(sources_);
}

}  // namespace

Result<TensorSources> open_tensor_sources(const Engine& engine, const std::string& path, bool checksums) {
  Opening opening(engine, checksums);
  std::error_code error;
  Status added;
  if (!std::filesystem::is_directory(path, error)) {
    added = opening.add_safetensors(path);
  } else {
    // Resolved, so that a link such as "best" may lead to a step.
    const auto directory = std::filesystem::canonical(path, error);
    if (error) return std::unexpected(system_error(error.value(), "resolve " + path, path));
    if (const auto step = step_of(directory.filename().string()); step && has_manifest(directory)) {
      added = opening.add_step(directory.parent_path().string(), *step);
    } else {
      const auto steps = list_steps(directory.string());
      if (!steps) return std::unexpected(steps.error());
      const auto latest = latest_of(*steps);
      added = latest ? opening.add_step(directory.string(), *latest) : opening.add_model(path);
    }
  }
  if (!added) return std::unexpected(added.error());
  return opening.take();
}

}  // namespace trunkline::checkpoint
