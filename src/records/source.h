// What scanners read from: a file, or memory in tests and where a sample is parsed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "trunkline/error.h"

namespace trunkline::records {

class Source {
 public:
  Source() = default;
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;
  virtual ~Source() = default;

  virtual std::uint64_t size() const = 0;

  // Reads all of `memory`. The range must be within the size; end_of_file if the file has become shorter.
  virtual Status read(std::uint64_t offset, std::span<std::byte> memory) = 0;

  // Whether reads that follow are far apart, so that reading ahead would be a waste.
  virtual void expect_random(bool random) { static_cast<void>(random); }
};

class MemorySource : public Source {
 public:
  explicit MemorySource(std::span<const std::byte> bytes) : bytes_(bytes) {}

  std::uint64_t size() const override { return bytes_.size(); }
  Status read(std::uint64_t offset, std::span<std::byte> memory) override;

 private:
  std::span<const std::byte> bytes_;
};

Result<std::unique_ptr<Source>> open_source(const std::string& path);

}  // namespace trunkline::records
