// The public TensorReader: which bytes of which files a request needs, and reading them with tensor_file.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>

#include "checkpoint/tensor_sources.h"
#include "device/device.h"
#include "tensor_file/file_reader.h"
#include "trunkline/tensors.h"

namespace trunkline {

using checkpoint::SourceFile;
using checkpoint::SourcePiece;
using checkpoint::TensorSources;

namespace {

constexpr unsigned kMaxWorkers = 64;
constexpr std::size_t kNamesShown = 4;

std::unexpected<Error> bad_request(std::string message) {
  return std::unexpected(make_error(ErrorKind::invalid_argument, std::move(message)));
}

// Chunks of the file that any of its extents touches.
std::vector<tensor_file::Checksum> checksums_for(const SourceFile& file,
                                                 std::span<const tensor_file::Extent> extents) {
  std::vector<tensor_file::Checksum> checksums;
  std::uint64_t next = 0;  // chunk
  for (const tensor_file::Extent& extent : extents) {
    const std::uint64_t begin = extent.offset - file.checksums_begin;
    const std::uint64_t last = (extent.end() - 1 - file.checksums_begin) / file.chunk_bytes;
    for (next = std::max(next, begin / file.chunk_bytes); next <= last; ++next) {
      const std::uint64_t at = file.checksums_begin + next * file.chunk_bytes;
      checksums.push_back(
          {.begin = at, .end = std::min(at + file.chunk_bytes, file.bytes), .expected = file.crc32c[next]});
    }
  }
  return checksums;
}

}  // namespace

struct TensorReader::Impl {
  Impl(const Engine& engine_in, TensorReaderOptions options_in, TensorSources sources_in)
      : engine(engine_in), options(options_in), sources(std::move(sources_in)) {
    for (std::size_t i = 0; i < sources.tensors.size(); ++i) index.emplace(sources.tensors[i].name, i);
  }

  Result<std::vector<tensor_file::FileReader::Target>> targets(std::span<const TensorRead> reads) const;
  Status add_extents(const TensorRead& read, std::map<std::size_t, tensor_file::FileLayout>& layouts,
                     std::vector<bool>& listed) const;
  Error describe(const tensor_file::ChecksumMismatch& mismatch, const tensor_file::FileLayout& layout) const;

  const Engine engine;
  const TensorReaderOptions options;
  const TensorSources sources;
  std::unordered_map<std::string_view, std::size_t> index;  // of names in sources
};

Status TensorReader::Impl::add_extents(const TensorRead& read,
                                       std::map<std::size_t, tensor_file::FileLayout>& layouts,
                                       std::vector<bool>& listed) const {
  const auto found = index.find(read.name);
  if (found == index.end())
    return bad_request(fmt::format("there is no tensor \"{}\" in {}", read.name,
                                   sources.files.empty() ? "the checkpoint" : sources.files[0].path));
  const TensorInfo& tensor = sources.tensors[found->second];
  if (read.memory.bytes != tensor.bytes)
    return bad_request(fmt::format("memory for tensor \"{}\" has {} bytes, but the tensor has {}", read.name,
                                   read.memory.bytes, tensor.bytes));
  if (listed[found->second])
    return bad_request(fmt::format("tensor \"{}\" is listed twice in one read", read.name));
  listed[found->second] = true;
  Fence after;
  if (read.memory.device != nullptr) {
    auto fence = read.memory.device->fence(read.memory.stream);
    if (!fence) return std::unexpected(fence.error());
    after = std::move(*fence);
  }
  std::uint64_t done = 0;
  for (const SourcePiece& piece : sources.pieces[found->second]) {
    if (piece.bytes == 0) continue;
    const SourceFile& file = sources.files[piece.file];
    tensor_file::FileLayout& layout = layouts[piece.file];
    layout.path = file.path;
    layout.bytes = file.bytes;
    layout.extents.push_back({.offset = piece.offset,
                              .memory = MemoryView(read.memory.data + done, piece.bytes, read.memory.device),
                              .after = after});
    done += piece.bytes;
  }
  return {};
}

Result<std::vector<tensor_file::FileReader::Target>> TensorReader::Impl::targets(
    std::span<const TensorRead> reads) const {
  std::map<std::size_t, tensor_file::FileLayout> layouts;  // by file
  std::vector<bool> listed(sources.tensors.size());
  for (const TensorRead& read : reads) {
    if (auto added = add_extents(read, layouts, listed); !added) return std::unexpected(added.error());
  }
  std::vector<tensor_file::FileReader::Target> targets;
  for (auto& [number, layout] : layouts) {
    const SourceFile& file = sources.files[number];
    if (auto arranged = layout.arrange(); !arranged) return std::unexpected(arranged.error());
    if (file.has_checksums && options.verify != Verify::never)
      layout.checksums = checksums_for(file, layout.extents);
    targets.push_back({.file = file.file, .layout = std::move(layout), .keep_open = true});
  }
  return targets;
}

Error TensorReader::Impl::describe(const tensor_file::ChecksumMismatch& mismatch,
                                   const tensor_file::FileLayout& layout) const {
  const tensor_file::Checksum& range = layout.checksums[mismatch.checksum];
  std::vector<std::string_view> names;
  for (std::size_t i = 0; i < sources.tensors.size(); ++i) {
    const bool touches = std::ranges::any_of(sources.pieces[i], [&](const SourcePiece& piece) {
      return sources.files[piece.file].path == layout.path && piece.offset < range.end &&
             piece.offset + piece.bytes > range.begin;
    });
    if (touches) names.push_back(sources.tensors[i].name);
  }
  const std::size_t shown = std::min(names.size(), kNamesShown);
  std::string tensors = fmt::format("{}", fmt::join(names.begin(), names.begin() + shown, ", "));
  if (names.size() > shown) tensors += fmt::format(" and {} more", names.size() - shown);
  return make_error(
      ErrorKind::corrupt,
      fmt::format("{} is corrupt: bytes {} to {} have checksum {:08x} instead of {:08x}; they belong to "
                  "tensors {}; restore the file from a copy, or read other tensors",
                  layout.path, range.begin, range.end, mismatch.found, mismatch.expected, tensors),
      layout.path);
}

Result<TensorReader> TensorReader::open(const Engine& engine, const std::string& path,
                                        const TensorReaderOptions& options) {
  if (options.workers < 1 || options.workers > kMaxWorkers)
    return bad_request(fmt::format("workers is {}, but must be 1 .. {}", options.workers, kMaxWorkers));
  auto sources = checkpoint::open_tensor_sources(engine, path, options.verify != Verify::never);
  if (!sources) return std::unexpected(sources.error());
  if (options.verify == Verify::always) {
    for (const SourceFile& file : sources->files) {
      if (file.has_checksums) continue;
      return std::unexpected(make_error(
          ErrorKind::format,
          fmt::format("cannot verify {}: it has no checksums; save it with Trunkline, or open it with "
                      "Verify::automatic",
                      file.path),
          file.path));
    }
  }
  return TensorReader(std::make_shared<const Impl>(engine, options, std::move(*sources)));
}

Result<TensorReader> TensorReader::open(const std::string& path, const TensorReaderOptions& options) {
  const auto engine = Engine::default_engine();
  if (!engine) return std::unexpected(engine.error());
  return open(*engine, path, options);
}

std::span<const TensorInfo> TensorReader::tensors() const { return impl_->sources.tensors; }

const TensorInfo* TensorReader::find(std::string_view name) const {
  const auto found = impl_->index.find(name);
  return found == impl_->index.end() ? nullptr : &impl_->sources.tensors[found->second];
}

const std::map<std::string, std::string>& TensorReader::metadata() const { return impl_->sources.metadata; }

bool TensorReader::has_checksums() const {
  return std::ranges::all_of(impl_->sources.files, [](const SourceFile& file) { return file.has_checksums; });
}

Status TensorReader::read(std::string_view name, MemoryView memory) const {
  const TensorRead one{.name = name, .memory = memory};
  return read({&one, 1});
}

Status TensorReader::read(std::span<const TensorRead> reads) const {
  auto targets = impl_->targets(reads);
  if (!targets) return std::unexpected(targets.error());
  std::vector<tensor_file::FileLayout> layouts;  // for messages
  for (const auto& target : *targets)
    layouts.push_back({.path = target.layout.path, .checksums = target.layout.checksums});
  tensor_file::FileReader reader(
      impl_->engine, std::move(*targets),
      {.verify = impl_->options.verify != Verify::never, .workers = impl_->options.workers});
  auto status = reader.read();
  const auto& mismatch = reader.mismatch();
  if (!status && mismatch) return std::unexpected(impl_->describe(*mismatch, layouts[mismatch->layout]));
  return status;
}

}  // namespace trunkline
