#include "cli/bench/bench_content.h"

#include <fmt/format.h>

#include <cstring>
#include <utility>

namespace trunkline::cli {

Content made_content(std::uint64_t seed) {
  return {.make =
              [seed](std::size_t file, const Piece& piece, std::span<std::byte> bytes) {
                fill_pattern({.seed = seed, .file = file}, piece.offset, bytes);
              },
          .check = {}};
}

// Memory is overwritten first, so that a read that moves nothing cannot pass because of earlier contents.
Content checked_content(const std::vector<BenchFile>& files, ExpectedPattern expected) {
  Content content;
  content.make = [](std::size_t, const Piece&, std::span<std::byte> bytes) {
    std::memset(bytes.data(), 0x5a, bytes.size());
  };
  content.check = [&files, expected = std::move(expected)](std::size_t index, const Piece& piece,
                                                           std::span<const std::byte> bytes) -> Status {
    const auto wrong = first_wrong_byte(expected(index, piece), piece.offset, bytes);
    if (!wrong) return {};
    const std::string& path = files[index].path;
    return std::unexpected(
        make_error(ErrorKind::corrupt,
                   fmt::format("verifying {}: the byte at offset {} is wrong (in the {} bytes read at {})",
                               path, *wrong, piece.bytes, piece.offset),
                   path));
  };
  return content;
}

Content mixed_content(Content written, Content read) {
  Content content;
  content.make = [make_written = std::move(written.make), make_read = std::move(read.make)](
                     std::size_t file, const Piece& piece, std::span<std::byte> bytes) {
    (piece.op == Op::read ? make_read : make_written)(file, piece, bytes);
  };
  content.check = [check = std::move(read.check)](std::size_t file, const Piece& piece,
                                                  std::span<const std::byte> bytes) -> Status {
    return piece.op == Op::read ? check(file, piece, bytes) : Status{};
  };
  return content;
}

}  // namespace trunkline::cli
