// The Python class FileLayout.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "buffer_view.h"
#include "file_object.h"
#include "format/pt_archive.h"
#include "tensor_file/file_layout.h"

namespace trunkline::python {

// A FileLayout, and the Python memory that its extents are in.
class FileLayoutObject {
 public:
  FileLayoutObject(nanobind::handle path, nanobind::handle bytes);
  FileLayoutObject(std::string path, std::uint64_t bytes);
  FileLayoutObject(const FileLayoutObject&) = delete;
  FileLayoutObject& operator=(const FileLayoutObject&) = delete;
  ~FileLayoutObject() = default;

  // Memory to write from, and memory to read into. Empty buffers are ignored. Copies of GPU memory come after
  // the work that its stream holds now.
  void add(nanobind::handle offset, nanobind::handle buffer, nanobind::handle stream);
  void add_target(nanobind::handle offset, nanobind::handle buffer, bool fresh);

  // All of a `.pt` file. `addresses`: of the payloads in main memory, which `owner` keeps alive; 0 for those
  // that are added one by one.
  void add_archive(const std::shared_ptr<const format::ArchiveLayout>& layout,
                   const std::vector<std::uint64_t>& addresses, nanobind::handle owner);

  // Main memory to read into, which `owner` keeps alive.
  void add_targets(const std::vector<std::uint64_t>& offsets, const std::vector<std::uint64_t>& sizes,
                   const std::vector<std::uint64_t>& addresses, nanobind::handle owner);

  // A part of memory to read into, `fresh` as above, and checksums to compare with.
  void add_target_part(std::uint64_t offset, const std::shared_ptr<BufferView>& view,
                       std::pair<std::uint64_t, std::uint64_t> part, bool fresh);
  void expect_checksums(std::span<const std::uint32_t> crc32c, std::uint64_t chunk_bytes);
  // The same for those chunks only in which memory has been added.
  void expect_checksums_of_targets(std::span<const std::uint32_t> crc32c, std::uint64_t chunk_bytes);

  // The open file to read, instead of opening `path`.
  void set_source(const FileObject& file, bool keep_open) {
    source_ = file.file();
    keep_open_ = keep_open;
  }
  const std::optional<File>& source() const { return source_; }
  bool keep_open() const { return keep_open_; }

  std::uint32_t add_checksum(nanobind::handle kind, nanobind::handle begin, nanobind::handle end,
                             nanobind::handle expected);
  void add_checksum_field(nanobind::handle offset, nanobind::handle checksum, nanobind::handle encoding);

  const tensor_file::FileLayout& layout() const { return layout_; }
  bool only_targets() const { return only_targets_; }

 private:
  struct Added {
    nanobind::handle buffer;
    nanobind::handle stream;
    Access access;
    bool fresh;
  };
  void add_view(nanobind::handle offset, const Added& added);

  tensor_file::FileLayout layout_;
  bool only_targets_ = true;
  std::optional<File> source_;
  bool keep_open_ = false;
  std::vector<std::shared_ptr<BufferView>> views_;
  std::vector<std::shared_ptr<const format::ArchiveLayout>> layouts_;
  std::vector<nanobind::object> owners_;
};

}  // namespace trunkline::python
