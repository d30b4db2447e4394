// Writes a file, reads it back in pieces that are all in flight at once, checks every byte, and prints which
// way the bytes took.   roundtrip [DIRECTORY]
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "trunkline/trunkline.h"

namespace tl = trunkline;

namespace {

constexpr std::uint64_t kBytes = 64 * tl::kMiB + 1000;  // any size will do
constexpr std::uint64_t kPiece = 7 * tl::kMiB + 13;     // and any offset

tl::Status write_pattern(const tl::Engine& engine, const std::string& path, const tl::Buffer& buffer) {
  for (std::uint64_t i = 0; i < buffer.size(); ++i)
    buffer.data()[i] = static_cast<std::byte>(i * 2654435761U >> 24);
  auto file = tl::File::open(engine, path, {.mode = tl::Mode::write});
  if (!file) return std::unexpected(file.error());
  if (auto written = file->pwrite(buffer.span(), 0); !written) return std::unexpected(written.error());
  return file->sync();  // durable from here on
}

tl::Status read_in_pieces(const tl::Engine& engine, const std::string& path, const tl::Buffer& buffer) {
  auto file = tl::File::open(engine, path);
  if (!file) return std::unexpected(file.error());
  std::vector<tl::Future> pieces;
  for (std::uint64_t offset = 0; offset < buffer.size(); offset += kPiece) {
    const auto bytes = std::min(kPiece, buffer.size() - offset);
    pieces.push_back(file->async_pread(buffer.span().subspan(offset, bytes), offset));
  }
  // Other work could go on here. The buffer must stay until every piece is done, also when one of them fails.
  if (auto moved = tl::wait_all(pieces); !moved) return std::unexpected(moved.error());
  return file->close();
}

tl::Status roundtrip(const std::string& path) {
  auto engine = tl::Engine::create();
  if (!engine) return std::unexpected(engine.error());
  auto source = engine->allocate(kBytes);  // page-aligned, of the engine's budget
  if (!source) return std::unexpected(source.error());
  auto target = engine->allocate(kBytes);
  if (!target) return std::unexpected(target.error());

  if (auto status = write_pattern(*engine, path, *source); !status) return status;
  if (auto status = read_in_pieces(*engine, path, *target); !status) return status;
  if (!std::ranges::equal(source->span(), target->span())) {
    return std::unexpected(
        tl::make_error(tl::ErrorKind::corrupt, path + " was not read back as written", path));
  }

  auto way = engine->explain(path);
  if (!way) return std::unexpected(way.error());
  std::printf("%s, read back equal: backend %s, %s I/O (%s)\n", tl::format_bytes(kBytes).c_str(),
              way->backend.c_str(), way->direct ? "direct" : "buffered", way->why.c_str());
  for (const auto& [what, why] : way->refused)
    std::printf("  not used: %s (%s)\n", what.c_str(), why.c_str());
  const auto stats = engine->stats();
  std::printf("  %llu bytes direct, %llu through a bounce buffer, %llu through the page cache\n",
              static_cast<unsigned long long>(stats.bytes_direct),
              static_cast<unsigned long long>(stats.bytes_bounced),
              static_cast<unsigned long long>(stats.bytes_buffered));
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  const std::string path = std::string(argc > 1 ? argv[1] : ".") + "/trunkline-roundtrip.bin";
  const auto status = roundtrip(path);
  ::unlink(path.c_str());
  if (!status) {
    std::fprintf(stderr, "roundtrip: %s\n", status.error().message.c_str());
    return 1;
  }
  return 0;
}
