"""The parsers of untrusted bytes that are in Python: what feeds them, and valid inputs to begin with.

test_fuzz.py tries a few thousand mutations of the seeds; `scripts/fuzz.py --python` as many as are asked for,
led by coverage (fuzz_python.py).
"""

import functools
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch

import trunkline as tl
from trunkline._core import crc32c
from trunkline._formats.pt import archive as archives
from trunkline._formats.pt import pickle as pickles
from trunkline._formats.pt import zip as zips
from trunkline._formats.safetensors import folder
from trunkline._streaming import manifest as pack_manifest
from trunkline.checkpoint.state import restore as restoring
from trunkline.checkpoint.state import tree
from trunkline.dcp import _manifest as dcp_manifest

Target = Callable[[bytes], bool]  # whether it was read
_REFUSED = (tl.Format, tl.Corrupt, tl.Unsupported)
_INTS = (0, 1, 2, 3, 4, 8, 64, 255, 256, 4095, 4096, 0xFFFF, 0xFFFFFFFF, 1 << 32, 1 << 63, (1 << 64) - 1, -1)
_VALUES: tuple[Any, ...] = (
    *_INTS,
    1 << 80,
    1.5,
    -0.0,
    "",
    "x",
    "../x",
    "\0",
    "\ud800",
    None,
    True,
    [],
    {},
    [[]],
    [0],
)


class _Memory:
    """A file of bytes, as archives.Source wants it."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def pread(self, buffer: Any, offset: int = 0) -> int:
        assert offset >= 0
        assert offset + len(buffer) <= self.size
        buffer[:] = self._data[offset : offset + len(buffer)]
        return len(buffer)


def pt_directory(data: bytes) -> bool:
    """Records lie within the file, and none overlaps another."""

    def read(offset: int, nbytes: int) -> bytes:
        assert offset >= 0
        assert nbytes >= 0
        assert offset + nbytes <= len(data)
        return data[offset : offset + nbytes]

    try:
        directory = zips.read_directory(read, len(data), "fuzz")
        headers = [
            data[entry.header : entry.header + zips.header_bytes(entry)] for entry in directory.entries
        ]
        records = list(zips.place_records(directory, headers, "fuzz"))
    except _REFUSED:
        return False
    end = 0
    for record in records:
        assert end <= record.header < record.offset <= record.offset + record.nbytes <= directory.begin
        end = record.offset + record.nbytes
    return True


def pt_pickle(data: bytes) -> bool:
    """Nothing of the pickle runs; what it does is known, or not."""
    found = pickles.scan(data)
    if found is None:
        return False
    assert all(storage.nbytes >= 0 for storage in found.storages)
    assert set(found.names()) <= {storage.key for storage in found.storages}
    return True


def pt_archive(data: bytes) -> bool:
    """The whole of what is known before torch.load runs."""
    try:
        archive = archives.Archive(archives.Source(_Memory(data), "fuzz"), "auto")  # type: ignore[arg-type]
        archive.check_all()
    except _REFUSED:
        return False
    assert archive.pickle.offset + archive.pickle.nbytes <= len(data)
    return True


def pack(data: bytes) -> bool:
    """Tensors lie within the weights."""
    try:
        manifest = pack_manifest.parse(data, Path("fuzz/pack.json"))
    except tl.Format:
        return False
    for stored in manifest.tensors:
        assert 0 <= stored.offset <= stored.offset + stored.nbytes <= manifest.nbytes
    return True


def safetensors_index(data: bytes) -> bool:
    """Files are below the index."""
    try:
        files = folder.parse_index(data, "fuzz.safetensors.index.json")
    except tl.Format:
        return False
    for name in files.values():
        assert not Path(name).is_absolute()
        assert ".." not in Path(name).parts
    return True


def dcp(data: bytes) -> bool:
    """As they are, and with the first line that the text should have; what is read is written as itself."""
    line = b"trunkline-dcp %d crc32c=%08x bytes=%d\n" % (dcp_manifest.VERSION, crc32c(data), len(data))
    was_read = False
    for text in (data, line + data):
        try:
            metadata = dcp_manifest.parse_manifest(text, "fuzz")
        except _REFUSED:
            continue
        again = dcp_manifest.parse_manifest(dcp_manifest.format_manifest(metadata), "fuzz")
        assert repr(again) == repr(metadata)
        was_read = True
    return was_read


@functools.cache
def _skeleton_state() -> dict[str, Any]:
    """A state with views: of a tensor that is there as a whole, and of memory with gaps between them."""
    whole, memory = torch.zeros(2, 3), torch.zeros(64)
    return {
        "w": whole,
        "row": whole[1],
        "v": [memory[4:12], memory[8:20:2]],
        "t": torch.zeros(3, 2).t(),
        "n": [1, 2.5, None, b"x", (3, "y")],
        "a": numpy.zeros(3),
        "s": {1, "z"},
    }


@functools.cache
def _skeleton() -> tuple[Any, dict[str, torch.Tensor]]:
    return tree.flatten(_skeleton_state())


def skeleton(data: bytes) -> bool:
    """The state of a checkpoint, whose tensors are there."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return False
    try:
        restoring.restore(document, _skeleton()[1])
    except tl.Format:
        return False
    return True


def skeleton_into(data: bytes) -> bool:
    """The same, into tensors that are there: what does not fit is a ValueError that says so."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return False
    stored = _skeleton()[1]
    try:
        _, targets, finish = restoring.restore_into(document, _skeleton_state())
        for name, target in targets.items():  # sizes are compared with the manifest before anything is read
            if name not in stored or target.nbytes != stored[name].nbytes:
                return False
        finish()
    except tl.Format:
        return False
    except ValueError as error:
        if not str(error).startswith("into: "):
            raise
        return False
    return True


TARGETS: dict[str, Target] = {
    each.__name__: each
    for each in (pt_directory, pt_pickle, pt_archive, pack, safetensors_index, dcp, skeleton, skeleton_into)
}


def _pt() -> list[bytes]:
    tensor = torch.arange(6.0).reshape(2, 3)
    made = []
    for state in ({"w": tensor, "n": 3}, {"a": [tensor[0], tensor[1:]], "p": torch.nn.Parameter(tensor)}):
        file = io.BytesIO()
        torch.save(state, file)
        made.append(file.getvalue())
    return made


def _pickle_of(archive: bytes) -> bytes:
    directory = zips.read_directory(
        lambda offset, nbytes: archive[offset : offset + nbytes], len(archive), "seed"
    )
    headers = [archive[entry.header : entry.header + zips.header_bytes(entry)] for entry in directory.entries]
    record = next(
        each for each in zips.place_records(directory, headers, "seed") if each.name.endswith("/data.pkl")
    )
    return archive[record.offset : record.offset + record.nbytes]


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
    return json.dumps(document).encode()


def _dcp_seeds() -> list[bytes]:
    import tempfile

    import torch.distributed.checkpoint as torch_dcp

    with tempfile.TemporaryDirectory() as directory:
        state = {"model": {"w": torch.zeros(2, 3), "b": torch.zeros(0)}, "step": 3}
        torch_dcp.save(state, storage_writer=tl.dcp.StorageWriter(directory), no_dist=True)
        manifest = next(Path(directory).glob("*.manifest")).read_bytes()
    return [manifest, manifest.partition(b"\n")[2]]


def seeds(name: str) -> list[bytes]:
    """Return valid inputs of a target."""
    if name in ("pt_directory", "pt_archive"):
        return _pt()
    if name == "pt_pickle":
        return [_pickle_of(archive) for archive in _pt()]
    if name == "pack":
        return [_pack_seed()]
    if name == "safetensors_index":
        return [
            b'{"metadata": {"total_size": 9}, "weight_map": {"a": "b-1.safetensors", "c": "d/e.safetensors"}}'
        ]
    if name == "dcp":
        return _dcp_seeds()
    return [json.dumps(_skeleton()[0]).encode()]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Change an input in a few places: its bytes, or, of JSON, its values."""
    if rng.random() < 0.5:
        try:
            document = json.loads(data)
        except ValueError:
            pass
        else:
            for _ in range(rng.randint(1, 3)):
                document = _mutated_value(document, rng)
            return json.dumps(document).encode("utf-8", "surrogatepass")
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            width = rng.choice((1, 2, 4, 8))
            changed[at : at + width] = (rng.choice(_INTS) % (1 << 8 * width)).to_bytes(width, "little")
        elif kind == 2:
            del changed[at : at + rng.randint(1, 16)]
        elif kind == 3:
            changed[at:at] = changed[rng.randrange(len(changed) + 1) :][: rng.randint(1, 64)]
        else:
            del changed[at:]
    return bytes(changed)


def _mutated_value(value: Any, rng: random.Random) -> Any:
    if not isinstance(value, dict | list) or not value or rng.random() < 0.1:
        return rng.choice(_VALUES)
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = rng.choice(keys)
    if rng.random() < 0.1:
        return (
            [each for index, each in enumerate(value) if index != key]
            if isinstance(value, list)
            else {each: value[each] for each in value if each != key}
        )
    made = dict(value) if isinstance(value, dict) else list(value)
    made[key] = _mutated_value(value[key], rng)
    return made
