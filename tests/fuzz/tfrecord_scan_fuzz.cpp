// Any file is either rejected, or its records tile it; with skip, they tile what comes before the damage.
//
// In an input that begins with '!', the checksums of lengths are made right: mutations would find none.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "records/tfrecord_scan.h"
#include "trunkline/checksum.h"

using namespace trunkline;

namespace {

// Where the records end, which must be adjacent and within the file.
std::uint64_t end_of(const records::Ranges& found, std::size_t bytes) {
  if (found.offsets.size() != found.lengths.size()) std::abort();
  std::uint64_t place = 0;
  for (std::size_t index = 0; index < found.offsets.size(); ++index) {
    if (found.offsets[index] != place) std::abort();
    if (found.lengths[index] < records::kTfrecordHeadBytes + records::kTfrecordTailBytes) std::abort();
    if (found.lengths[index] > bytes - place) std::abort();
    place += found.lengths[index];
  }
  return place;
}

void repair(std::string& file) {
  std::size_t place = 0;
  while (file.size() - place >= records::kTfrecordHeadBytes) {
    std::uint64_t length = 0;
    std::memcpy(&length, file.data() + place, sizeof length);
    const auto crc =
        records::masked_crc(crc32c(std::as_bytes(std::span(file)).subspan(place, sizeof length)));
    std::memcpy(file.data() + place + sizeof length, &crc, sizeof crc);
    place += records::kTfrecordHeadBytes;
    if (length > file.size() - place || file.size() - place - length < records::kTfrecordTailBytes) return;
    place += length + records::kTfrecordTailBytes;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  std::string text(reinterpret_cast<const char*>(data), bytes);
  if (text.starts_with('!')) {
    text.erase(0, 1);
    repair(text);
  }
  bytes = text.size();
  records::MemorySource source(std::as_bytes(std::span(text)));
  const auto all = records::scan_tfrecords(source, "fuzz.tfrecord", {});
  const auto rest = records::scan_tfrecords(source, "fuzz.tfrecord", {.on_damage = records::OnDamage::skip});
  if (!rest) std::abort();
  const std::uint64_t end = end_of(*rest, bytes);
  if (all) {
    if (end_of(*all, bytes) != bytes || !rest->skipped.empty()) std::abort();
    return 0;
  }
  if (!records::is_damage(all.error())) std::abort();
  if (rest->skipped.size() != 1 || rest->skipped[0].offset != end) std::abort();
  return 0;
}
