#include <nanobind/ndarray.h>

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "bindings.h"
#include "buffer_view.h"
#include "errors.h"
#include "gil.h"
#include "records/scan.h"
#include "records/source.h"
#include "records/tar_scan.h"
#include "records/tfrecord_scan.h"
#include "trunkline/checksum.h"

// Scanners of files of samples, for trunkline/data. All of these are private to the package.

namespace trunkline::python {

using namespace nb::literals;

namespace {

// Ends scans in other threads.
struct ScanStop {
  std::atomic<bool> is_set{false};
};

using Scan = Result<records::Ranges> (*)(records::Source&, const std::string&, const records::ScanOptions&);

nb::object array_of(std::vector<std::uint64_t> values) {
  auto owned = std::make_unique<std::vector<std::uint64_t>>(std::move(values));
  std::uint64_t* const data = owned->data();
  const std::size_t count = owned->size();
  const nb::capsule owner(owned.release(), [](void* vector) noexcept {
    delete static_cast<std::vector<std::uint64_t>*>(vector);
  });
  return nb::cast(nb::ndarray<nb::numpy, std::uint64_t, nb::ndim<1>>(data, {count}, owner));
}

template <Scan scan>
nb::tuple scan_file(nb::handle path_value, bool skip, const ScanStop* stop) {
  const std::string path = path_argument(path_value, "path");
  const records::ScanOptions options{.on_damage = skip ? records::OnDamage::skip : records::OnDamage::fail,
                                     .stop = stop != nullptr ? &stop->is_set : nullptr};
  Result<records::Ranges> scanned = [&]() -> Result<records::Ranges> {
    const GilReleased unlocked;
    const Result<std::unique_ptr<records::Source>> source = records::open_source(path);
    if (!source) return std::unexpected(source.error());
    return scan(**source, path, options);
  }();
  records::Ranges ranges = unwrap(std::move(scanned));
  nb::list skipped;
  for (const records::Skipped& each : ranges.skipped)
    skipped.append(nb::make_tuple(each.offset, decode_path(each.reason)));
  return nb::make_tuple(array_of(std::move(ranges.offsets)), array_of(std::move(ranges.lengths)), skipped);
}

nb::tuple parse_sample(nb::handle memory_value, nb::handle path_value) {
  const BufferView memory(memory_value, Access::read_only, "memory");
  const std::string path = path_argument(path_value, "path");
  const std::span<const std::byte> bytes(memory.memory().data, memory.memory().bytes);
  // Short: the headers alone are read.
  const records::TarSample sample = unwrap(records::parse_tar_sample(bytes, path));
  nb::list members;
  for (const records::SampleMember& member : sample.members)
    members.append(nb::make_tuple(decode_path(member.extension), member.begin, member.begin + member.bytes));
  return nb::make_tuple(decode_path(sample.key), members);
}

std::uint32_t zip_checksum(nb::handle buffer, std::uint32_t seed) {
  const BufferView view(buffer, Access::read_only, "buffer");
  const std::span<const std::byte> bytes(view.memory().data, view.memory().bytes);
  const GilReleased unlocked;
  return crc32(bytes, seed);
}

#define SCAN_SIGNATURE                                                                  \
  "(path: trunkline._types.Path, skip: bool = False, stop: ScanStop | None = None) -> " \
  "tuple[numpy.typing.NDArray[numpy.uint64], numpy.typing.NDArray[numpy.uint64], list[tuple[int, str]]]"
#define SCAN_DOC                                                                                           \
  "Returns offsets, lengths, and (offset, reason) of what was skipped.\nskip: leave out damaged samples. " \
  "Raises Format, Corrupt, Unsupported, OSError. Releases the GIL. Private."

}  // namespace

void register_data_scan(nb::module_& module) {
  nb::class_<ScanStop>(module, "ScanStop", "Ends scans in other threads. Private.")
      .def(nb::init<>())
      .def(
          "stop", [](ScanStop& self) { self.is_set.store(true); },
          "Makes scans that were given this object raise Cancelled soon.");
  module.def("scan_tfrecords", &scan_file<records::scan_tfrecords>, "path"_a.none(), "skip"_a = false,
             "stop"_a = nb::none(), nb::sig("def scan_tfrecords" SCAN_SIGNATURE),
             "Finds the records of a TFRecord file, with heads and tails. " SCAN_DOC);
  module.def("scan_tar", &scan_file<records::scan_tar>, "path"_a.none(), "skip"_a = false,
             "stop"_a = nb::none(), nb::sig("def scan_tar" SCAN_SIGNATURE),
             "Finds the samples of a WebDataset archive. " SCAN_DOC);
  module.def("parse_tar_sample", &parse_sample, "memory"_a.none(), "path"_a.none(),
             nb::sig("def parse_tar_sample(memory: trunkline._types.ReadableBuffer, path: "
                     "trunkline._types.Path) -> tuple[str, list[tuple[str, int, int]]]"),
             "The key, and extension, begin and end of each member, of the bytes of a sample that scan_tar() "
             "found.\n`path` is for messages. Raises Format, Corrupt, Unsupported. Private.");
  module.def("crc32", &zip_checksum, "buffer"_a.none(), "seed"_a = 0,
             nb::sig("def crc32(buffer: trunkline._types.ReadableBuffer, seed: int = 0) -> int"),
             "CRC-32 as zip has it (zlib.crc32), without the GIL. Private.");
}

}  // namespace trunkline::python
