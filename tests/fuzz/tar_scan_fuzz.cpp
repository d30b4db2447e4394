// Any archive is either rejected, or gives samples that are within it, in order, and that can be parsed.
//
// An input that begins with '!' is a list of blocks, whose checksums are right: mutations would find none.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "records/tar_scan.h"

using namespace trunkline;

namespace {

constexpr std::size_t kBlock = 512;

// Fills the checksum of a header in.
void sum_up(char* block) {
  std::memset(block + 148, ' ', 8);
  unsigned sum = 0;
  for (std::size_t index = 0; index < kBlock; ++index) sum += static_cast<unsigned char>(block[index]);
  for (int digit = 5; digit >= 0; --digit, sum >>= 3U) block[148 + digit] = static_cast<char>('0' + sum % 8);
  block[154] = '\0';
}

// "hTname\nsize\n": a header of type T; "dN....": a block that begins with N bytes; anything else: zeros.
std::string expanded(std::string_view list) {
  std::string file;
  while (!list.empty() && file.size() < 64 * kBlock) {
    const char kind = list.front();
    list.remove_prefix(1);
    std::string block(kBlock, '\0');
    if (kind == 'h' && !list.empty()) {
      block[156] = list.front();
      list.remove_prefix(1);
      for (const auto& [offset, bytes] : {std::pair<std::size_t, std::size_t>{0, 100}, {124, 12}}) {
        const std::string_view text = list.substr(0, list.find('\n'));
        std::memcpy(block.data() + offset, text.data(), std::min(text.size(), bytes));
        list.remove_prefix(std::min(list.size(), text.size() + 1));
      }
      std::memcpy(block.data() + 257, "ustar", 5);
      sum_up(block.data());
    } else if (kind == 'd' && !list.empty()) {
      const auto bytes = std::min<std::size_t>(static_cast<unsigned char>(list.front()), list.size() - 1);
      std::memcpy(block.data(), list.data() + 1, bytes);
      list.remove_prefix(bytes + 1);
    }
    file += block;
  }
  return file;
}

void check(const records::Ranges& found, std::span<const std::byte> file) {
  if (found.offsets.size() != found.lengths.size()) std::abort();
  std::uint64_t place = 0;
  for (std::size_t index = 0; index < found.offsets.size(); ++index) {
    const std::uint64_t offset = found.offsets[index];
    if (offset < place || offset > file.size() || found.lengths[index] > file.size() - offset) std::abort();
    place = offset + found.lengths[index];
    const auto bytes = file.subspan(offset, found.lengths[index]);
    const auto sample = records::parse_tar_sample(bytes, "fuzz.tar");
    if (!sample || sample->members.empty() || sample->key.empty()) std::abort();
    std::uint64_t end = 0;
    for (const records::SampleMember& member : sample->members) {
      if (member.begin < end || member.begin > bytes.size()) std::abort();
      if (member.bytes > bytes.size() - member.begin) std::abort();
      end = member.begin + member.bytes;
    }
    if (end != bytes.size()) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  std::string_view input(reinterpret_cast<const char*>(data), bytes);
  const std::string archive = input.starts_with('!') ? expanded(input.substr(1)) : std::string(input);
  const auto file = std::as_bytes(std::span(archive));
  static_cast<void>(records::parse_tar_sample(file, "fuzz.tar"));
  records::MemorySource source(file);
  const auto all = records::scan_tar(source, "fuzz.tar", {});
  const auto rest = records::scan_tar(source, "fuzz.tar", {.on_damage = records::OnDamage::skip});
  if (!rest) std::abort();
  check(*rest, file);
  if (!all) {
    if (!records::is_damage(all.error()) || rest->skipped.empty()) std::abort();
    return 0;
  }
  check(*all, file);
  if (all->offsets != rest->offsets || all->lengths != rest->lengths || !rest->skipped.empty()) std::abort();
  return 0;
}
