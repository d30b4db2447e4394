// Files that are written completely and appear only when complete.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "os/access.h"
#include "os/replaced_file.h"
#include "os/temporary_file.h"
#include "os/unique_fd.h"
#include "tensor_file/file_writer.h"
#include "trunkline/engine.h"

namespace trunkline::tensor_file {

struct FileSetOptions {
  // fsync the files before they get their names, and the directories after.
  bool durable = true;
  // Files get a temporary name first and at the end replace the file of their name, keeping its mode, owner,
  // group and extended attributes (os/replaced_file.h); files that dead writers left under temporary names in
  // the same directory are removed, now or at a later save. Otherwise they are created under their own names,
  // which must not exist: for names that nothing refers to until something else is written.
  bool replace = true;
  // A file whose owner, group, mode and ACL the new ones get that replace none: they take its place under
  // other names. Empty or missing: they are as any new files.
  std::string access_of = {};
  WriteOptions write = {};
};

// One save: each file of the set is, for every reader and after every crash, either the old or the new one.
// Of several files some may be new while others are still old.
//
// stage() and finish() from one thread, in this order; the rest from any thread. When one of them fails, and
// at destruction before finish(), what was written is removed, and files and staging memory are released: an
// error may be kept long after, along with everything that led to it.
class FileSet {
 public:
  // Creates the files. `layouts` are arranged.
  static Result<std::unique_ptr<FileSet>> create(const Engine& engine, std::vector<FileLayout> layouts,
                                                 const FileSetOptions& options);
  FileSet(const FileSet&) = delete;
  FileSet& operator=(const FileSet&) = delete;
  ~FileSet();

  // Once it returns, the layouts' memory is not read any more if options.write.stage_all is set; otherwise
  // only after finish().
  Status stage();

  // On success all files are written, durable, and under their names. After an error some files may already
  // have their names: each is complete, and the file that it replaced is gone.
  Status finish();

  void cancel() { writer_->cancel(); }

  // Does now what the destructor does. No effect after finish() or an error. Not while stage() or finish()
  // runs.
  void discard();

  std::uint64_t bytes_total() const { return writer_->bytes_total(); }
  std::uint64_t bytes_done() const { return writer_->bytes_done(); }
  const std::vector<std::uint32_t>& checksums(std::size_t layout) const { return writer_->checksums(layout); }

 private:
  struct OutputFile {
    std::string path;       // the file's final path
    std::string directory;  // of it
    std::string written;    // the file's current path; empty once it has its name
    // The written file, also after it is closed. With `replace` the claim to the temporary name lasts until
    // the file has its own.
    os::UniqueFd claimed = {};
    std::unique_ptr<os::WriterClaim> claim = {};  // ends before the descriptor
    std::unique_ptr<os::ReplacedFile> replaced = {};
    bool is_new = true;  // there is no file of that name

    Result<bool> copy_attributes();
    void release();
  };

  FileSet(const Engine& engine, const FileSetOptions& options);
  Result<File> create_file(const FileLayout& layout);
  Status copy_attributes();
  Status claim(OutputFile& output, const File& file) const;
  Status write_files();
  Status ended(Status status);
  Status sync_files();
  Status check_again(OutputFile& output) const;
  Status name_files();
  Status check_names();
  Status sync_directories();

  const Engine engine_;
  const FileSetOptions options_;
  const unsigned generation_;  // a forked child must not remove its parent's files
  std::optional<os::FileAccess> access_;
  std::vector<OutputFile> outputs_;
  std::unique_ptr<FileWriter> writer_;
};

}  // namespace trunkline::tensor_file
