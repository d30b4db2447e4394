#include "tensor_file/file_set.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <future>
#include <tuple>
#include <utility>

#include "base/creation_error.h"
#include "base/log.h"
#include "base/trace.h"
#include "io/file/file_core.h"
#include "io/file/open_members.h"
#include "os/durable.h"
#include "os/fork_generation.h"
#include "os/same_file.h"

namespace trunkline::tensor_file {
namespace {

constexpr trace::Kind kStage{"stage", trace::Category::checkpoint};
constexpr trace::Kind kFinish{"write, sync and name the files", trace::Category::checkpoint};

}  // namespace

FileSet::FileSet(const Engine& engine, const FileSetOptions& options)
    : engine_(engine), options_(options), generation_(os::fork_generation()) {}

Result<std::unique_ptr<FileSet>> FileSet::create(const Engine& engine, std::vector<FileLayout> layouts,
                                                 const FileSetOptions& options) {
  std::unique_ptr<FileSet> set(new FileSet(engine, options));
  std::vector<FileWriter::Target> targets;
  if (!options.access_of.empty()) set->access_ = os::FileAccess::of(options.access_of);
  for (FileLayout& layout : layouts) {
    auto file = set->create_file(layout);
    if (!file) return std::unexpected(file.error());
    targets.push_back({.file = std::move(*file), .layout = std::move(layout)});
  }
  set->writer_ = std::make_unique<FileWriter>(engine, std::move(targets), options.write);
  return set;
}

FileSet::~FileSet() {
  if (generation_ != os::fork_generation()) {
    std::ignore = writer_.release();  // its threads and transfers are the parent's
    return;
  }
  discard();
}

Result<File> FileSet::create_file(const FileLayout& layout) {
  OutputFile output;
  mode_t mode = 0666;
  if (options_.replace) {
    auto replaced = os::ReplacedFile::find(layout.path, "save to " + layout.path);
    if (!replaced) return std::unexpected(replaced.error());
    output.path = replaced->path();
    mode = replaced->create_mode();
    output.is_new = !replaced->exists();
    output.replaced = std::make_unique<os::ReplacedFile>(std::move(*replaced));
  } else {
    output.path = layout.path;
  }
  if (output.is_new && access_) mode = os::FileAccess::kCreateMode;
  output.directory = os::directory_of(output.path);
  if (options_.replace &&
      std::ranges::find(outputs_, output.directory, &OutputFile::directory) == outputs_.end())
    os::remove_dead_temporary_files_sometimes(output.directory);
  for (;;) {
    output.written = options_.replace ? os::temporary_name(output.directory) : output.path;
    auto file = io::open_members(engine_, {output.written}, {}, {.mode = Mode::create}, output.written, mode);
    if (file) {
      if (auto claimed = claim(output, *file); !claimed) {
        ::unlink(output.written.c_str());
        return std::unexpected(claimed.error());
      }
      if (output.claim && output.claim->lost()) {
        output.claim.reset();  // the file that it replaces must still be known
        output.claimed.reset();
        continue;
      }
      outputs_.push_back(std::move(output));
      return file;
    }
    if (options_.replace && file.error().code == EEXIST) continue;
    Error error = file.error();
    if (options_.replace && error.code != 0) {
      error = creation_error(
          error.code, fmt::format("save {}: cannot create a file in {}", layout.path, output.directory),
          layout.path, output.directory);
    }
    return std::unexpected(std::move(error));
  }
}

// Through a separate descriptor, since the file is closed before it gets its name: some filesystems only then
// send the last bytes.
Status FileSet::claim(OutputFile& output, const File& file) const {
  // Files of the memory backend have no names that others can see.
  if (engine_.config().backend == BackendKind::memory) return {};
  const int fd = file.core()->members.front().pair.buffered.get();
  output.claimed.reset(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!output.claimed.valid()) {
    return std::unexpected(creation_error(
        errno, fmt::format("save {}: cannot create a file in {}", output.path, output.directory), output.path,
        output.directory));
  }
  if (options_.replace) output.claim = std::make_unique<os::WriterClaim>(output.claimed.get());
  return {};
}

void FileSet::OutputFile::release() {
  claim.reset();
  claimed.reset();
  replaced.reset();
}

Status FileSet::stage() {
  const trace::Span span(kStage);
  return ended(writer_->stage());
}

Status FileSet::finish() {
  const trace::Span span(kFinish);
  Status status = ended(write_files());
  if (!status) {
    log::info(log::Component::tensor_file, "saving failed: {}", status.error().message);
  } else if (!outputs_.empty()) {
    log::debug(log::Component::tensor_file, "saved {}{} ({} bytes)", outputs_.front().path,
               outputs_.size() > 1 ? fmt::format(" and {} more files", outputs_.size() - 1) : std::string(),
               writer_->bytes_total());
  }
  return status;
}

// The error names the final file, not the temporary one, which is removed.
Status FileSet::ended(Status status) {
  if (status) return status;
  for (const OutputFile& output : outputs_) {
    Error& error = status.error();
    if (!options_.replace || output.written.empty() || error.path != output.written) continue;
    error.path = output.path;
    error.message = fmt::format("saving {}: {}", output.path, error.message);
  }
  discard();
  return status;
}

Status FileSet::write_files() {
  // 1. All bytes are in the files.
  if (auto written = writer_->finish(); !written) return written;
  // 2. They have the owners, modes and attributes of the files that they replace.
  if (auto copied = copy_attributes(); !copied) return copied;
  // 3. Sync everything to the device before any name leads to it; a failed fsync is not repeated (ATC 2020).
  if (options_.durable) {
    if (auto synced = sync_files(); !synced) return synced;
  }
  // 4. Give them their names, each in one step.
  if (auto named = name_files(); !named) return named;
  // 5. Sync the names to the device.
  if (options_.durable) {
    if (auto synced = sync_directories(); !synced) return synced;
  }
  // 6. Check that the names that nobody else replaces still lead to what was written.
  return check_names();
}

Status FileSet::copy_attributes() {
  for (OutputFile& output : outputs_) {
    if (auto copied = output.copy_attributes(); !copied) return std::unexpected(copied.error());
    if (access_ && output.is_new && output.claimed.valid()) access_->give_to(output.claimed.get());
  }
  access_.reset();
  return {};
}

Result<bool> FileSet::OutputFile::copy_attributes() {
  return replaced && claimed.valid() ? replaced->copy_attributes_to(claimed.get()) : Result<bool>(false);
}

// Saving takes a while: meanwhile, this process or others may have lost access.
Status FileSet::check_again(OutputFile& output) const {
  const auto changed = output.copy_attributes();
  if (!changed) return std::unexpected(changed.error());
  if (!*changed || !options_.durable || ::fsync(output.claimed.get()) == 0) return {};
  return std::unexpected(system_error(errno, "fsync " + output.written, output.written));
}

// All concurrently: the files may be on several disks.
Status FileSet::sync_files() {
  std::vector<std::future<Status>> others;
  for (std::size_t i = 1; i < outputs_.size(); ++i) {
    others.push_back(std::async(std::launch::async, [this, i] { return writer_->file(i).sync(); }));
  }
  Status first = outputs_.empty() ? Status{} : writer_->file(0).sync();
  for (auto& other : others) {
    if (auto status = other.get(); !status && first) first = std::move(status);
  }
  return first;
}

Status FileSet::name_files() {
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    OutputFile& output = outputs_[i];
    if (auto closed = writer_->file(i).close(); !closed) return closed;
    if (auto checked = check_again(output); !checked) return checked;
    // Someone may have moved the directory to another disk, or copied it and swapped the two: then the copy
    // has an incomplete file.
    if (output.claimed.valid()) {
      if (auto same = os::check_leads_to(output.written, output.claimed.get()); !same) return same;
    }
    if (options_.replace && ::rename(output.written.c_str(), output.path.c_str()) != 0) {
      return std::unexpected(
          system_error(errno, fmt::format("rename {} to {}", output.written, output.path), output.path));
    }
    if (options_.replace) output.written.clear();
    output.claim.reset();
    output.replaced.reset();
  }
  return {};
}

Status FileSet::check_names() {
  for (OutputFile& output : outputs_) {
    if (options_.replace || !output.claimed.valid()) continue;  // another save may have replaced it since
    if (auto same = os::check_leads_to(output.path, output.claimed.get()); !same) return same;
  }
  for (OutputFile& output : outputs_) {
    // Files that were created under their own names are kept only now, when everything has succeeded.
    output.written.clear();
    output.release();
  }
  return {};
}

Status FileSet::sync_directories() {
  std::vector<std::string> directories;
  for (const OutputFile& output : outputs_) directories.push_back(output.directory);
  std::ranges::sort(directories);
  const auto repeated = std::ranges::unique(directories);
  directories.erase(repeated.begin(), repeated.end());
  for (const std::string& directory : directories) {
    if (auto synced = os::fsync_directory(directory); !synced) return synced;
  }
  return {};
}

void FileSet::discard() {
  if (writer_) writer_->stop();
  access_.reset();
  for (OutputFile& output : outputs_) {
    if (!output.written.empty()) ::unlink(output.written.c_str());
    output.written.clear();
    output.release();
  }
}

}  // namespace trunkline::tensor_file
