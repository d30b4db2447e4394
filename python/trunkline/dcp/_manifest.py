"""The manifest of a checkpoint: torch's Metadata as JSON, framed by a line with its checksum, and back.

The format is docs/formats/dcp.md. Reading is strict: what formatting does not write is refused.
"""

import hashlib
import os
import re
import stat
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from trunkline._core import crc32c
from trunkline._errors import Corrupt, Format, Unsupported, system_errors
from trunkline._formats.dcp_names import is_data_file_name
from trunkline.dcp import _json
from trunkline.dcp._json import Refusal
from trunkline.dcp._stored import (
    CHUNK_BYTES,
    DTYPES,
    SMALL_ALIGNMENT,
    DataFile,
    StoredItem,
)

VERSION = 1
_LINE_BYTES = 128  # more than any first line has
_MAX_BYTES = 2 << 30  # of the JSON: bounds the memory of readers
_BEGINNING = b"trunkline-dcp "
_VERSIONED = re.compile(rb"trunkline-dcp ([1-9][0-9]*) ")  # what every version begins with
_FRAME = re.compile(rb"trunkline-dcp %d crc32c=([0-9a-f]{8}) bytes=(0|[1-9][0-9]{0,18})\n" % VERSION)

_LAYOUTS = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if type(value) is torch.layout
}
_MEMORY_FORMATS = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if type(value) is torch.memory_format
}
_PROPERTIES = ("dtype", "layout", "memory_format", "requires_grad", "pin_memory")


def format_manifest(metadata: Metadata) -> bytes:
    """Return the file's contents. Raises Unsupported, naming values that JSON cannot represent exactly."""
    try:
        text = _json.dumps(_metadata_to_json(metadata)).encode("ascii")
        if len(text) > _MAX_BYTES:
            raise Refusal(f"it would have {len(text)} bytes, but readers accept at most {_MAX_BYTES}")
    except Refusal as refusal:
        raise Unsupported(
            None,
            f"the metadata of this checkpoint cannot be stored: {refusal}; "
            "use a planner without it, or torch's FileSystemWriter, which pickles",
        ) from None
    return b"trunkline-dcp %d crc32c=%08x bytes=%d\n" % (VERSION, crc32c(text), len(text)) + text


def read_manifest(path: Path) -> Metadata:
    """Read a manifest. Raises FileNotFoundError, Corrupt, Format."""
    return parse_manifest(_contents_of(path), str(path))


def _contents_of(path: Path) -> bytes:
    with system_errors(f"read {path}", path):
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for a writer
            raise Format(None, f"{path}: it is not a regular file", str(path))
        with path.open("rb") as file:
            beginning = file.read(_LINE_BYTES)
            # Before all of it is read: a sparse file can be larger than the memory.
            _check_frame(beginning, os.fstat(file.fileno()).st_size, str(path))
            return beginning + file.read()


def manifest_digest(path: Path) -> bytes:
    """Return the SHA-256 of a manifest, which differs between saves, since a manifest contains the save_id.

    A copy, or a changed time of modification, makes no difference. Raises FileNotFoundError.
    """
    with system_errors(f"read {path}", path):
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for a writer
            return b""
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > _LINE_BYTES + _MAX_BYTES:  # not a manifest
                return b""
            digest = hashlib.sha256()
            while block := file.read(1 << 20):
                digest.update(block)
            return digest.digest()


def parse_manifest(data: bytes, path: str) -> Metadata:
    """Parse what format_manifest() returned. Raises Corrupt for damaged data, Format for anything else."""
    text = _checked_text(data, path)
    try:
        return _metadata_from_json(_json.loads(bytes(text)))
    except Refusal as refusal:
        raise Format(None, f"{path}: {refusal}", path) from None


def names_in_manifest(path: Path, names: set[str]) -> set[str]:
    """Return the files among `names` that a manifest refers to: all if it is damaged, or of a newer version.

    It is read, but not parsed. Raises FileNotFoundError.
    """
    try:
        data = _contents_of(path)
        _checked_text(data, str(path))
    except (Corrupt, Format):
        return set(names)
    return {name for name in names if b'"%s"' % name.encode("ascii") in data}


def _checked_text(data: bytes, path: str) -> memoryview:
    frame = _check_frame(data, len(data), path)
    text = memoryview(data)[frame.end() :]
    if crc32c(text) != int(frame[1], 16):
        raise Corrupt(
            None, f"{path} is corrupt: it does not match its checksum; restore it from a copy", path
        )
    return text


def _check_frame(data: bytes, nbytes: int, path: str) -> "re.Match[bytes]":
    """Return the parts of the first line of a manifest of `nbytes`, of which `data` is the beginning."""
    if not data:
        raise Corrupt(None, f"{path} is corrupt: it is empty; restore it from a copy", path)
    versioned = _VERSIONED.match(data[:_LINE_BYTES])
    if versioned is not None and versioned[1] != b"%d" % VERSION:
        raise Format(
            None,
            f"{path}: it has format version {versioned[1].decode()}, and this trunkline reads {VERSION}; "
            "upgrade trunkline to read it",
            path,
        )
    frame = _FRAME.match(data)
    if frame is None:
        if not data.startswith(_BEGINNING[: len(data)]):
            raise Format(None, f"{path}: it does not begin like a manifest; is it another file?", path)
        raise Corrupt(
            None, f"{path} is corrupt: its first line is damaged or truncated; restore it from a copy", path
        )
    follow = nbytes - frame.end()
    if follow != int(frame[2]):
        raise Corrupt(
            None,
            f"{path} is corrupt: {follow} bytes follow its first line, which declares {int(frame[2])}; "
            "restore it from a copy",
            path,
        )
    if follow > _MAX_BYTES:
        raise Format(None, f"{path}: it has {follow} bytes, but a manifest has at most {_MAX_BYTES}", path)
    return frame


def _metadata_to_json(metadata: Metadata) -> dict[str, Any]:
    if type(metadata) is not Metadata:
        _cannot("metadata", metadata)
    files: dict[str, int] = {}
    listed: list[dict[str, Any]] = []
    items = []
    for index, item in metadata.storage_data.items():
        file = item.file
        if file is not None and file.name not in files:
            files[file.name] = len(listed)
            listed.append({"name": file.name, "bytes": file.nbytes, "crc32c": _sums_to_hex(file.crc32c)})
        items.append(
            {
                "fqn": _json.text(index.fqn, "the name of an item"),
                "chunk": None if index.offset is None else list(index.offset),
                "hint": index.index,
                "file": None if file is None else files[file.name],
                "offset": item.offset,
                "bytes": item.nbytes,
                "dtype": item.dtype,
                "shape": None if item.shape is None else list(item.shape),
            }
        )
    return {
        "version": metadata.version,
        "state_dict": {
            _json.text(fqn, "a key of the state dict"): _entry_to_json(fqn, entry)
            for fqn, entry in metadata.state_dict_metadata.items()
        },
        "planner_data": _json.encode(metadata.planner_data, "planner_data"),
        "storage_meta": _storage_meta_to_json(metadata.storage_meta),
        "files": listed,
        "items": items,
    }


def _metadata_from_json(value: object) -> Metadata:
    top = _json.record(
        value, "the manifest", ("version", "state_dict", "planner_data", "storage_meta", "files", "items")
    )
    files = [_file_from_json(file) for file in _json.array(top["files"], "files")]
    if len({file.name for file in files}) != len(files):
        raise Refusal("files: a name is duplicated")
    storage: dict[MetadataIndex, StoredItem] = {}
    for item in _json.array(top["items"], "items"):
        index, stored = _item_from_json(item, files)
        if index in storage:
            raise Refusal(f"items: {index.fqn!r} at {index.offset} is duplicated")
        storage[index] = stored
    return Metadata(
        state_dict_metadata={
            fqn: _entry_from_json(fqn, entry)
            for fqn, entry in _json.mapping(top["state_dict"], "state_dict").items()
        },
        planner_data=_json.decode(top["planner_data"], "planner_data"),
        storage_data=storage,
        storage_meta=_storage_meta_from_json(top["storage_meta"]),
        version=_json.optional_text(top["version"], "version"),
    )


def _entry_to_json(fqn: str, entry: object) -> dict[str, Any] | None:
    if type(entry) is BytesStorageMetadata:
        return None
    if type(entry) is not TensorStorageMetadata or type(entry.properties) is not TensorProperties:
        _cannot(f"the metadata of {fqn!r}", entry)
    properties = entry.properties
    return {
        "dtype": _name_of(properties.dtype, DTYPES, f"the dtype of {fqn!r}"),
        "layout": _name_of(properties.layout, _LAYOUTS, f"the layout of {fqn!r}"),
        "memory_format": _name_of(properties.memory_format, _MEMORY_FORMATS, f"the memory format of {fqn!r}"),
        "requires_grad": bool(properties.requires_grad),
        "pin_memory": bool(properties.pin_memory),
        "size": list(entry.size),
        "chunks": [[list(chunk.offsets), list(chunk.sizes)] for chunk in entry.chunks],
    }


def _entry_from_json(fqn: str, value: object) -> TensorStorageMetadata | BytesStorageMetadata:
    if value is None:
        return BytesStorageMetadata()
    what = f"state_dict: {fqn!r}"
    entry = _json.record(value, what, (*_PROPERTIES, "size", "chunks"))
    size = torch.Size(_json.extents(entry["size"], f"{what}: size"))
    chunks = []
    for pair in _json.array(entry["chunks"], f"{what}: chunks"):
        offsets, sizes = (_json.extents(part, f"{what}: chunks") for part in _json.array(pair, what, 2))
        if len(offsets) != len(size) or len(sizes) != len(size):
            raise Refusal(f"{what}: a chunk has more or fewer dimensions than the tensor")
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
    properties = TensorProperties(
        dtype=_named(entry["dtype"], DTYPES, f"{what}: dtype"),
        layout=_named(entry["layout"], _LAYOUTS, f"{what}: layout"),
        requires_grad=_json.boolean(entry["requires_grad"], f"{what}: requires_grad"),
        memory_format=_named(entry["memory_format"], _MEMORY_FORMATS, f"{what}: memory_format"),
        pin_memory=_json.boolean(entry["pin_memory"], f"{what}: pin_memory"),
    )
    return TensorStorageMetadata(properties, size, chunks)


def _item_from_json(value: object, files: list[DataFile]) -> tuple[MetadataIndex, StoredItem]:
    item = _json.record(value, "items", ("fqn", "chunk", "hint", "file", "offset", "bytes", "dtype", "shape"))
    fqn = _json.text(item["fqn"], "items: fqn")
    what = f"items: {fqn!r}"
    chunk = None if item["chunk"] is None else _json.extents(item["chunk"], f"{what}: chunk")
    hint = None if item["hint"] is None else _json.count(item["hint"], f"{what}: hint")
    offset, nbytes = (_json.count(item[key], f"{what}: {key}") for key in ("offset", "bytes"))
    file = None
    if item["file"] is not None:
        number = _json.count(item["file"], f"{what}: file")
        if number >= len(files):
            raise Refusal(f"{what}: file {number} does not exist")
        file = files[number]
    if nbytes > 0 and file is None:
        raise Refusal(f"{what}: its bytes are in no file")
    if offset + nbytes > (file.nbytes if file is not None else 0):
        raise Refusal(f"{what}: it extends past the end of its file")
    if (item["dtype"] is None) != (item["shape"] is None):
        raise Refusal(f"{what}: dtype and shape must be given together")
    if item["dtype"] is None:
        return MetadataIndex(fqn, chunk, hint), StoredItem(file, offset, nbytes, None, None)
    dtype: torch.dtype = _named(item["dtype"], DTYPES, f"{what}: dtype")
    shape = _json.extents(item["shape"], f"{what}: shape")
    expected = dtype.itemsize
    for extent in shape:
        expected *= extent
    if nbytes != expected:
        raise Refusal(f"{what}: its size, {nbytes} bytes, does not match its dtype and shape")
    if offset % SMALL_ALIGNMENT != 0:
        raise Refusal(f"{what}: its offset is not a multiple of {SMALL_ALIGNMENT}")
    return MetadataIndex(fqn, chunk, hint), StoredItem(file, offset, nbytes, item["dtype"], tuple(shape))


def _file_from_json(value: object) -> DataFile:
    file = _json.record(value, "files", ("name", "bytes", "crc32c"))
    name = _json.text(file["name"], "files: name")
    if not is_data_file_name(name):
        raise Refusal(f"files: {name!r} is not the name of a data file")
    nbytes = _json.count(file["bytes"], f"{name}: bytes")
    digits = _json.text(file["crc32c"], f"{name}: crc32c")
    if re.fullmatch(r"(?:[0-9a-f]{8})*", digits) is None or len(digits) // 8 != -(-nbytes // CHUNK_BYTES):
        raise Refusal(f"{name}: crc32c: must be 8 lower-case hexadecimal digits for each chunk")
    return DataFile(name, nbytes, bytes_of_checksums(digits))


def _sums_to_hex(sums: bytes) -> str:
    return "".join(sums[at : at + 4][::-1].hex() for at in range(0, len(sums), 4))


def bytes_of_checksums(digits: str) -> bytes:
    """Return checksums in hexadecimal digits as a DataFile has them."""
    return b"".join(bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8))


def _storage_meta_to_json(meta: StorageMeta | None) -> dict[str, Any] | None:
    if meta is None:
        return None
    if type(meta) is not StorageMeta:
        _cannot("storage_meta", meta)
    return {
        "checkpoint_id": _json.optional_text(meta.checkpoint_id, "storage_meta.checkpoint_id"),
        "save_id": _json.optional_text(meta.save_id, "storage_meta.save_id"),
        "load_id": _json.optional_text(meta.load_id, "storage_meta.load_id"),
        "modules": [_json.text(name, "storage_meta.modules") for name in meta.modules],
    }


def _storage_meta_from_json(value: object) -> StorageMeta | None:
    if value is None:
        return None
    meta = _json.record(value, "storage_meta", ("checkpoint_id", "save_id", "load_id", "modules"))
    return StorageMeta(
        checkpoint_id=_json.optional_text(meta["checkpoint_id"], "storage_meta: checkpoint_id"),
        save_id=_json.optional_text(meta["save_id"], "storage_meta: save_id"),
        load_id=_json.optional_text(meta["load_id"], "storage_meta: load_id"),
        modules=[
            _json.text(name, "storage_meta: modules")
            for name in _json.array(meta["modules"], "storage_meta: modules")
        ],
    )


def _name_of(value: Any, table: dict[str, Any], what: str) -> str:
    name = str(value).removeprefix("torch.")
    if table.get(name) is not value:
        _cannot(what, value)
    return name


def _named(value: object, table: dict[str, Any], what: str) -> Any:
    name = _json.text(value, what)
    if name not in table:
        raise Refusal(f"{what}: this torch has no {name!r}; a newer one may")
    return table[name]


def _cannot(what: str, value: object) -> NoReturn:
    raise Refusal(f"{what} is {value!r} of type {type(value).__name__}")
