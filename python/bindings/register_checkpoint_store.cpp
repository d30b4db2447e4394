#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <future>
#include <memory>

#include "arguments.h"
#include "bindings.h"
#include "checkpoint/store.h"
#include "checkpoint/verify.h"
#include "checkpoint/volume_owner.h"
#include "engine_object.h"
#include "errors.h"
#include "gil.h"
#include "interruptible.h"
#include "manifest_object.h"
#include "python_log.h"

namespace trunkline::python {

using namespace nb::literals;
using checkpoint::Manifest;
using checkpoint::SaveTransaction;
using checkpoint::Store;

namespace {

// Stores are shared with a verification whose wait was interrupted, until it ends.
struct StoreObject {
  std::shared_ptr<Store> store;
};

struct SaveObject {
  std::unique_ptr<SaveTransaction> save;
};

nb::list paths_of(const std::vector<std::string>& paths) {
  nb::list list;
  for (const std::string& path : paths) list.append(decode_path(path));
  return list;
}

// Manifests are passed as JSON texts, so that their state keeps its order and its numbers.
nb::object dict_of(const Manifest& manifest) {
  Result<std::string> json = call_unlocked([&] { return checkpoint::manifest_to_json(manifest); });
  const std::string text = unwrap(std::move(json));
  return nb::module_::import_("json").attr("loads")(nb::str(text.data(), text.size()));
}

Manifest manifest_argument(nb::handle value) {
  if (!PyDict_Check(value.ptr())) raise_type_error("manifest: must be a dict, not " + shown_type(value));
  const nb::object text = nb::module_::import_("json").attr("dumps")(
      value, "ensure_ascii"_a = false, "allow_nan"_a = false, "separators"_a = nb::make_tuple(",", ":"));
  Py_ssize_t length = 0;
  const char* const data = PyUnicode_AsUTF8AndSize(text.ptr(), &length);
  if (data == nullptr) throw nb::python_error();
  const std::string_view json(data, static_cast<std::size_t>(length));
  auto manifest = call_unlocked([&] { return checkpoint::manifest_from_text(json); });
  if (!manifest) raise_value_error("manifest: " + manifest.error());
  return std::move(*manifest);
}

nb::dict dict_of(const checkpoint::CollectionResult& result) {
  nb::list removed;
  for (const checkpoint::Removed& each : result.removed) {
    nb::dict entry;
    entry["path"] = decode_path(each.path);
    entry["bytes"] = each.bytes;
    removed.append(entry);
  }
  nb::list problems;
  for (const Error& problem : result.problems) problems.append(exception_of(problem));
  nb::dict dict;
  dict["busy"] = result.is_busy;
  dict["removed"] = removed;
  dict["bytes"] = result.bytes();
  dict["problems"] = problems;
  return dict;
}

nb::dict dict_of(const checkpoint::VerifyReport& report) {
  nb::list mismatches;
  for (const checkpoint::Mismatch& each : report.mismatches) {
    nb::dict entry;
    entry["kind"] = std::string(to_string(each.kind));
    entry["path"] = decode_path(each.path);
    entry["shard"] = each.shard;
    entry["chunk"] = each.chunk;
    entry["offset"] = each.offset;
    entry["bytes"] = each.bytes;
    entry["tensors"] = each.tensors;
    entry["message"] = decode_path(each.message);
    entry["errno"] = each.code;
    mismatches.append(entry);
  }
  nb::dict dict;
  dict["bytes"] = report.bytes;
  dict["mismatches"] = mismatches;
  return dict;
}

void create(StoreObject* self, nb::handle directory_value, nb::handle volumes, bool create_missing,
            bool fresh) {
  const std::string directory = path_argument(directory_value, "directory");
  checkpoint::StoreOptions options;
  if (!volumes.is_none()) options.volumes = paths_argument(volumes, "volumes");
  options.if_missing = create_missing ? checkpoint::IfMissing::create : checkpoint::IfMissing::fail;
  options.fresh = fresh;
  auto store = call_interruptibly([directory, options] { return Store::open(directory, options); });
  adopt_log_levels();
  new (self) StoreObject(unwrap(std::move(store)));
}

// The id of the descriptor, the latest step, and step, commit and first line of each checkpoint.
using PositionTuple = std::tuple<std::string, std::optional<std::uint64_t>,
                                 std::vector<std::tuple<std::uint64_t, std::uint64_t, nb::bytes>>>;

PositionTuple position(const StoreObject& self) {
  const checkpoint::Position found =
      unwrap(call_interruptibly([store = self.store] { return store->position(); }));
  PositionTuple tuple{found.id, found.latest, {}};
  for (const checkpoint::Commit& commit : found.commits)
    std::get<2>(tuple).emplace_back(commit.step, commit.number,
                                    nb::bytes(commit.first_line.data(), commit.first_line.size()));
  return tuple;
}

void continue_from(const StoreObject& self, const PositionTuple& tuple) {
  const auto& [id, latest, commits] = tuple;
  checkpoint::Position position{.id = id, .latest = latest};
  for (const auto& [step, number, first_line] : commits)
    position.commits.insert(
        {.step = step, .number = number, .first_line = std::string(first_line.c_str(), first_line.size())});
  call_interruptibly([store = self.store, position = std::move(position)]() mutable {
    store->continue_from(std::move(position));
  });
}

void check_continues(const StoreObject& self, nb::handle step_value) {
  const std::uint64_t step = count_argument(step_value, "step");
  unwrap(call_interruptibly([store = self.store, step] { return store->check_continues(step); }));
}

// begin() and all functions of a save are called by the threads that save, which no signal handler
// interrupts, so that they do not go through call_interruptibly() as all others. In an exit handler the main
// thread saves itself: Ctrl-C ends the process there (at_exit.py, interrupts_kill). abandon() is also called
// by save(), when its thread cannot start.
SaveObject begin(const StoreObject& self, nb::handle step_value, nb::handle shards_value) {
  adopt_log_levels();
  const std::uint64_t step = count_argument(step_value, "step");
  if (!PySequence_Check(shards_value.ptr()))
    raise_type_error("shards: must be a list of int, not " + shown_type(shards_value));
  std::vector<std::uint64_t> shards;
  for (const nb::handle count : nb::borrow<nb::sequence>(shards_value))
    shards.push_back(count_argument(count, "shards"));
  auto result = call_unlocked([&] { return self.store->begin(step, shards); });
  return {.save = unwrap(std::move(result))};
}

nb::dict placement(const SaveObject& self) {
  const checkpoint::Placement& placement = self.save->placement();
  nb::list entries;
  for (std::size_t i = 0; i < placement.shards.size(); ++i) {
    nb::dict entry;
    entry["volume"] = placement.shards[i].volume;
    entry["file"] = placement.shards[i].file;
    entry["path"] = decode_path(placement.paths[i]);
    entries.append(entry);
  }
  nb::dict dict;
  dict["volumes"] = paths_of(placement.volumes);
  dict["shards"] = entries;
  dict["replaced"] = paths_of({placement.replaced_shard, placement.replaced_manifest});
  dict["directory_was_replaced"] = placement.directory_was_replaced;
  return dict;
}

std::uint64_t number_of(nb::handle value) {
  const std::uint64_t number = PyLong_AsUnsignedLongLong(value.ptr());
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  return number;
}

std::string text_of(nb::handle value) {
  Py_ssize_t length = 0;
  const char* const data = PyUnicode_AsUTF8AndSize(value.ptr(), &length);
  if (data == nullptr) throw nb::python_error();
  return {data, static_cast<std::size_t>(length)};
}

checkpoint::DigestRun digest_run_argument(nb::handle value) {
  const auto parts = nb::cast<nb::tuple>(value);
  if (parts.size() != 2) raise_value_error("tensors: digests must be tuples of the first unit and bytes");
  const auto bytes = nb::cast<nb::bytes>(parts[1]);
  if (bytes.size() % sizeof(Digest) != 0) raise_value_error("tensors: a digest must have 16 bytes");
  checkpoint::DigestRun run{.first = number_of(parts[0]), .digests = {}};
  run.digests.resize(bytes.size() / sizeof(Digest));
  std::memcpy(run.digests.data(), bytes.data(), bytes.size());
  return run;
}

// Beside the rest of the manifest, as tuples: JSON of a million tensors would take most of the time of a
// save.
std::vector<checkpoint::Tensor> tensors_argument(const nb::list& values) {
  std::vector<checkpoint::Tensor> tensors;
  tensors.reserve(values.size());
  for (const nb::handle value : values) {
    const auto fields = nb::cast<nb::tuple>(value);
    if (fields.size() < 4 || fields.size() > 5)
      raise_value_error("tensors: must hold tuples of name, dtype, shape, pieces and, maybe, digests");
    checkpoint::Tensor& tensor = tensors.emplace_back(checkpoint::Tensor{
        .name = text_of(fields[0]), .dtype = text_of(fields[1]), .shape = {}, .pieces = {}});
    for (const nb::handle extent : nb::cast<nb::tuple>(fields[2])) tensor.shape.push_back(number_of(extent));
    for (const nb::handle piece : nb::cast<nb::list>(fields[3])) {
      const auto parts = nb::cast<nb::tuple>(piece);
      if (parts.size() != 3) raise_value_error("tensors: a piece must be a tuple of shard, offset and bytes");
      tensor.pieces.push_back(
          {.shard = number_of(parts[0]), .offset = number_of(parts[1]), .bytes = number_of(parts[2])});
    }
    if (fields.size() < 5) continue;
    for (const nb::handle run : nb::cast<nb::list>(fields[4]))
      tensor.digests.push_back(digest_run_argument(run));
  }
  return tensors;
}

// Placeholders for the fields that the store fills in, so that the text parses as a manifest.
std::uint64_t commit(const SaveObject& self, nb::handle manifest_value,
                     const std::optional<nb::list>& tensors, nb::handle first_number_value) {
  const std::uint64_t first_number = count_argument(first_number_value, "first_number");
  if (!PyDict_Check(manifest_value.ptr()))
    raise_type_error("manifest: must be a dict, not " + shown_type(manifest_value));
  const nb::object whole = nb::steal(PyDict_Copy(manifest_value.ptr()));
  if (!whole.is_valid()) throw nb::python_error();
  whole["commit"] = 1;
  whole["time"] = "1970-01-01T00:00:00Z";
  if (tensors) whole["tensors"] = nb::list();
  Manifest manifest = manifest_argument(whole);
  if (tensors) manifest.tensors = tensors_argument(*tensors);
  auto committed = call_unlocked([&] { return self.save->commit(std::move(manifest), first_number); });
  return unwrap(std::move(committed));
}

std::uint64_t commit_copy(const SaveObject& self, const ManifestObject& original) {
  auto committed = call_unlocked([&] { return self.save->commit_copy(*original.manifest); });
  return unwrap(std::move(committed));
}

// The links as entries of a manifest with their paths, None for those that were not made, and why.
std::pair<nb::list, nb::object> link(const SaveObject& self, const ManifestObject& base,
                                     const std::vector<std::uint64_t>& wanted) {
  const checkpoint::ShardLinks made =
      unwrap(call_unlocked([&] { return self.save->link_shards(*base.manifest, wanted); }));
  nb::list list;
  for (const auto& each : made.links) {
    if (!each) {
      list.append(nb::none());
      continue;
    }
    nb::dict entry;
    entry["volume"] = each->shard.volume;
    entry["file"] = each->shard.file;
    entry["bytes"] = each->shard.bytes;
    std::string checksums;
    for (const std::uint32_t crc : each->shard.crc32c) checksums += fmt::format("{:08x}", crc);
    entry["crc32c"] = checksums;
    entry["commit"] = each->shard.commit;
    list.append(entry);
  }
  return {list, made.problem ? exception_of(*made.problem) : nb::none()};
}

using BestTuple = std::tuple<std::string, std::string, std::uint64_t>;

nb::dict retain(const SaveObject& self, nb::handle keep_value, nb::handle every_value,
                const std::optional<BestTuple>& best, const std::vector<std::uint64_t>& steps) {
  std::optional<std::uint64_t> keep;
  if (!keep_value.is_none()) keep = count_argument(keep_value, "keep");
  checkpoint::AlsoKeep also;
  also.steps.insert(steps.begin(), steps.end());
  if (!every_value.is_none()) also.every = count_argument(every_value, "every");
  if (best) {
    using checkpoint::BestRule;
    const auto& [metric, order, count] = *best;
    if (order != "min" && order != "max") raise_value_error("best: must name \"min\" or \"max\"");
    also.best = BestRule{.metric = metric,
                         .order = order == "min" ? BestRule::Order::min : BestRule::Order::max,
                         .count = count};
  }
  auto result = call_unlocked([&] { return self.save->retain(keep, also); });
  return dict_of(unwrap(std::move(result)));
}

nb::dict abandon(const SaveObject& self) {
  auto result = call_unlocked([&] { return self.save->abandon(); });
  return dict_of(unwrap(std::move(result)));
}

nb::dict collect(const StoreObject& self, bool dry_run) {
  using checkpoint::GarbageCollector;
  adopt_log_levels();
  auto result = call_interruptibly([store = self.store, dry_run] {
    return store->collect(dry_run ? GarbageCollector::DryRun::yes : GarbageCollector::DryRun::no);
  });
  return dict_of(unwrap(std::move(result)));
}

nb::object why_gone(const StoreObject& self, nb::handle path_value, nb::handle step_value) {
  const std::string path = path_argument(path_value, "path");
  const std::uint64_t step = count_argument(step_value, "step");
  const std::string volume = std::filesystem::path(path).parent_path().parent_path().string();
  const auto why = call_interruptibly(
      [store = self.store, volume, step] { return checkpoint::why_gone(volume, store->directory(), step); });
  return why ? nb::object(decode_path(*why)) : nb::none();
}

void remove(const StoreObject& self, nb::handle step_value) {
  const std::uint64_t step = count_argument(step_value, "step");
  adopt_log_levels();
  unwrap(call_interruptibly([store = self.store, step] { return store->remove(step); }));
}

nb::dict collect_if_used(const StoreObject& self) {
  adopt_log_levels();
  return dict_of(unwrap(call_interruptibly([store = self.store] { return store->collect_if_used(); })));
}

// Waits while another thread changes the directory.
checkpoint::StoreDescriptor descriptor_of(const StoreObject& self) {
  return call_interruptibly([store = self.store] { return store->descriptor(); });
}

std::vector<std::uint64_t> steps(const StoreObject& self) {
  return unwrap(call_interruptibly([store = self.store] { return store->steps(); }));
}

std::optional<std::uint64_t> latest(const StoreObject& self) {
  return unwrap(call_interruptibly([store = self.store] { return store->latest(); }));
}

nb::list tiers(const StoreObject& self) {
  nb::list list;
  for (const checkpoint::RecordedTier& tier :
       unwrap(call_interruptibly([store = self.store] { return store->tiers(); })))
    list.append(nb::make_tuple(decode_path(tier.directory), tier.id));
  return list;
}

bool has_copied_tiers(const StoreObject& self) {
  return unwrap(call_interruptibly([store = self.store] { return store->has_copied_tiers(); }));
}

void record_tiers(const StoreObject& self, const nb::list& values) {
  std::vector<checkpoint::RecordedTier> tiers;
  for (const nb::handle value : values) {
    const auto fields = nb::cast<nb::tuple>(value);
    if (fields.size() != 2) raise_value_error("tiers: must hold tuples of directory and id");
    tiers.push_back({.directory = path_argument(fields[0], "tiers"), .id = nb::cast<std::string>(fields[1])});
  }
  unwrap(call_unlocked([&] { return self.store->record_tiers(tiers); }));
}

nb::object read_manifest(const StoreObject& self, nb::handle step_value) {
  const std::uint64_t step = count_argument(step_value, "step");
  return dict_of(
      unwrap(call_interruptibly([store = self.store, step] { return store->read_manifest(step); })));
}

ManifestObject open_manifest(const StoreObject& self, nb::handle step_value) {
  const std::uint64_t step = count_argument(step_value, "step");
  return {.manifest = std::make_shared<const Manifest>(
              unwrap(call_interruptibly([store = self.store, step] { return store->read_manifest(step); }))),
          .directory = self.store->directory()};
}

nb::list shard_paths(const StoreObject& self, nb::handle manifest_value) {
  const Manifest manifest = manifest_argument(manifest_value);
  nb::list paths;
  for (std::size_t i = 0; i < manifest.shards.size(); ++i)
    paths.append(decode_path(checkpoint::shard_path(self.store->directory(), manifest, i)));
  return paths;
}

// How long to wait for an interrupted verification to end.
constexpr std::chrono::seconds kEndOfVerification{1};

// What a verification uses until it ends, also after it was interrupted.
struct Verification {
  std::atomic<bool> cancelled{false};
  std::atomic<std::uint64_t> done{0};
};

// The verification runs in a separate thread, and is cancelled when a signal handler or `progress` raises. If
// a device hangs, it does not end: so the wait for it is short.
nb::dict verify(const StoreObject& self, nb::handle step_value, nb::handle engine_value,
                const nb::object& progress) {
  const std::uint64_t step = count_argument(step_value, "step");
  const std::optional<Engine> given = engine_argument(engine_value);
  const Engine engine = given ? *given : unwrap(call_interruptibly([] { return Engine::default_engine(); }));
  const auto manifest = std::make_shared<const Manifest>(
      unwrap(call_interruptibly([store = self.store, step] { return store->read_manifest(step); })));
  const auto shared = std::make_shared<Verification>();
  using Report = Result<checkpoint::VerifyReport>;
  const auto task =
      std::make_shared<std::packaged_task<Report()>>([engine, store = self.store, manifest, shared] {
        return checkpoint::verify(engine, store->directory(), *manifest,
                                  {.on_progress = [shared](std::uint64_t bytes) { shared->done = bytes; },
                                   .cancelled = [shared] { return shared->cancelled.load(); }});
      });
  std::future<Report> future = task->get_future();
  call_unlocked([&] { run_beside([task] { (*task)(); }); });
  const std::uint64_t total = bytes_to_verify(*manifest);
  try {
    while (call_unlocked([&] { return future.wait_for(kSignalLatency); }) != std::future_status::ready) {
      check_signals();
      if (!progress.is_none()) progress(shared->done.load(), total);
    }
    if (!progress.is_none()) progress(shared->done.load(), total);
  } catch (const nb::python_error&) {
    shared->cancelled = true;
    call_unlocked([&] { return future.wait_for(kEndOfVerification); });
    throw;
  }
  return dict_of(unwrap(future.get()));
}

void register_checkpoint_save(nb::module_& module) {
  nb::class_<SaveObject>(
      module, "CheckpointSave",
      "A save that CheckpointStore.begin() has begun, until release() or abandon(). Thread-safe.\n\n"
      "One that is dropped is released. In a forked child it has ended: what the child calls changes "
      "nothing.")
      .def_prop_ro(
          "step", [](const SaveObject& self) { return self.save->step(); },
          nb::for_getter(nb::sig("def step(self) -> int")), "The step that is saved (int).")
      .def_prop_ro("placement", &placement,
                   nb::for_getter(nb::sig("def placement(self) -> dict[str, typing.Any]")),
                   "Where the shards go: \"volumes\" (as the manifest has them), \"shards\": dicts of "
                   "\"volume\", \"file\" and\n"
                   "\"path\", in the order of the volumes, and \"directory_was_replaced\": the directory is "
                   "another one\n"
                   "than was loaded and saved before.")
      .def("link", &link, "base"_a, "wanted"_a,
           nb::sig("def link(self, base: CheckpointManifest, wanted: list[int]) -> "
                   "tuple[list[dict[str, typing.Any] | None], OSError | None]"),
           "Before commit: links these shards of an earlier checkpoint into the directories of this one.\n\n"
           "Returns their entries for the manifest, None for those that were not linked, and why the first "
           "was not.\n"
           "commit() removes those that its manifest does not name.")
      .def(
          "commit", &commit, "manifest"_a.none(), "tensors"_a = nb::none(), nb::kw_only(),
          "first_number"_a = 1,
          nb::sig("def commit(self, manifest: dict[str, typing.Any], tensors: list[tuple[str, str, "
                  "tuple[int, ...], list[tuple[int, int, int]]] | tuple[str, str, tuple[int, ...], "
                  "list[tuple[int, int, int]], list[tuple[int, bytes]]]] | None = None, *, "
                  "first_number: int = 1) -> int"),
          "Makes what was written, durably, the checkpoint of the step; returns the number of the commit.\n\n"
          "tensors: in place of those of the manifest, as tuples of name, dtype, shape, pieces and, with the "
          "feature\n"
          "\"incremental\", digests (first unit of each run, 16 bytes for each unit).\n"
          "first_number: the least number of the commit.\n"
          "\"commit\" and \"time\" of the manifest are given to it here. Raises ValueError for a manifest "
          "that readers\n"
          "would refuse, and for a save that was committed or has ended; Corrupt for a shard of another "
          "size. "
          "After an\n"
          "Error it is open whether the checkpoint is there.")
      .def("commit_copy", &commit_copy, "original"_a,
           nb::sig("def commit_copy(self, original: CheckpointManifest) -> int"),
           "The same for a copy of a checkpoint of another directory, whose shards were copied to the paths "
           "of\n"
           "the placement, in their order. It keeps the number of its commit. Raises FileExistsError if the "
           "directory\n"
           "has that number or a higher one.")
      .def("retain", &retain, "keep"_a = nb::none(), nb::kw_only(), "every"_a = nb::none(),
           "best"_a = nb::none(), "steps"_a = std::vector<std::uint64_t>(),
           nb::sig("def retain(self, keep: int | None = None, *, every: int | None = None, best: tuple[str, "
                   "typing.Literal['min', 'max'], int] | None = None, steps: "
                   "collections.abc.Sequence[int] = ()) -> dict[str, typing.Any]"),
           "After commit: removes what it replaced, and all but the last `keep` checkpoints by their "
           "commits.\n\n"
           "Those stay, too, whose step is a multiple of `every`, and the `best`: a metric, which values of "
           "it "
           "are\n"
           "better, and how many; and those of `steps`.")
      .def(
          "release", [](const SaveObject& self) { call_unlocked([&] { self.save->release(); }); },
          "Ends the save; what was not committed stays for collect(). Nothing if it has ended.")
      .def("abandon", &abandon, nb::sig("def abandon(self) -> dict[str, typing.Any]"),
           "Ends the save, and removes what was written and not committed: all writers must be done.");
}

using StoreClass = nb::class_<StoreObject>;

void define_continuation(StoreClass& store) {
  store
      .def("position", &position,
           nb::sig("def position(self) -> tuple[str, int | None, list[tuple[int, int, bytes]]]"),
           "The state of the directory, for continue_from(); read it before a checkpoint is read. The second "
           "item is the latest step.")
      .def("continue_from", &continue_from, "position"_a,
           nb::sig("def continue_from(self, position: tuple[str, int | None, list[tuple[int, int, bytes]]]) "
                   "-> None"),
           "Lets saves go on from the checkpoints of a position: those that were there when one was loaded.")
      .def(
          "start_over",
          [](const StoreObject& self, bool fresh) {
            call_interruptibly([store = self.store, fresh] { store->start_over(fresh); });
          },
          "fresh"_a, nb::sig("def start_over(self, fresh: bool) -> None"),
          "Forgets which checkpoints were loaded and saved; `fresh`: the next save sets them aside.")
      .def("check_continues", &check_continues, "step"_a.none(),
           nb::sig("def check_continues(self, step: int) -> None"),
           "Raises what begin() would: FileExistsError for checkpoints that were neither loaded nor saved "
           "here.");
}

void define_reading(StoreClass& store) {
  store
      .def("tiers", &tiers, nb::sig("def tiers(self) -> list[tuple[str, str]]"),
           "The tiers that are on record: their directories, and the ids of these (\"\": unknown yet).")
      .def("steps", &steps, "Committed steps, ascending.")
      .def("latest", &latest, "The step that was committed last, whatever its number; None if there is none.")
      .def("read_manifest", &read_manifest, "step"_a.none(),
           nb::sig("def read_manifest(self, step: int) -> dict[str, typing.Any]"),
           "The manifest of a step. Raises FileNotFoundError, Corrupt or Format.")
      .def("open_manifest", &open_manifest, "step"_a.none(),
           nb::sig("def open_manifest(self, step: int) -> CheckpointManifest"),
           "The same, not as Python objects.")
      .def("shard_paths", &shard_paths, "manifest"_a.none(),
           nb::sig("def shard_paths(self, manifest: dict[str, typing.Any]) -> list[str]"),
           "Paths of the manifest's shards, in their order.");
}

void define_changes(StoreClass& store) {
  store
      .def(
          "begin", &begin, "step"_a.none(), "shards"_a.none(),
          nb::sig("def begin(self, step: int, shards: collections.abc.Sequence[int]) -> CheckpointSave"),
          "Begins to save a step, with so many shards on each volume (one number without volumes).\n\n"
          "Raises Error with EBUSY while a save is under way, here or elsewhere; with EAGAIN when the number "
          "of\n"
          "volumes has changed: call it again; FileExistsError as check_continues().")
      .def("has_copied_tiers", &has_copied_tiers, nb::sig("def has_copied_tiers(self) -> bool"),
           "Whether the record of tiers() was written for another directory, which this one is a copy of.")
      .def("record_tiers", &record_tiers, "tiers"_a,
           nb::sig("def record_tiers(self, tiers: list[tuple[str, str]]) -> None"),
           "Puts the tiers on record, durably, once a save has made the directory.")
      .def("collect", &collect, nb::kw_only(), "dry_run"_a = false,
           nb::sig("def collect(self, *, dry_run: bool = False) -> dict[str, typing.Any]"),
           "Removes leftovers of interrupted saves. \"busy\": another process saves, and the rest was not "
           "done.")
      .def(
          "remove", &remove, "step"_a.none(), nb::sig("def remove(self, step: int) -> None"),
          "Removes the checkpoint of a step. Raises FileNotFoundError; Error with EBUSY while another saves.")
      .def("collect_if_used", &collect_if_used, nb::sig("def collect_if_used(self) -> dict[str, typing.Any]"),
           "The same where a save was begun before; otherwise nothing, and no lock is made.");
}

void define_verification(StoreClass& store) {
  store
      .def("why_gone", &why_gone, "path"_a.none(), "step"_a.none(),
           nb::sig("def why_gone(self, path: trunkline._types.Path, step: int) -> str | None"),
           "Why the shard at `path` is missing, where its volume belongs to another directory: a clause.")
      .def("verify", &verify, "step"_a.none(), nb::kw_only(), "engine"_a = nb::none(),
           "progress"_a = nb::none(),
           nb::sig("def verify(self, step: int, *, engine: Engine | None = None, progress: "
                   "collections.abc.Callable[[int, int], object] | None = None) -> dict[str, typing.Any]"),
           "Reads all of a step and compares every checksum.\n\n"
           "Returns \"bytes\" (read) and \"mismatches\": dicts of \"kind\" (\"missing\", \"size\", "
           "\"unread\" or "
           "\"checksum\"),\n"
           "\"path\", \"shard\", \"chunk\" (in the file, or None), \"offset\", \"bytes\", \"tensors\" "
           "(names) and \"message\".\n"
           "progress is called with bytes done and in all, several times a second; what it raises ends it.");
}

void define_properties(StoreClass& store) {
  store
      .def_prop_ro(
          "directory", [](const StoreObject& self) { return decode_path(self.store->directory()); },
          nb::for_getter(nb::sig("def directory(self) -> str")), "The directory, absolute (str).")
      .def_prop_ro(
          "aside",
          [](const StoreObject& self) -> nb::object {
            const auto path = call_interruptibly([store = self.store] { return store->aside(); });
            return path ? nb::object(decode_path(*path)) : nb::none();
          },
          nb::for_getter(nb::sig("def aside(self) -> str | None")),
          "The folder that begin() has set the earlier run aside in (str), until a save is committed.")
      .def_prop_ro(
          "volumes", [](const StoreObject& self) { return paths_of(descriptor_of(self).volumes); },
          nb::for_getter(nb::sig("def volumes(self) -> list[str]")),
          "The store's own directories on its volumes (list of str); empty when shards lie beside the "
          "manifests.")
      .def_prop_ro(
          "id", [](const StoreObject& self) { return descriptor_of(self).id; },
          "The part that the names of its directories on volumes share (str); chosen by the first save.");
}

}  // namespace

void register_checkpoint_store(nb::module_& module) {
  register_checkpoint_save(module);
  StoreClass store(
      module, "CheckpointStore",
      "A directory of checkpoints (docs/formats/checkpoint.md): steps, manifests, commits. Thread-safe.\n\n"
      "volumes: directories over which shards are spread (None: as the directory has them; []: beside the "
      "manifests).\n"
      "create: let begin() make what is missing, and change the volumes; without it FileNotFoundError is "
      "raised.\n"
      "fresh: the first save sets the checkpoints that it finds aside, in a folder of their own.\n\n"
      "A save goes begin(), and commit, retain, release of the CheckpointSave; until its release nobody else "
      "can\n"
      "save or collect.\n"
      "Manifests are dicts with the keys of the format; dicts of removals have \"busy\" (bool), \"removed\" "
      "(dicts of\n"
      "\"path\" and \"bytes\"), \"bytes\" (their sum) and \"problems\" (exceptions: what was left alone, and "
      "why).");
  store.def("__init__", &create, "directory"_a.none(), "volumes"_a = nb::none(), nb::kw_only(),
            "create"_a = true, "fresh"_a = false,
            nb::sig("def __init__(self, directory: trunkline._types.Path, volumes: "
                    "collections.abc.Sequence[trunkline._types.Path] | None = None, *, create: bool = True, "
                    "fresh: bool = False) -> None"));
  define_continuation(store);
  define_reading(store);
  define_changes(store);
  define_verification(store);
  define_properties(store);
}

}  // namespace trunkline::python
