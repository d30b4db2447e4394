#include "trunkline/file.h"

#include "io/engine_core.h"
#include "io/file/file_core.h"
#include "io/file/open_members.h"
#include "io/operation.h"

namespace trunkline {
namespace {

Future start(Op op, const File& file, MemoryView memory, std::uint64_t offset, Keepalive keepalive) {
  auto engine = file.core()->engine();
  if (!engine) return Future(Operation::failed(engine.error()));
  const Request request{
      .op = op, .file = &file, .memory = memory, .offset = offset, .keepalive = std::move(keepalive)};
  return engine->submit({&request, 1}).front();
}

Result<std::uint64_t> move(Op op, const std::shared_ptr<FileCore>& core, const MemoryView& memory,
                           std::uint64_t offset) {
  auto engine = core->engine();
  if (!engine) return std::unexpected(engine.error());
  return engine->core()->run(op, core, memory, offset);
}

}  // namespace

Result<File> File::open(const Engine& engine, const std::string& path, const OpenOptions& options) {
  return io::open_members(engine, {path}, {}, options, path);
}

Result<File> File::open(const std::string& path, const OpenOptions& options) {
  return io::open_members(std::nullopt, {path}, {}, options, path);
}

const std::string& File::path() const { return core_->name; }

Mode File::mode() const { return core_->options.mode; }

Result<std::uint64_t> File::pread(MemoryView memory, std::uint64_t offset) const {
  return move(Op::read, core_, memory, offset);
}

Result<std::uint64_t> File::pwrite(MemoryView memory, std::uint64_t offset) const {
  return move(Op::write, core_, memory, offset);
}

Future File::async_pread(MemoryView memory, std::uint64_t offset, Keepalive keepalive) const {
  return start(Op::read, *this, memory, offset, std::move(keepalive));
}

Future File::async_pwrite(MemoryView memory, std::uint64_t offset, Keepalive keepalive) const {
  return start(Op::write, *this, memory, offset, std::move(keepalive));
}

Future File::async_read_ranges(MemoryView memory, std::vector<FileRange> ranges, Keepalive keepalive) const {
  auto engine = core_->engine();
  if (!engine) return Future(Operation::failed(engine.error()));
  Request request{.memory = memory, .keepalive = std::move(keepalive)};
  request.ranges = std::make_shared<const FileRanges>(FileRanges{{*this}, std::move(ranges)});
  return engine->submit({&request, 1}).front();
}

Result<std::uint64_t> File::read_ranges(MemoryView memory, std::vector<FileRange> ranges) const {
  return async_read_ranges(memory, std::move(ranges)).result();
}

Result<std::uint64_t> File::size() const { return core_->size(); }

Status File::truncate(std::uint64_t bytes) const { return core_->truncate(bytes); }

Status File::sync() const { return core_->sync(); }

std::uint64_t File::pending() const { return core_->pending(); }

Status File::close() const { return core_->close(); }

}  // namespace trunkline
