// Any header is either rejected, as `format` or, for a truncated file, `corrupt`, or gives tensors that tile
// the data and survive a round trip.
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "format/safetensors.h"

// The first two bytes are the size of the data after the header.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  using namespace trunkline;
  if (bytes < 2) return 0;
  const std::uint64_t data_bytes = data[0] | std::uint64_t{data[1]} << 8;
  const std::string_view json(reinterpret_cast<const char*>(data) + 2, bytes - 2);
  const std::uint64_t file_bytes = format::kLengthBytes + json.size() + data_bytes;
  const auto header = format::parse_safetensors(json, file_bytes, "fuzz.safetensors");
  if (!header) {
    if (header.error().kind != ErrorKind::format && header.error().kind != ErrorKind::corrupt) std::abort();
    return 0;
  }
  std::uint64_t place = format::kLengthBytes + json.size();
  std::vector<format::TensorToStore> tensors;
  for (const format::StoredTensor& tensor : header->tensors) {
    if (tensor.begin != place || tensor.end < tensor.begin) std::abort();
    if (format::tensor_bytes(tensor.dtype, tensor.shape) != tensor.end - tensor.begin) std::abort();
    place = tensor.end;
    tensors.push_back({tensor.name, tensor.dtype, tensor.shape});
  }
  if (place != file_bytes) std::abort();
  const auto layout = format::lay_out_safetensors(tensors, header->metadata, 64);
  if (!layout) std::abort();
  const auto again = format::parse_safetensors(std::string_view(layout->head).substr(format::kLengthBytes),
                                               layout->file_bytes, "fuzz.safetensors");
  if (!again || again->metadata != header->metadata || again->tensors.size() != header->tensors.size())
    std::abort();
  return 0;
}
