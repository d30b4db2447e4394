// Any JSON is either rejected as `format` or gives a manifest whose pieces lie within its shards and that
// survives a round trip; any file whose first line does not match the rest is rejected.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "checkpoint/manifest.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  using namespace trunkline;
  const std::string_view text(reinterpret_cast<const char*>(data), bytes);
  if (const auto framed = checkpoint::parse_manifest(text, "fuzz"); !framed) {
    if (framed.error().kind != ErrorKind::format && framed.error().kind != ErrorKind::corrupt) std::abort();
  }
  const auto manifest = checkpoint::manifest_from_json(text, "fuzz");
  if (!manifest) {
    if (manifest.error().kind != ErrorKind::format) std::abort();
    return 0;
  }
  for (const checkpoint::Shard& shard : manifest->shards) {
    if (shard.volume >= manifest->volumes.size() || !checkpoint::is_plain_file_name(shard.file)) std::abort();
    if (shard.crc32c.size() != checkpoint::chunks_of(shard.bytes, manifest->chunk_bytes)) std::abort();
  }
  for (const checkpoint::Tensor& tensor : manifest->tensors) {
    for (const checkpoint::Piece& piece : tensor.pieces) {
      if (piece.shard >= manifest->shards.size()) std::abort();
      const std::uint64_t limit = manifest->shards[piece.shard].bytes;
      if (piece.offset > limit || piece.bytes > limit - piece.offset) std::abort();
    }
  }
  // Only one version may have these features. The checksum is computed, since fuzzing cannot find one.
  for (const std::uint64_t version : {checkpoint::kFirstVersion, checkpoint::kFeatureVersion}) {
    const auto framed = checkpoint::parse_manifest(checkpoint::frame_manifest(text, version), "fuzz");
    const bool fits = manifest->features.empty() == (version == checkpoint::kFirstVersion);
    if (framed.has_value() != fits || (fits && *framed != *manifest)) std::abort();
  }
  const auto again = checkpoint::format_manifest(*manifest);
  if (!again) std::abort();
  const auto parsed = checkpoint::parse_manifest(*again, "fuzz");
  if (!parsed || *parsed != *manifest) std::abort();
  return 0;
}
