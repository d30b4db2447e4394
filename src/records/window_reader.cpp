#include "records/window_reader.h"

#include <algorithm>

namespace trunkline::records {

namespace {
constexpr std::size_t kSmallReadBytes = 512;
}

WindowReader::WindowReader(Source& source, std::size_t window_bytes)
    : source_(source), size_(source.size()), window_bytes_(window_bytes) {}

Result<std::span<const std::byte>> WindowReader::fill(std::uint64_t offset, std::size_t bytes) {
  // Small records lie in one window with others, so that the next window begins where the last one ended.
  const std::uint64_t end = begin_ + filled_;
  distance_ = (3 * distance_ + (offset > end ? offset - end : 0)) / 4;
  const bool random = distance_ > window_bytes_ / 2;
  if (random != random_) source_.expect_random(random);
  random_ = random;
  const std::size_t wanted = std::max(bytes, random ? kSmallReadBytes : window_bytes_);
  const auto read = static_cast<std::size_t>(std::min<std::uint64_t>(wanted, size_ - offset));
  window_.resize(std::max(window_.size(), read));
  filled_ = 0;
  if (Status status = source_.read(offset, std::span(window_).first(read)); !status)
    return std::unexpected(std::move(status.error()));
  begin_ = offset;
  filled_ = read;
  return std::span<const std::byte>(window_).first(bytes);
}

}  // namespace trunkline::records
