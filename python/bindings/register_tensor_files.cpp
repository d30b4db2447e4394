#include <fmt/format.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "arguments.h"
#include "base/digest.h"
#include "bindings.h"
#include "engine_object.h"
#include "errors.h"
#include "file_layout_object.h"
#include "format/pt_archive.h"
#include "interruptible.h"
#include "os/durable.h"
#include "os/fork_generation.h"
#include "os/local_filesystem.h"
#include "os/replaced_file.h"
#include "os/same_file.h"
#include "tensor_file/file_reader.h"
#include "tensor_file/file_set.h"
#include "trunkline/checksum.h"

namespace trunkline::python {

using namespace nb::literals;

namespace {

std::uint32_t checksum_argument(nb::handle value, const char* name) {
  const std::uint64_t given = count_argument(value, name);
  if (given > std::numeric_limits<std::uint32_t>::max())
    raise_value_error(std::string(name) + ": must be less than 2^32");
  return static_cast<std::uint32_t>(given);
}

}  // namespace

FileLayoutObject::FileLayoutObject(nb::handle path, nb::handle bytes) {
  layout_.path = path_argument(path, "path");
  layout_.bytes = count_argument(bytes, "nbytes");
}

FileLayoutObject::FileLayoutObject(std::string path, std::uint64_t bytes) {
  layout_.path = std::move(path);
  layout_.bytes = bytes;
}

void FileLayoutObject::add_target_part(std::uint64_t offset, const std::shared_ptr<BufferView>& view,
                                       std::pair<std::uint64_t, std::uint64_t> part, bool fresh) {
  MemoryView memory = view->memory();
  memory.data += part.first;
  memory.bytes = part.second;
  if (memory.bytes == 0) return;
  Fence after;
  if (memory.device != nullptr) after = unwrap(memory.device->fence(memory.stream));
  layout_.extents.push_back({.offset = offset, .memory = memory, .fresh = fresh, .after = std::move(after)});
  if (views_.empty() || views_.back() != view) views_.push_back(view);
}

void FileLayoutObject::expect_checksums(std::span<const std::uint32_t> crc32c, std::uint64_t chunk_bytes) {
  for (std::size_t i = 0; i < crc32c.size(); ++i) {
    const std::uint64_t begin = i * chunk_bytes;
    layout_.checksums.push_back(
        {.begin = begin, .end = std::min(begin + chunk_bytes, layout_.bytes), .expected = crc32c[i]});
  }
}

void FileLayoutObject::expect_checksums_of_targets(std::span<const std::uint32_t> crc32c,
                                                   std::uint64_t chunk_bytes) {
  std::vector<bool> wanted(crc32c.size());
  for (const tensor_file::Extent& extent : layout_.extents) {
    for (std::uint64_t chunk = extent.offset / chunk_bytes; chunk * chunk_bytes < extent.end(); ++chunk)
      wanted[chunk] = true;
  }
  for (std::size_t chunk = 0; chunk < wanted.size(); ++chunk) {
    if (!wanted[chunk]) continue;
    const std::uint64_t begin = chunk * chunk_bytes;
    layout_.checksums.push_back(
        {.begin = begin, .end = std::min(begin + chunk_bytes, layout_.bytes), .expected = crc32c[chunk]});
  }
}

void FileLayoutObject::add_view(nb::handle offset, const Added& added) {
  const std::uint64_t at = count_argument(offset, "offset");
  auto view =
      std::make_unique<BufferView>(added.buffer, added.access, "buffer", Reach::devices, added.stream);
  const MemoryView& memory = view->memory();
  if (memory.bytes == 0) return;
  view->keep_storage();
  Fence after;
  if (memory.device != nullptr) after = unwrap(memory.device->fence(memory.stream));
  layout_.extents.push_back(
      {.offset = at, .memory = memory, .fresh = added.fresh, .after = std::move(after)});
  views_.push_back(std::move(view));
}

void FileLayoutObject::add(nb::handle offset, nb::handle buffer, nb::handle stream) {
  only_targets_ = false;
  add_view(offset, {.buffer = buffer, .stream = stream, .access = Access::read_only, .fresh = false});
}

void FileLayoutObject::add_target(nb::handle offset, nb::handle buffer, bool fresh) {
  const nb::object none = nb::none();
  add_view(offset, {.buffer = buffer, .stream = none, .access = Access::writable, .fresh = fresh});
}

std::uint32_t FileLayoutObject::add_checksum(nb::handle kind, nb::handle begin, nb::handle end,
                                             nb::handle expected) {
  tensor_file::Checksum checksum{.begin = count_argument(begin, "begin"), .end = count_argument(end, "end")};
  if (kind.equal(nb::str("crc32"))) {
    checksum.kind = tensor_file::ChecksumKind::crc32;
  } else if (!kind.equal(nb::str("crc32c"))) {
    raise_value_error("kind: must be \"crc32\" or \"crc32c\"");
  }
  if (!expected.is_none()) checksum.expected = checksum_argument(expected, "expected");
  layout_.checksums.push_back(checksum);
  return static_cast<std::uint32_t>(layout_.checksums.size() - 1);
}

void FileLayoutObject::add_checksum_field(nb::handle offset, nb::handle checksum, nb::handle encoding) {
  tensor_file::ChecksumField field{.offset = count_argument(offset, "offset"),
                                   .checksum = optional_count_argument(checksum, "checksum").value_or(0)};
  if (encoding.equal(nb::str("hex"))) {
    field.encoding = tensor_file::ChecksumEncoding::hex;
  } else if (!encoding.equal(nb::str("le32"))) {
    raise_value_error("encoding: must be \"le32\" or \"hex\"");
  }
  layout_.checksum_fields.push_back(field);
}

void FileLayoutObject::add_archive(const std::shared_ptr<const format::ArchiveLayout>& layout,
                                   const std::vector<std::uint64_t>& addresses, nb::handle owner) {
  if (addresses.size() != layout->payloads.size())
    raise_value_error("addresses: must be as many as the layout has payloads");
  only_targets_ = false;
  for (const format::ArchivePiece& piece : layout->pieces) {
    auto* bytes = reinterpret_cast<std::byte*>(const_cast<char*>(piece.bytes.data()));  // is only read
    layout_.extents.push_back({.offset = piece.offset, .memory = {bytes, piece.bytes.size()}});
  }
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    const format::ArchivePayload& payload = layout->payloads[i];
    if (payload.bytes == 0) continue;
    if (addresses[i] != 0) {
      auto* bytes = reinterpret_cast<std::byte*>(addresses[i]);  // NOLINT(performance-no-int-to-ptr)
      layout_.extents.push_back({.offset = payload.offset, .memory = {bytes, payload.bytes}});
    }
    const auto checksum = static_cast<std::uint32_t>(layout_.checksums.size());
    layout_.checksums.push_back({.kind = tensor_file::ChecksumKind::crc32,
                                 .begin = payload.offset,
                                 .end = payload.offset + payload.bytes});
    for (const std::uint64_t at : {payload.descriptor_crc_at, payload.entry_crc_at})
      layout_.checksum_fields.push_back(
          {.offset = at, .checksum = checksum, .encoding = tensor_file::ChecksumEncoding::le32});
  }
  layouts_.push_back(layout);
  owners_.push_back(nb::borrow(owner));
}

void FileLayoutObject::add_targets(const std::vector<std::uint64_t>& offsets,
                                   const std::vector<std::uint64_t>& sizes,
                                   const std::vector<std::uint64_t>& addresses, nb::handle owner) {
  if (sizes.size() != offsets.size() || addresses.size() != offsets.size())
    raise_value_error("offsets, sizes, addresses: must be equally many");
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    if (sizes[i] == 0) continue;
    auto* bytes = reinterpret_cast<std::byte*>(addresses[i]);  // NOLINT(performance-no-int-to-ptr)
    layout_.extents.push_back({.offset = offsets[i], .memory = {bytes, sizes[i]}});
  }
  owners_.push_back(nb::borrow(owner));
}

namespace {

// Threads that copy and checksum at a few GB/s each: enough for fast disks, and few beside a training.
constexpr unsigned kMaxCopiers = 4;

unsigned copiers(unsigned share) {
  return std::clamp(std::thread::hardware_concurrency() / share, 1U, kMaxCopiers);
}

std::vector<tensor_file::FileLayout> arranged(const std::vector<nb::object>& objects) {
  std::vector<tensor_file::FileLayout> layouts;
  for (const nb::object& object : objects) {
    if (!nb::isinstance<FileLayoutObject>(object))
      raise_type_error("layouts: must hold only FileLayout, not " + shown_type(object));
    layouts.push_back(nb::cast<FileLayoutObject&>(object).layout());
    unwrap(layouts.back().arrange());
  }
  return layouts;
}

std::vector<nb::object> listed(nb::handle layouts) {
  std::vector<nb::object> objects;
  for (const nb::handle layout : nb::borrow<nb::sequence>(layouts)) objects.push_back(nb::borrow(layout));
  return objects;
}

class FileSetObject {
 public:
  FileSetObject(nb::handle layouts, nb::handle engine, bool durable, bool replace, bool stage_all,
                nb::handle staging_bytes, nb::handle access_of)
      : layouts_(listed(layouts)), stage_all_(stage_all) {
    tensor_file::FileSetOptions options{.durable = durable, .replace = replace, .write = {}};
    if (!access_of.is_none()) options.access_of = path_argument(access_of, "access_of");
    options.write.stage_all = stage_all;
    options.write.copiers = copiers(stage_all ? 1 : 2);
    std::vector<tensor_file::FileLayout> wanted = arranged(layouts_);
    const Engine used = engine_or_default(engine);
    if (stage_all) options.write.staging_bytes = used.config().pinned_budget_bytes / 2;
    if (const auto bytes = optional_size_argument(staging_bytes, "staging_bytes"))
      options.write.staging_bytes = *bytes;
    set_ = unwrap(call_interruptibly([used, wanted = std::move(wanted), options]() mutable {
      return tensor_file::FileSet::create(used, std::move(wanted), options);
    }));
  }
  FileSetObject(const FileSetObject&) = delete;
  FileSetObject& operator=(const FileSetObject&) = delete;
  ~FileSetObject() {
    const GilReleased unlocked;  // waits for transfers in flight
    set_.reset();
  }

  void stage() {
    Status status = [&] {
      const GilReleased unlocked;
      return set_->stage();
    }();
    if (stage_all_ || !status) layouts_.clear();  // after an error nothing is read either
    unwrap(std::move(status));
  }
  void finish() {
    Status status = [&] {
      const GilReleased unlocked;
      return set_->finish();
    }();
    layouts_.clear();
    unwrap(std::move(status));
  }
  void cancel() { set_->cancel(); }
  void discard() {
    {
      const GilReleased unlocked;
      set_->discard();
    }
    layouts_.clear();
  }
  std::pair<std::uint64_t, std::uint64_t> progress() const {
    return {set_->bytes_done(), set_->bytes_total()};
  }
  std::vector<std::uint32_t> checksums(std::size_t layout) const { return set_->checksums(layout); }

 private:
  std::vector<nb::object> layouts_;  // whose memory is read
  const bool stage_all_;
  std::unique_ptr<tensor_file::FileSet> set_;
};

class FileReaderObject {
 public:
  FileReaderObject(nb::handle layouts, nb::handle engine, bool verify, nb::handle direct)
      : layouts_(listed(layouts)), generation_(os::fork_generation()) {
    std::vector<tensor_file::FileLayout> wanted = arranged(layouts_);
    std::vector<std::pair<std::optional<File>, bool>> sources;
    for (const nb::object& object : layouts_) {
      const auto& layout = nb::cast<FileLayoutObject&>(object);
      if (!layout.only_targets()) raise_value_error("layouts: memory to read into is added by add_target");
      sources.emplace_back(layout.source(), layout.keep_open());
    }
    const OpenOptions open = open_options_argument(nb::str("r"), direct);
    const Engine used = engine_or_default(engine);
    using Targets = std::vector<tensor_file::FileReader::Target>;
    Targets targets = unwrap(call_interruptibly([used, open, sources = std::move(sources),
                                                 wanted = std::move(wanted)]() mutable -> Result<Targets> {
      Targets opened;
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        const auto& [source, keep_open] = sources[i];
        auto file = source ? Result<File>(*source) : File::open(used, wanted[i].path, open);
        if (!file) return std::unexpected(file.error());
        opened.push_back({.file = std::move(*file), .layout = std::move(wanted[i]), .keep_open = keep_open});
      }
      return opened;
    }));
    const GilReleased unlocked;
    reader_ = std::make_unique<tensor_file::FileReader>(
        used, std::move(targets), tensor_file::ReadOptions{.verify = verify, .workers = copiers(1)});
  }
  FileReaderObject(const FileReaderObject&) = delete;
  FileReaderObject& operator=(const FileReaderObject&) = delete;
  ~FileReaderObject() {
    if (generation_ != os::fork_generation()) {
      static_cast<void>(reader_.release());  // its threads and transfers are the parent's
      return;
    }
    const GilReleased unlocked;
    reader_.reset();
  }

  void run() {
    Status status = [&] {
      const GilReleased unlocked;
      return reader_->read();
    }();
    if (status) return;
    const nb::object exception = exception_of(status.error());
    if (const auto& mismatch = reader_->mismatch()) {
      exception.attr("layout") = mismatch->layout;
      exception.attr("checksum") = mismatch->checksum;
    }
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
    throw nb::python_error();
  }
  void cancel() { reader_->cancel(); }
  std::pair<std::uint64_t, std::uint64_t> progress() const {
    return {reader_->bytes_done(), reader_->bytes_total()};
  }
  std::vector<std::uint32_t> checksums(std::size_t layout) const { return reader_->checksums(layout); }

 private:
  std::vector<nb::object> layouts_;  // whose memory is written
  const unsigned generation_;
  std::unique_ptr<tensor_file::FileReader> reader_;
};

std::uint32_t crc32c_of(nb::handle buffer, nb::handle seed) {
  const BufferView view(buffer, Access::read_only);
  const std::uint32_t start = checksum_argument(seed, "seed");
  const GilReleased unlocked;
  return crc32c({view.memory().data, view.memory().bytes}, start);
}

std::uint32_t crc32c_of_both(nb::handle first, nb::handle second, nb::handle second_bytes) {
  return crc32c_combine(checksum_argument(first, "first"), checksum_argument(second, "second"),
                        count_argument(second_bytes, "second_bytes"));
}

std::uint32_t crc32_of_both(nb::handle first, nb::handle second, nb::handle second_bytes) {
  return crc32_combine(checksum_argument(first, "first"), checksum_argument(second, "second"),
                       count_argument(second_bytes, "second_bytes"));
}

// Keeps the GIL, which freeing the memory of a tensor requires, too.
nb::bytes crc32c_of_samples(const std::vector<std::uintptr_t>& addresses,
                            const std::vector<std::size_t>& sizes) {
  constexpr std::size_t kSampleBytes = 64;
  constexpr std::size_t kSamplesOfAll = 65536;
  if (addresses.size() != sizes.size()) raise_value_error("sizes: must be as many as addresses");
  const std::size_t count =
      std::clamp<std::size_t>(kSamplesOfAll / std::max<std::size_t>(1, sizes.size()), 4, 64);
  std::vector<std::uint32_t> found;
  found.reserve(sizes.size());
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const std::size_t bytes = addresses[i] == 0 ? 0 : sizes[i];
    const std::span memory(reinterpret_cast<const std::byte*>(addresses[i]), bytes);
    if (memory.size() <= count * kSampleBytes) {
      found.push_back(crc32c(memory));
      continue;
    }
    std::uint32_t sum = 0;
    const std::size_t last = memory.size() - kSampleBytes;
    for (std::size_t sample = 0; sample < count; ++sample)
      sum = crc32c(memory.subspan(last / (count - 1) * sample, kSampleBytes), sum);
    found.push_back(crc32c(memory.subspan(last), sum));
  }
  return nb::bytes(found.data(), found.size() * sizeof(std::uint32_t));
}

nb::bytes digests_of(const std::vector<std::uintptr_t>& addresses, const std::vector<std::size_t>& sizes,
                     std::size_t unit_bytes) {
  if (addresses.size() != sizes.size()) raise_value_error("sizes: must be as many as addresses");
  if (unit_bytes == 0) raise_value_error("unit_bytes: must be more than 0");
  std::vector<Digest> digests;
  {
    const GilReleased unlocked;
    std::vector<std::span<const std::byte>> ranges;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      // NOLINTNEXTLINE(performance-no-int-to-ptr)
      ranges.emplace_back(reinterpret_cast<const std::byte*>(addresses[i]), sizes[i]);
    }
    digests = unit_digests(ranges, unit_bytes, copiers(1));
  }
  return nb::bytes(digests.data(), digests.size() * sizeof(Digest));
}

void fsync_directory(nb::handle path_value) {
  const std::string path = path_argument(path_value, "path");
  unwrap(call_interruptibly([path] { return os::fsync_directory(path); }));
}

bool is_on_local_filesystem(nb::handle path_value) {
  const std::string path = path_argument(path_value, "path");
  return call_interruptibly([path] { return os::is_on_local_filesystem(path); });
}

std::uint64_t directory_identity(nb::handle path_value) {
  const std::string path = path_argument(path_value, "path");
  return unwrap(call_interruptibly([path] { return os::directory_identity(path); }));
}

void check_leads_to(nb::handle path_value, int descriptor) {
  const std::string path = path_argument(path_value, "path");
  unwrap(call_interruptibly([path, descriptor] { return os::check_leads_to(path, descriptor); }));
}

void check_replaceable(nb::handle path_value) {
  const std::string path = path_argument(path_value, "path");
  unwrap(call_interruptibly([path]() -> Status {
    if (auto found = os::ReplacedFile::find(path, "save to " + path); !found)
      return std::unexpected(found.error());
    return {};
  }));
}

using Records = std::vector<std::pair<std::string, nb::bytes>>;

class ArchiveLayoutObject {
 public:
  // Payloads are PREFIX/data/0 and so on.
  ArchiveLayoutObject(const std::string& prefix, const Records& first,
                      const std::vector<std::uint64_t>& payloads, const Records& last) {
    format::ArchiveBuilder builder;
    const auto add = [&](const Records& records) {
      for (const auto& [name, contents] : records)
        builder.add_record(prefix + "/" + name, {contents.c_str(), contents.size()});
    };
    add(first);
    for (std::size_t i = 0; i < payloads.size(); ++i)
      builder.add_payload(fmt::format("{}/data/{}", prefix, i), payloads[i]);
    add(last);
    layout_ = std::make_shared<const format::ArchiveLayout>(std::move(builder).finish());
  }

  const std::shared_ptr<const format::ArchiveLayout>& layout() const { return layout_; }
  std::uint64_t bytes() const { return layout_->bytes; }
  std::vector<std::pair<std::uint64_t, nb::bytes>> pieces() const {
    std::vector<std::pair<std::uint64_t, nb::bytes>> pieces;
    for (const format::ArchivePiece& piece : layout_->pieces)
      pieces.emplace_back(piece.offset, nb::bytes(piece.bytes.data(), piece.bytes.size()));
    return pieces;
  }
  std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>> payloads() const {
    std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>> payloads;
    for (const format::ArchivePayload& each : layout_->payloads)
      payloads.emplace_back(each.offset, each.bytes, each.descriptor_crc_at, each.entry_crc_at);
    return payloads;
  }

 private:
  std::shared_ptr<const format::ArchiveLayout> layout_;
};

void register_archive_layout(nb::module_& module) {
  nb::class_<ArchiveLayoutObject>(
      module, "ArchiveLayout",
      "Where the records of a `.pt` file are: those before and after the storages, with their contents, and "
      "the\nstorages by their sizes.")
      .def(nb::init<const std::string&, const Records&, const std::vector<std::uint64_t>&, const Records&>(),
           "prefix"_a, "first"_a, "payloads"_a, "last"_a,
           nb::sig("def __init__(self, prefix: str, first: collections.abc.Sequence[tuple[str, bytes]], "
                   "payloads: collections.abc.Sequence[int], last: collections.abc.Sequence[tuple[str, "
                   "bytes]]) -> None"))
      .def_prop_ro("nbytes", &ArchiveLayoutObject::bytes, nb::for_getter(nb::sig("def nbytes(self) -> int")),
                   "Size of the file in bytes (int).")
      .def("pieces", &ArchiveLayoutObject::pieces, nb::sig("def pieces(self) -> list[tuple[int, bytes]]"),
           "All of the file but the payloads: (offset, bytes), ascending.")
      .def("payloads", &ArchiveLayoutObject::payloads,
           nb::sig("def payloads(self) -> list[tuple[int, int, int, int]]"),
           "Of each payload: offset, size, and the two places of its CRC-32 (0 where the size is 0).");
}

void register_file_layout(nb::module_& module) {
  nb::class_<FileLayoutObject>(
      module, "FileLayout",
      "The contents of a file of `nbytes` bytes, to be written or read: memory at offsets, checksums "
      "of ranges, and\nfields for checksums. Bytes that no memory covers are zeros.")
      .def(nb::init<nb::handle, nb::handle>(), "path"_a.none(), "nbytes"_a.none(),
           nb::sig("def __init__(self, path: trunkline._types.Path, nbytes: int) -> None"))
      .def("add", &FileLayoutObject::add, "offset"_a.none(), "buffer"_a.none(), nb::kw_only(),
           "stream"_a = nb::none(),
           nb::sig(
               "def add(self, offset: int, buffer: trunkline._types.ReadableBuffer, *, stream: object | None "
               "= None) -> None"),
           "Adds `buffer`, to be written at `offset`; a buffer in the memory of a GPU is read after the "
           "present work\nof `stream` (None: the current one).")
      .def("add_target", &FileLayoutObject::add_target, "offset"_a.none(), "buffer"_a.none(), nb::kw_only(),
           "fresh"_a = false,
           nb::sig(
               "def add_target(self, offset: int, buffer: trunkline._types.WritableBuffer, *, fresh: bool = "
               "False) -> None"),
           "Adds `buffer`, to be read from `offset`, on a GPU after the present work of the current stream; "
           "`fresh`:\nfrom aligned_empty, not touched yet.")
      .def("add_checksum", &FileLayoutObject::add_checksum, "kind"_a.none(), "begin"_a.none(), "end"_a.none(),
           "expected"_a = nb::none(),
           nb::sig("def add_checksum(self, kind: typing.Literal['crc32', 'crc32c'], begin: int, end: int, "
                   "expected: int | None = None) -> int"),
           "Adds a checksum of the bytes [begin, end), which reading compares with `expected`; returns its "
           "index.\n\n"
           "Ranges are added in the order of the file and do not overlap.")
      .def("add_checksum_field", &FileLayoutObject::add_checksum_field, "offset"_a.none(),
           "checksum"_a.none(), "encoding"_a.none(),
           nb::sig("def add_checksum_field(self, offset: int, checksum: int, encoding: "
                   "typing.Literal['le32', 'hex']) -> None"),
           "Adds a field at `offset` for checksum `checksum`: 4 bytes, little-endian, or 8 hex digits.")
      .def(
          "add_archive",
          [](FileLayoutObject& self, const ArchiveLayoutObject& layout,
             const std::vector<std::uint64_t>& addresses,
             nb::handle owner) { self.add_archive(layout.layout(), addresses, owner); },
          "layout"_a, "addresses"_a, "owner"_a,
          nb::sig("def add_archive(self, layout: ArchiveLayout, addresses: collections.abc.Sequence[int], "
                  "owner: object) -> None"),
          "Adds an archive, with payloads from the main memory at `addresses`, which `owner` keeps alive\n"
          "(0: added by add()), and their CRC-32s.")
      .def("add_targets", &FileLayoutObject::add_targets, "offsets"_a, "sizes"_a, "addresses"_a, "owner"_a,
           nb::sig("def add_targets(self, offsets: collections.abc.Sequence[int], sizes: "
                   "collections.abc.Sequence[int], addresses: collections.abc.Sequence[int], owner: object) "
                   "-> None"),
           "Adds many targets in main memory that nothing else refers to yet, and that `owner` keeps alive.")
      .def("read_from", &FileLayoutObject::set_source, "file"_a, nb::kw_only(), "keep_open"_a = false,
           nb::sig("def read_from(self, file: File, *, keep_open: bool = False) -> None"),
           "Makes reading use `file`, and close it unless `keep_open`, instead of opening `path`, which may "
           "be "
           "replaced by then.")
      .def(
          "checksum_begin",
          [](const FileLayoutObject& self, std::size_t index) {
            if (index >= self.layout().checksums.size())
              raise_value_error("index: there is no such checksum");
            return self.layout().checksums[index].begin;
          },
          "index"_a, nb::sig("def checksum_begin(self, index: int) -> int"),
          "Where the bytes of a checksum begin, by its index.")
      .def_prop_ro(
          "path", [](const FileLayoutObject& self) { return decode_path(self.layout().path); },
          nb::for_getter(nb::sig("def path(self) -> str")), "The file's path (str).")
      .def_prop_ro(
          "nbytes", [](const FileLayoutObject& self) { return self.layout().bytes; },
          "Size of the file in bytes (int).");
}

}  // namespace

void register_tensor_files(nb::module_& module) {
  register_archive_layout(module);
  register_file_layout(module);
  nb::class_<FileSetObject>(module, "FileSet", nb::is_weak_referenceable(),
                            "Files that are written completely, and get their names only at the end. "
                            "To be used from one thread, except\nfor cancel() and progress().")
      .def(nb::init<nb::handle, nb::handle, bool, bool, bool, nb::handle, nb::handle>(), "layouts"_a,
           nb::kw_only(), "engine"_a = nb::none(), "durable"_a = true, "replace"_a = true,
           "stage_all"_a = false, "staging_bytes"_a = nb::none(), "access_of"_a = nb::none(),
           nb::sig(
               "def __init__(self, layouts: collections.abc.Sequence[FileLayout], *, engine: Engine | None = "
               "None, durable: bool = True, replace: bool = True, stage_all: bool = False, staging_bytes: "
               "int | str | None = None, access_of: trunkline._types.Path | None = None) -> None"))
      .def("stage", &FileSetObject::stage,
           "Copies what must be copied; with stage_all all memory may change once it returns.")
      .def("finish", &FileSetObject::finish,
           "Waits until everything is written, durable (if requested), and has its name.")
      .def("cancel", &FileSetObject::cancel, "Makes stage() and finish() raise Cancelled soon.")
      .def("discard", &FileSetObject::discard,
           "Removes the files, as after an error; does nothing after finish(). Not while stage() or finish() "
           "runs.")
      .def("progress", &FileSetObject::progress, "(bytes written, bytes to write).")
      .def("checksums", &FileSetObject::checksums, "layout"_a,
           "Values of the checksums of one file (list of int).");
  nb::class_<FileReaderObject>(
      module, "FileReader",
      "Reads files into the memory of their layouts, once, by run(). To be used from one thread, "
      "except for\ncancel() and progress().")
      .def(nb::init<nb::handle, nb::handle, bool, nb::handle>(), "layouts"_a, nb::kw_only(),
           "engine"_a = nb::none(), "verify"_a = true, "direct"_a = "auto",
           nb::sig(
               "def __init__(self, layouts: collections.abc.Sequence[FileLayout], *, engine: Engine | None = "
               "None, verify: bool = True, direct: trunkline._types.Direct = 'auto') -> None"))
      .def("run", &FileReaderObject::run,
           "Fills all memory. Raises Corrupt, with the attributes `layout` and `checksum` (indices), for a "
           "checksum that differs.")
      .def("cancel", &FileReaderObject::cancel, "Makes run() raise Cancelled soon.")
      .def("progress", &FileReaderObject::progress, "(bytes read, bytes to read).")
      .def("checksums", &FileReaderObject::checksums, "layout"_a,
           "Values of the checksums of one file (list of int).");
  module.def("fsync_directory", &fsync_directory, "path"_a.none(),
             nb::sig("def fsync_directory(path: trunkline._types.Path) -> None"),
             "Makes created, renamed and removed names in a directory durable.");
  module.def("is_on_local_filesystem", &is_on_local_filesystem, "path"_a.none(),
             nb::sig("def is_on_local_filesystem(path: trunkline._types.Path) -> bool"),
             "Whether only this machine writes to the filesystem of the path; False if unknown.");
  module.def("directory_identity", &directory_identity, "path"_a.none(),
             nb::sig("def directory_identity(path: trunkline._types.Path) -> int"),
             "A number that the directory keeps and a copy of it does not have; 0 on FUSE and CIFS.");
  module.def("check_leads_to", &check_leads_to, "path"_a.none(), "descriptor"_a,
             nb::sig("def check_leads_to(path: trunkline._types.Path, descriptor: int) -> None"),
             "Raises OSError (ESTALE) if the path leads to anything but the file or directory open as "
             "`descriptor`.");
  module.def("check_replaceable", &check_replaceable, "path"_a.none(),
             nb::sig("def check_replaceable(path: trunkline._types.Path) -> None"),
             "Raises the error that saving to the path would raise; changes nothing.");
  module.def("crc32c", &crc32c_of, "buffer"_a.none(), "seed"_a = 0,
             nb::sig("def crc32c(buffer: trunkline._types.ReadableBuffer, seed: int = 0) -> int"),
             "CRC-32C of the bytes; `seed` is that of the bytes before them.");
  module.def("crc32c_combine", &crc32c_of_both, "first"_a.none(), "second"_a.none(), "second_bytes"_a.none(),
             nb::sig("def crc32c_combine(first: int, second: int, second_bytes: int) -> int"),
             "CRC-32C of two consecutive runs of bytes, from that of each.");
  module.def("crc32_combine", &crc32_of_both, "first"_a.none(), "second"_a.none(), "second_bytes"_a.none(),
             nb::sig("def crc32_combine(first: int, second: int, second_bytes: int) -> int"),
             "CRC-32 (of zlib) of two consecutive runs of bytes, from that of each.");
  module.def(
      "digests_of", &digests_of, "addresses"_a, "sizes"_a, "unit_bytes"_a,
      nb::sig("def digests_of(addresses: list[int], sizes: list[int], unit_bytes: int) -> bytes"),
      "Digests (16 bytes each, as in CheckpointManifest.digests) of the units of each range of memory, in "
      "their order.");
  module.def(
      "crc32c_of_samples", &crc32c_of_samples, "addresses"_a, "sizes"_a,
      nb::sig("def crc32c_of_samples(addresses: list[int], sizes: list[int]) -> bytes"),
      "CRC-32C (4 bytes each, native order) of a few sampled bytes of each range of memory. All of it must "
      "be mapped; a range at address 0 counts as empty.");
}

}  // namespace trunkline::python
