// Any entry of checksums in the metadata is either rejected as `corrupt`, or counts as another program's, or
// has a checksum for each chunk.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "format/safetensors_checksums.h"

// The first two bytes are the size of the data, the others the entry.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  using namespace trunkline;
  if (bytes < 2) return 0;
  const std::uint64_t data_bytes = data[0] | std::uint64_t{data[1]} << 8;
  const std::string entry(reinterpret_cast<const char*>(data) + 2, bytes - 2);
  const std::string key(format::kChecksumsKey);
  const std::string head = "12345678{\"__metadata__\":{\"" + key + "\":\"" + entry + "\"}}        ";
  for (const std::string& name : {key, std::string("renamed")}) {
    const auto found =
        format::find_safetensors_checksums({{name, entry}}, head, data_bytes, "fuzz.safetensors");
    if (!found) {
      if (found.error().kind != ErrorKind::corrupt) std::abort();
      continue;
    }
    const auto& checksums = *found;
    if (!checksums) continue;
    if (name != key || checksums->chunk_bytes == 0) std::abort();
    const std::uint64_t chunks =
        data_bytes / checksums->chunk_bytes + (data_bytes % checksums->chunk_bytes == 0 ? 0 : 1);
    if (checksums->crc32c.size() != chunks) std::abort();
  }
  return 0;
}
