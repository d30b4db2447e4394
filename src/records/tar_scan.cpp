#include "records/tar_scan.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "records/tar_members.h"
#include "records/window_reader.h"

namespace trunkline::records {
namespace {

std::string lower_case(std::string_view text) {
  std::string lower(text);
  for (char& each : lower)
    if (each >= 'A' && each <= 'Z') each = static_cast<char>(each - 'A' + 'a');
  return lower;
}

class Scanner {
 public:
  Scanner(Source& source, const std::string& path, const ScanOptions& options)
      : path_(path), options_(options), reader_(source), members_(reader_, path) {}

  Result<Ranges> run() {
    while (true) {
      if (stopped(options_)) return std::unexpected(stopped_error(path_));
      Result<std::optional<TarMember>> member = members_.next();
      if (!member) {
        if (members_.has_end_marker()) flush();  // the samples of the archive that has ended are whole
        return lose_rest(std::move(member.error()));
      }
      const std::optional<TarMember>& found = *member;
      if (!found) break;
      if (Status status = add(*found); !status) return std::unexpected(std::move(status.error()));
    }
    if (!members_.has_end_marker()) {
      return lose_rest(error_at(ErrorKind::corrupt, members_.offset(),
                                reader_.size() == 0
                                    ? "the file is empty, not a tar archive; restore or remove it"
                                    : "the file ends without the two blocks of zeros that end an archive: it "
                                      "is probably truncated"));
    }
    flush();
    if (Status status = check_keys(); !status) return std::unexpected(std::move(status.error()));
    return std::move(found_);
  }

 private:
  Error error_at(ErrorKind kind, std::uint64_t offset, std::string_view why) const {
    return make_error(kind, fmt::format("{}: at byte {}: {}", path_, offset, why), path_);
  }

  // Of an error at or after the current sample, to which more may have belonged.
  Result<Ranges> lose_rest(Error error) {
    if (options_.on_damage == OnDamage::fail || !is_damage(error)) return std::unexpected(std::move(error));
    found_.skipped.push_back({key_ ? begin_ : members_.offset(), std::move(error.message)});
    if (Status status = check_keys(); !status) return std::unexpected(std::move(status.error()));
    return std::move(found_);
  }

  Status skip(std::uint64_t offset, Error error) {
    if (options_.on_damage == OnDamage::fail) return std::unexpected(std::move(error));
    found_.skipped.push_back({offset, std::move(error.message)});
    return {};
  }

  Status add(const TarMember& member) {
    const auto name = sample_name(member.name);
    if (!name) return {};
    if (!key_ || *key_ != name->key || archive_ != member.archive) {
      flush();
      key_ = std::string(name->key);
      archive_ = member.archive;
      begin_ = member.begin;
    }
    end_ = member.end();
    const std::string extension = lower_case(name->extension);
    const bool is_first = extensions_.insert(extension).second;
    if (!is_good_ || (is_first && !member.is_link)) return {};
    is_good_ = false;
    if (member.is_link) {
      return skip(begin_,
                  error_at(ErrorKind::unsupported, member.begin,
                           fmt::format("the member {:?} is a link, whose data are elsewhere; make the "
                                       "archive with tar --hard-dereference --dereference",
                                       member.name)));
    }
    return skip(begin_, error_at(ErrorKind::format, member.begin,
                                 fmt::format("the sample {:?} has two members {:?}", *key_, extension)));
  }

  void flush() {
    if (key_ && is_good_) {
      found_.offsets.push_back(begin_);
      found_.lengths.push_back(end_ - begin_);
      keys_.emplace_back(std::hash<std::string>()(*key_), keys_.size());
    }
    key_.reset();
    is_good_ = true;
    extensions_.clear();
  }

  // Reports samples of one key in several places, which a loader would take for samples with parts missing.
  Status check_keys() {
    std::ranges::sort(keys_);
    std::vector<bool> again(keys_.size());
    for (std::size_t index = 1; index < keys_.size(); ++index)
      if (keys_[index].first == keys_[index - 1].first) again[keys_[index].second] = true;
    std::size_t kept = 0;
    for (std::size_t sample = 0; sample < again.size(); ++sample) {
      const std::uint64_t offset = found_.offsets[sample];
      if (again[sample]) {
        Status status =
            skip(offset, error_at(ErrorKind::format, offset,
                                  "a sample continues here that began before others: the members of "
                                  "a sample must be adjacent (tar --sort=name)"));
        if (!status) return status;
        continue;
      }
      found_.offsets[kept] = offset;
      found_.lengths[kept++] = found_.lengths[sample];
    }
    found_.offsets.resize(kept);
    found_.lengths.resize(kept);
    return {};
  }

  const std::string& path_;
  const ScanOptions& options_;
  WindowReader reader_;
  TarMembers members_;
  Ranges found_;
  std::vector<std::pair<std::size_t, std::size_t>> keys_;  // hash of the key, and number, of each sample
  // The sample that the last member belongs to.
  std::optional<std::string> key_;
  unsigned archive_ = 0;
  std::set<std::string> extensions_;
  std::uint64_t begin_ = 0;
  std::uint64_t end_ = 0;
  bool is_good_ = true;
};

}  // namespace

Result<Ranges> scan_tar(Source& source, const std::string& path, const ScanOptions& options) {
  return Scanner(source, path, options).run();
}

Result<TarSample> parse_tar_sample(std::span<const std::byte> bytes, const std::string& path) {
  MemorySource source(bytes);
  WindowReader reader(source, 512);
  TarMembers members(reader, path);
  TarSample sample;
  while (true) {
    Result<std::optional<TarMember>> member = members.next();
    if (!member) return std::unexpected(std::move(member.error()));
    const std::optional<TarMember>& found = *member;
    if (!found) break;
    const auto name = sample_name(found->name);
    if (!name) continue;
    if (found->is_link) {
      return std::unexpected(
          make_error(ErrorKind::corrupt,
                     fmt::format("{}: holds the link {:?} in a sample: it was modified after it was indexed",
                                 path, found->name),
                     path));
    }
    if (sample.members.empty()) sample.key = name->key;
    if (sample.key != name->key) {
      return std::unexpected(make_error(
          ErrorKind::corrupt,
          fmt::format(
              "{}: holds members of {:?} and {:?} in one sample: it was modified after it was indexed", path,
              sample.key, name->key),
          path));
    }
    sample.members.push_back({lower_case(name->extension), found->data, found->bytes});
  }
  if (sample.members.empty()) {
    return std::unexpected(make_error(
        ErrorKind::corrupt,
        fmt::format("{}: has no sample where there was one: it was modified after it was indexed", path),
        path));
  }
  return sample;
}

}  // namespace trunkline::records
