"""The parsers of untrusted bytes that are in Python: what feeds them, and valid inputs to begin with.

test_fuzz.py tries a few thousand mutations of the seeds and the kept inputs; `scripts/fuzz.py --python` as
many as are requested, led by coverage (fuzz_python.py). Inputs are parsed from memory.
"""

import functools
import io
import json
import random
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import fuzz_mutator
import numpy
import torch

import trunkline as tl
from trunkline._core import crc32c
from trunkline._formats.pt import archive as archives
from trunkline._formats.pt import pickle as pickles
from trunkline._formats.pt import zip as zips
from trunkline._formats.safetensors import folder
from trunkline._streaming import expert_use as use_file
from trunkline._streaming import location
from trunkline._streaming import manifest as pack_manifest
from trunkline._streaming import routing_trace as traces
from trunkline.checkpoint.nodes import record as node_records
from trunkline.checkpoint.nodes.agreement import Entry
from trunkline.checkpoint.state import restore as restoring
from trunkline.checkpoint.state import tree
from trunkline.data import _npy as npy_files
from trunkline.data import _npz as npz_files
from trunkline.dcp import _manifest as dcp_manifest
from trunkline.workload import _parse as workload_files
from trunkline.workload import totals_of
from trunkline.workload._model_shape import rank_bytes
from trunkline.workload._spec_error import SpecError

# Returns the error with which the input was rejected, None if it was read; raises any other error.
Target = Callable[[bytes], BaseException | None]
_REFUSED = (tl.Format, tl.Corrupt, tl.Unsupported)
_KEPT = Path(__file__).resolve().parents[2] / "tests/fuzz/kept"


class _Memory:
    """A file of bytes, as archives.Source wants it."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def pread(self, buffer: Any, offset: int = 0) -> int:
        end = offset + len(buffer)
        assert 0 <= offset <= end <= self.size
        buffer[:] = self._data[offset:end]
        return len(buffer)


def pt_directory(data: bytes) -> BaseException | None:
    """Records lie within the file, and none overlaps another."""

    def read(offset: int, nbytes: int) -> bytes:
        assert 0 <= offset <= offset + nbytes <= len(data)
        return data[offset : offset + nbytes]

    try:
        directory = zips.read_directory(read, len(data), "fuzz")
        headers = [
            data[entry.header : entry.header + zips.header_bytes(entry)] for entry in directory.entries
        ]
        records = list(zips.place_records(directory, headers, "fuzz"))
    except _REFUSED as error:
        return error
    end = 0
    for record in records:
        assert end <= record.header < record.offset <= record.offset + record.nbytes <= directory.begin
        end = record.offset + record.nbytes
    return None


def pt_pickle(data: bytes) -> BaseException | None:
    """Nothing of the pickle runs; what it does is known, or not."""
    try:
        found = pickles.Machine(data).run()
    except pickles.NOT_SCANNED as error:
        return error
    assert all(storage.nbytes >= 0 for storage in found.storages)
    assert set(found.names()) <= {storage.key for storage in found.storages}
    return None


def pt_archive(data: bytes) -> BaseException | None:
    """The whole of what is known before torch.load runs."""
    try:
        archive = archives.Archive(archives.Source(_Memory(data), "fuzz"), "auto")  # type: ignore[arg-type]
        archive.check_storages()
        archive.check_all()
    except _REFUSED as error:
        return error
    assert archive.pickle.offset + archive.pickle.nbytes <= len(data)
    assert archive.payload_at(archive.pickle.offset) in (archive.pickle, None)
    assert archive.foreign_byte_order in (True, False)
    return None


_PACK_PATH = Path("fuzz/pack.json")


def pack(data: bytes) -> BaseException | None:
    """Tensors lie within the weights."""
    try:
        manifest = pack_manifest.parse(data, _PACK_PATH)
    except tl.Format as error:
        return error
    for stored in manifest.tensors:
        assert 0 <= stored.offset <= stored.offset + stored.nbytes <= manifest.nbytes
    return None


_USE_PATH = Path("fuzz/pack.use.json")


def expert_use(data: bytes) -> BaseException | None:
    """Rates are from 0 to 1."""
    try:
        rates = use_file.parse(data, _USE_PATH)
    except tl.Format as error:
        return error
    assert all(0 <= rate <= 1 for of_module in rates.values() for rate in of_module)
    return None


def node_record(data: bytes) -> BaseException | None:
    """What is read is written as an equal record. What begins with the letter x gets a valid checksum."""
    if data.startswith(b"x"):
        try:
            about = json.loads(data[1:])
        except (ValueError, RecursionError):
            return None
        if isinstance(about, dict):
            data = json.dumps({**about, "crc32c": f"{crc32c(json.dumps(about).encode()):08x}"}).encode()
    try:
        record = node_records.parse_record(data, "fuzz/trunkline-node.json")
    except _REFUSED as error:
        return error
    assert node_records.parse_record(node_records.format_record(record), "written") == record
    return None


def routing_trace(data: bytes) -> BaseException | None:
    """Steps use experts that there are. Lines that begin with the letter x get valid checksums."""
    lines, checksum = [], 0
    for line in data.splitlines(keepends=True):
        if line.startswith(b"x"):
            text = line[1:].rstrip(b"\n")
            checksum = crc32c(text, checksum)
            line = b"%b %08x\n" % (text, checksum)
        lines.append(line)
    try:
        trace = traces.parse(lines, "fuzz.trace")
    except _REFUSED as error:
        return error
    for step in trace.steps:
        assert step.tokens > 0
        assert all(0 <= expert < trace.modules[step.module][1] and used > 0 for expert, used in step.uses)
    return None


def pack_descriptor(data: bytes) -> BaseException | None:
    """The file beside a pack that is striped over several directories: its members, or it is not one."""
    try:
        location.parse_descriptor(data)
    except location.NOT_A_DESCRIPTOR as error:
        return error
    return None


def pack_mark(data: bytes) -> BaseException | None:
    """The beginning of the file of weights says that it is a pack, or it does not."""
    return None if location.has_mark(data) else ValueError()


def safetensors_index(data: bytes) -> BaseException | None:
    """Files are below the index."""
    try:
        files = folder.parse_index(data, "fuzz.safetensors.index.json")
    except tl.Format as error:
        return error
    for name in files.values():
        assert not name.startswith("/")
        assert ".." not in name.split("/")
    return None


def dcp(data: bytes) -> BaseException | None:
    """What is read is written as itself; JSON gets the first line that it should have."""
    if data.startswith(b"{"):
        line = b"trunkline-dcp %d crc32c=%08x bytes=%d\n"
        data = line % (dcp_manifest.VERSION, crc32c(data), len(data)) + data
    try:
        metadata = dcp_manifest.parse_manifest(data, "fuzz")
    except _REFUSED as error:
        return error
    written = dcp_manifest.format_manifest(metadata)
    again = dcp_manifest.parse_manifest(written, "fuzz")
    assert again == metadata
    assert dcp_manifest.format_manifest(again) == written
    return None


@functools.cache
def _states() -> list[dict[str, Any]]:
    """States with views of a whole tensor and of memory with gaps, and with leaves of all kinds."""
    whole, memory = torch.zeros(2, 3), torch.zeros(64)
    return [
        {
            "w": whole,
            "row": whole[1],
            "v": [memory[4:12], memory[8:20:2]],
            "t": torch.zeros(3, 2).t(),
            "n": [1, 2.5, None, b"x", (3, "y")],
            "a": numpy.zeros(3),
            "s": {1, "z"},
        },
        {"p": torch.nn.Parameter(torch.zeros(2)), "c": torch.zeros(1, dtype=torch.complex128)},
        {"d": numpy.zeros(2, [("x", "<i4"), ("y", "<f8", (2,))])},
        {
            "l": [float("nan"), 1 << 70, 1j, "\ud800", torch.float16, torch.device("cpu"), torch.Size([2])],
            "m": [numpy.dtype("<f4"), numpy.float32(1), numpy.str_("x"), numpy.bytes_(b"x")],
            "o": OrderedDict(i={(1, "x"): frozenset([2])}),
            "k": Counter("xxy"),
        },
    ]


@functools.cache
def _state() -> dict[str, Any]:
    return {key: value for state in _states() for key, value in state.items()}


@functools.cache
def _stored() -> list[tuple[bytes, str, torch.Tensor]]:
    """The tensors of all states: the name as JSON has it, and as it is."""
    tensors = [each for state in _states() for each in tree.flatten(state)[1].items()]
    return [(json.dumps(name).encode(), name, tensor) for name, tensor in tensors]


@functools.cache
def _quoted_keys() -> list[tuple[bytes, str]]:
    return [(json.dumps(key).encode(), key) for key in _state()]


class _NotJson(Exception):
    """Nothing that the library gets to see."""


def _document(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise _NotJson from None


def skeleton(data: bytes) -> BaseException | None:
    """The state of a checkpoint, which has the tensors that the text names."""
    tensors = {name: tensor for quoted, name, tensor in _stored() if quoted in data}
    try:
        restoring.restore(_document(data), tensors)
    except (_NotJson, tl.Format) as error:
        return error
    return None


def skeleton_into(data: bytes) -> BaseException | None:
    """The same, into tensors that exist: what does not fit is a ValueError that says so."""
    into = {key: _state()[key] for quoted, key in _quoted_keys() if quoted in data}
    stored = {name: tensor.nbytes for quoted, name, tensor in _stored() if quoted in data}
    try:
        _, targets, finish = restoring.restore_into(_document(data), into)
        for name, target in targets.items():  # sizes are compared with the manifest before anything is read
            if stored.get(name) != target.nbytes:
                return KeyError(name)
        finish()
    except (_NotJson, tl.Format) as error:
        return error
    except ValueError as error:
        if not str(error).startswith("into: "):
            raise
        return error
    return None


def npy(data: bytes) -> BaseException | None:
    """The array is that of numpy."""
    try:
        header = npy_files.parse_head(data[: npy_files.head_bytes(data[:12], "fuzz")], "fuzz")
        array = npy_files.array_of(memoryview(data)[: header.data_offset + header.nbytes], header, "fuzz")
    except _REFUSED as error:
        return error
    assert array.shape == header.shape
    assert array.nbytes == header.nbytes
    return None


def npz(data: bytes) -> BaseException | None:
    """Members lie within the file; each is an array, or rejected."""
    try:
        offsets, lengths, skipped = npz_files.find_members(io.BytesIO(data), "fuzz", len(data), False)
    except _REFUSED as error:
        return error
    assert not skipped
    view = npz_files.viewer(lambda sample: "fuzz")
    refused = None
    for sample, (offset, length) in enumerate(zip(offsets.tolist(), lengths.tolist(), strict=True)):
        assert 0 <= offset < offset + length <= len(data)
        try:
            assert isinstance(view(memoryview(data)[offset : offset + length], sample), numpy.ndarray)
        except _REFUSED as error:
            refused = error
    return refused


def workload_file(data: bytes) -> BaseException | None:
    """Its totals can be computed, and what its ranks save."""
    try:
        workload = workload_files.parse_text(data.decode("utf-8", "replace"), "fuzz")
    except SpecError as error:
        return error
    totals = totals_of(workload, 2)
    checkpoint = workload.checkpoint
    assert totals.samples > 0 or (checkpoint is not None and workload.train is None)
    assert (
        checkpoint is None or sum(rank_bytes(checkpoint.shape, checkpoint.shape.parallelism.ranks - 1)) >= 0
    )
    assert 0 <= totals.steps <= max(totals.samples, 1) * (workload.train.epochs if workload.train else 1)
    assert all(each.effect.startswith(("ignored: ", "not supported: ")) for each in workload.ignored)
    return None


TARGETS: dict[str, Target] = {
    each.__name__: each
    for each in (
        *(pt_directory, pt_pickle, pt_archive, pack, pack_descriptor, pack_mark, safetensors_index, dcp),
        *(skeleton, skeleton_into, npy, npz, workload_file, expert_use, routing_trace, node_record),
    )
}


def _pt() -> list[bytes]:
    """Archives of torch, and smaller ones: with and without checksums, and with zip64 fields."""
    tensor = torch.arange(6.0).reshape(2, 3)
    made = []
    for state in ({"w": tensor, "n": 3}, {"a": [tensor[0], tensor[1:]], "p": torch.nn.Parameter(tensor)}):
        file = io.BytesIO()
        torch.save(state, file)
        made.append(file.getvalue())
    pickled = _pickle_of(made[0])
    for zip64 in (False, True):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            for name, data in (("a/data.pkl", pickled), ("a/byteorder", b"little"), ("a/data/0", bytes(24))):
                with archive.open(zipfile.ZipInfo(name), "w", force_zip64=zip64) as record:
                    record.write(data)
        made.append(file.getvalue())
    return [*made, _without_checksums(made[2])]


def _without_checksums(archive: bytes) -> bytes:
    """Return the archive as under torch.serialization.set_crc32_options(False)."""
    changed = bytearray(archive)
    directory = zips.read_directory(lambda at, nbytes: archive[at : at + nbytes], len(archive), "seed")
    for entry in directory.entries:
        for at in (entry.position + zips.ENTRY_CRC_AT, entry.header + 14):
            changed[at : at + 4] = bytes(4)
    return bytes(changed)


def _pickle_of(archive: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(archive)) as records:
        return records.read(next(name for name in records.namelist() if name.endswith("/data.pkl")))


def _pickles() -> list[bytes]:
    """The pickles of torch, and pieces of them: smaller ones, of one thing each."""
    storage = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpuK\6tQ"
    rebuilt = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\0K\2K\3\x86K\3K\1\x86\x89NtR"
    pieces = [
        b"\x80\2" + rebuilt + b".",
        b"\x80\2}q\0X\1\0\0\0w" + storage + b"s.",
        b"\x80\2]q\0(h\0K\1M\0\1J\xff\xff\xff\xffG?\xf0\0\0\0\0\0\0\x8a\2\xff\0U\1x\x88Ne.",
        b"\x80\2ccollections\nOrderedDict\n)R}X\1\0\0\0a(K\1K\2tsb.",
        b"\x80\2ctorch\ndevice\nX\3\0\0\0cpu\x85R.",
        b"\x80\2cbuiltins\nset\n]\x85R.",
    ]
    return [*map(_pickle_of, _pt()[:2]), *pieces]


def _pack_seed() -> bytes:
    stored = {"name": "w", "dtype": "BF16", "shape": [2, 3], "offset": 4096, "crc32c": 7}
    source = {
        "name": "model.safetensors",
        "nbytes": 9,
        "modified_ns": 1,
        "head_sha256": "00",
        "data_crc32c": 2,
        "changed_ns": 3,
        "inode": 4,
    }
    document = {
        "format": "trunkline pack",
        "version": 1,
        "weights": {"name": "weights.safetensors", "bytes": 8192, "volumes": 2, "directories": ["/a", "/b"]},
        "recipe": {"config_sha256": "00", "dtype": "bfloat16", "converter": ""},
        "source": [source],
        "tensors": [stored],
    }
    return json.dumps(document, separators=(",", ":")).encode()


def _use_seed() -> bytes:
    modules = {"a.experts": [0.0, 0.25], "b.experts": [1.0]}
    crc32c = tl._core.crc32c(json.dumps(modules).encode())
    document = {"format": "trunkline expert use", "version": 1, "modules": modules, "crc32c": crc32c}
    return json.dumps(document).encode()


def _record_seeds() -> list[bytes]:
    load = Entry("4" * 32, 3, "b2", (("b1", 1),), ("0123456789abcdef", "n2"), 70, base="5" * 32)
    record = node_records.Record("0123456789abcdef", {load.id: load}, frozenset({"5" * 32}))
    measured = (("accuracy", 0.5), ("loss", "NaN"))
    save = Entry("5" * 32, 2, "b1", (), ("n1", "n2"), 70, "d", kept_by=((0, 1), (1, 0)), metrics=measured)
    valid = node_records.format_record(record)
    seeds = [valid]
    for text in (valid, node_records.format_record(replace(record, last=save))):
        about = json.loads(text)
        del about["crc32c"]
        seeds.append(b"x" + json.dumps(about).encode())
    return seeds


def _trace_seeds() -> list[bytes]:
    header = (
        '{"format": "trunkline routing trace", "version": 1, "model": "m", "modules": [["a", 4], ["b", 8]]}'
    )
    lines = [header, "[0,1,[3]]", "[1,5,[0,2,7],[5,1,4]]", "[0,9,[]]"]
    valid, checksum = [], 0
    for line in lines:
        checksum = crc32c(line.encode(), checksum)
        valid.append(f"{line} {checksum:08x}\n")
    return ["".join(valid).encode(), "".join(f"x{line}\n" for line in lines).encode()]


def _dcp_seeds() -> list[bytes]:
    import tempfile

    import torch.distributed.checkpoint as torch_dcp

    with tempfile.TemporaryDirectory() as directory:
        state = {"model": {"w": torch.zeros(2, 3), "b": torch.zeros(0)}, "step": 3}
        torch_dcp.save(state, storage_writer=tl.dcp.StorageWriter(directory), no_dist=True)
        manifest = next(Path(directory).glob("*.manifest")).read_bytes()
    empty = {"version": None, "state_dict": {}, "storage_meta": None, "files": [], "items": []}
    planned = {"a": {"tuple": [1, -2, None, True, {"float": "0x1.8000000000000p+0"}, ["x"]]}}
    return [
        manifest,
        manifest.partition(b"\n")[2],
        json.dumps({**empty, "planner_data": None}, separators=(",", ":")).encode(),
        json.dumps({**empty, "planner_data": {"dict": planned}}, separators=(",", ":")).encode(),
    ]


def _npy_seeds() -> list[bytes]:
    arrays = [
        numpy.arange(6.0).reshape(2, 3),
        numpy.asfortranarray(numpy.arange(6, dtype=">i2").reshape(2, 3)),
        numpy.zeros(2, [("x", "<f4"), ("y", "|S3", (2,))]),
        numpy.float32(1),
        numpy.zeros((0, 3), "<U2"),
    ]
    made = []
    for version in ((1, 0), (2, 0), (3, 0)):
        for array in arrays:
            file = io.BytesIO()
            numpy.lib.format.write_array(file, numpy.asanyarray(array), version)
            made.append(file.getvalue())
    return made


def _npz_seeds() -> list[bytes]:
    made = []
    for save in (numpy.savez, numpy.savez_compressed):
        file = io.BytesIO()
        save(file, a=numpy.arange(6.0).reshape(2, 3), b=numpy.float32(1))
        made.append(file.getvalue())
    return made


def _workload_seeds() -> list[bytes]:
    """JSON is YAML."""
    columns = '[{"name":"a","dtype":"int8","read":false},{"name":"b","size":3}]'
    return [
        b'{"dataset":{"format":"npz","num_files_train":8,"record_length_bytes":5e3},'
        b'"reader":{"batch_size":2,"sample_shuffle":"seed"},"train":{"computation_time":0.1,"epochs":2}}',
        f'{{"workflow.train":false,"dataset":{{"format":"parquet","num_files_train":"1_0","parquet":'
        f'{{"columns":{columns},"row_group_size":7}}}}}}'.encode(),
        b"dataset: {format: npy, num_files_train: 1, record_length: 9, num_files_eval: 2}\n"
        b"++workload.reader.batch_size: 1\nworkflow: {evaluation: on}\n"
        b"train: {computation_time: {mean: 1}}\nevaluation: {eval_time: 0}\n",
        b"model: {num_layers: 2, parallelism: {tensor: 2, pipeline: 2, zero_stage: 1}, transformer: "
        b"{hidden_size: 8, num_attention_heads: 2}}\nworkflow: {train: no, checkpoint: yes}\n"
        b"checkpoint: {num_checkpoints_write: 3, fsync: on, type: all_ranks}\n",
        b"workflow: {checkpoint: on}\ndataset: {format: png, num_files_train: 3, record_length: 9}\n"
        b"checkpoint: {layer_parameters: [1, 2], num_layers: 3, optimization_groups: [4], model_size: 5}\n"
        b"reader: {batch_size: 1}\ntrain: {computation_time: 1}\n",
        b"workflow: {inference: on}\ndataset: {format: npy, num_files_train: 3, record_length: 9}\n"
        b"inference: {arrival_rate: 5, computation_time: 0.1, deadline: 1, logging: {fsync: interval}}\n",
    ]


def seeds(name: str) -> list[bytes]:
    """Return valid inputs of a target."""
    if name in ("pt_directory", "pt_archive"):
        return _pt()
    if name == "pt_pickle":
        return _pickles()
    if name == "npy":
        return _npy_seeds()
    if name == "npz":
        return _npz_seeds()
    if name == "pack":
        return [_pack_seed()]
    if name == "expert_use":
        return [_use_seed()]
    if name == "routing_trace":
        return _trace_seeds()
    if name == "node_record":
        return _record_seeds()
    if name == "pack_descriptor":
        return [b'{"id":"0123456789abcdef","member":0,"members":2,"stripe_bytes":4096}']
    if name == "pack_mark":
        return [_marked(b'{"__metadata__":{"%s":"{}","x":"\\u00e9"},"w":1}' % location.MARK.encode())]
    if name == "safetensors_index":
        return [
            b'{"metadata":{"total_size":9},"weight_map":{"a":"b-1.safetensors","c":"d/e.safetensors"}}',
            b'{"weight_map":{"a":"b"}}',
        ]
    if name == "dcp":
        return _dcp_seeds()
    if name == "workload_file":
        return _workload_seeds()
    return [json.dumps(tree.flatten(state)[0], separators=(",", ":")).encode() for state in _parts()]


def _marked(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


def _parts() -> list[dict[str, Any]]:
    """The states, and each of their values alone, except for views of what would be left out."""
    alone = [{key: value} for key, value in _state().items() if key not in ("w", "row")]
    return [*_states(), *alone]


def kept_inputs(name: str) -> list[bytes]:
    """Return the inputs that long runs found (scripts/fuzz.py --keep), one a line, escaped."""
    lines = (_KEPT / f"{name}.txt").read_text("ascii").split("\n")[:-1]
    return [line.encode().decode("unicode_escape").encode("latin-1") for line in lines]


def new_mutator(name: str, rng: random.Random, inputs: Collection[bytes]) -> fuzz_mutator.Mutator:
    """Return what makes mutations of the inputs of a target."""
    split, tokens = fuzz_mutator.split_json, {"value": fuzz_mutator.JSON_TOKENS}
    if name in ("pt_directory", "pt_archive", "npz"):
        split, tokens = fuzz_mutator.split_zip, fuzz_mutator.zip_tokens()
    elif name == "pt_pickle":
        split, tokens = fuzz_mutator.split_pickle, {}
    mutator = fuzz_mutator.Mutator(split, tokens, rng)
    for data in inputs:
        mutator.add(data)
    return mutator
