// Reads headers that are spread over a file: in windows while they are close together, each alone where not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "records/source.h"
#include "trunkline/error.h"

namespace trunkline::records {

class WindowReader {
 public:
  static constexpr std::size_t kWindowBytes = std::size_t{64} << 10;

  explicit WindowReader(Source& source, std::size_t window_bytes = kWindowBytes);

  std::uint64_t size() const { return size_; }

  // The bytes at `offset`, which must be within the file; valid until the next call.
  Result<std::span<const std::byte>> at(std::uint64_t offset, std::size_t bytes) {
    if (offset >= begin_ && offset - begin_ <= filled_ && filled_ - (offset - begin_) >= bytes)
      return std::span<const std::byte>(window_).subspan(static_cast<std::size_t>(offset - begin_), bytes);
    return fill(offset, bytes);
  }

 private:
  Result<std::span<const std::byte>> fill(std::uint64_t offset, std::size_t bytes);

  Source& source_;
  const std::uint64_t size_;
  const std::size_t window_bytes_;
  std::vector<std::byte> window_;
  std::uint64_t begin_ = 0;     // of the window in the file
  std::size_t filled_ = 0;      // bytes of the window
  std::uint64_t distance_ = 0;  // between the end of a window and the next one that was wanted, on average
  bool random_ = false;
};

}  // namespace trunkline::records
