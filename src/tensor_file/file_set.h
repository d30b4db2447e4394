// Files that are written whole and appear whole.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "os/replaced_file.h"
#include "os/temporary_file.h"
#include "os/unique_fd.h"
#include "tensor_file/file_writer.h"
#include "trunkline/engine.h"

namespace trunkline::tensor_file {

struct FileSetOptions {
  // fsync of the files before they get their names, and of the directories after.
  bool durable = true;
  // Files get a temporary name first and replace what has theirs at the end, with its mode, owner, group and
  // extended attributes (os/replaced_file.h); what writers that died left under such names in the same
  // directory is removed. Else they are created under their own names, which
  // must be free: for names that nothing refers to until something else is written.
  bool replace = true;
  WriteOptions write = {};
};

// One save: each file of the set is, for every reader and after every crash, the old one or the new one. Of
// several files some may be new when the others are not.
//
// stage() and finish() from one thread, in this order; the rest from any. When one of them fails, and at its
// destruction before finish(), what was written is removed, and files and staging memory are given back: an
// error may be kept long after, with everything that led to it.
class FileSet {
 public:
  // Creates the files. `layouts` are arranged.
  static Result<std::unique_ptr<FileSet>> create(const Engine& engine, std::vector<FileLayout> layouts,
                                                 const FileSetOptions& options);
  FileSet(const FileSet&) = delete;
  FileSet& operator=(const FileSet&) = delete;
  ~FileSet();

  // Once it returns, the layouts' memory is not read any more if options.write.stage_all; else after
  // finish().
  Status stage();

  // Everything is written, durable, and under its name. After an error some files may have their names all
  // the same: each is whole, and what it replaced is gone.
  Status finish();

  void cancel() { writer_->cancel(); }

  // What the destructor does, now. Nothing after finish() or an error. Not while stage() or finish() runs.
  void discard();

  std::uint64_t bytes_total() const { return writer_->bytes_total(); }
  std::uint64_t bytes_done() const { return writer_->bytes_done(); }
  const std::vector<std::uint32_t>& checksums(std::size_t layout) const { return writer_->checksums(layout); }

 private:
  struct Place {
    std::string path;       // where the file is to be
    std::string directory;  // of it
    std::string written;    // where it is now; empty once it has its name
    // What was written, also after the file is closed. With `replace` the claim to a temporary name goes on
    // until it has its own.
    os::UniqueFd claimed = {};
    std::unique_ptr<os::WriterClaim> claim = {};  // ends before the descriptor
    std::unique_ptr<os::ReplacedFile> replaced = {};

    Result<bool> copy_attributes();
    void release();
  };

  FileSet(const Engine& engine, const FileSetOptions& options);
  Result<File> create_file(const FileLayout& layout);
  Status claim(Place& place, const File& file) const;
  Status write_files();
  Status ended(Status status);
  Status sync_files();
  Status check_again(Place& place) const;
  Status name_files();
  Status check_names();
  Status sync_directories();

  const Engine engine_;
  const FileSetOptions options_;
  const unsigned generation_;  // a forked child must not remove what its parent writes
  std::vector<Place> places_;
  std::unique_ptr<FileWriter> writer_;
};

}  // namespace trunkline::tensor_file
