#include "format/pt_archive.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace trunkline::format {
namespace {

TEST(PtArchive, PiecesAndPayloadsCoverTheWholeFile) {
  ArchiveBuilder builder;
  builder.add_record("archive/data.pkl", "N.");
  const std::vector<std::uint64_t> sizes = {0, 1, 64, kLargePayload - 1, kLargePayload, 5'000'000'000, 0, 3};
  for (std::size_t i = 0; i < sizes.size(); ++i)
    builder.add_payload("archive/data/" + std::to_string(i), sizes[i]);
  builder.add_record("archive/version", "3\n");
  const ArchiveLayout layout = std::move(builder).finish();
  ASSERT_EQ(layout.payloads.size(), sizes.size());
  std::uint64_t end = 0;
  auto payload = layout.payloads.begin();
  for (const ArchivePiece& piece : layout.pieces) {
    while (payload != layout.payloads.end() && payload->offset < piece.offset) {
      if (payload->bytes > 0) {
        EXPECT_EQ(payload->offset, end);
        end += payload->bytes;
        EXPECT_EQ(payload->descriptor_crc_at, end + 4);
      }
      ++payload;
    }
    EXPECT_EQ(piece.offset, end);
    end += piece.bytes.size();
  }
  EXPECT_EQ(end, layout.bytes);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    EXPECT_EQ(layout.payloads[i].bytes, sizes[i]);
    if (sizes[i] == 0) continue;
    const bool large = sizes[i] >= kLargePayload;
    EXPECT_EQ(layout.payloads[i].offset % (large ? kLargePayloadAlignment : kPayloadAlignment), 0U);
    EXPECT_GT(layout.payloads[i].entry_crc_at, layout.payloads.back().offset);
  }
}

}  // namespace
}  // namespace trunkline::format
