"""The manifest of trunkline.dcp: to JSON and back exactly, and nothing else is taken."""

from __future__ import annotations

import enum
import json
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import trunkline as tl
from trunkline._core import crc32c

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.distributed.checkpoint.metadata import (  # noqa: E402
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from trunkline.dcp._manifest import format_manifest, parse_manifest, read_manifest  # noqa: E402
from trunkline.dcp._stored import DataFile, StoredItem  # noqa: E402

NAME = f"rank00003-1-{'0123456789abcdef' * 2}.shard"


def example() -> Metadata:
    file = DataFile(NAME, (1 << 20) + 4096 + 20, bytes(range(8)))
    properties = TensorProperties(torch.bfloat16, torch.strided, True, torch.channels_last, True)
    chunks = [ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((2, 3)))]
    return Metadata(
        state_dict_metadata={
            "w": TensorStorageMetadata(properties, torch.Size((2, 3)), chunks),
            "empty": TensorStorageMetadata(TensorProperties(), torch.Size(()), []),
            'object "\u00e4\ud800': BytesStorageMetadata(),
        },
        planner_data={"w": ("w",), "list.0": ("list", 0), "x": [None, True, -1, 1.5, {"k": ()}]},
        storage_data={
            MetadataIndex("w", (0, 0), 4): StoredItem(file, 4096, 12, "bfloat16", (2, 3)),
            MetadataIndex("empty", ()): StoredItem(None, 0, 0, "float32", (0,)),
            MetadataIndex('object "\u00e4\ud800'): StoredItem(file, (1 << 20) + 4096, 20, None, None),
        },
        storage_meta=StorageMeta("/path", "save", None, ["module"]),
        version="1.0.0",
    )


def framed(text: bytes) -> bytes:
    return b"trunkline-dcp 1 crc32c=%08x bytes=%d\n" % (crc32c(text), len(text)) + text


def test_there_and_back() -> None:
    metadata = example()
    again = parse_manifest(format_manifest(metadata), "path")
    assert again == metadata
    assert [index.index for index in again.storage_data] == [4, None, None]  # which equality leaves out
    assert list(again.state_dict_metadata) == list(metadata.state_dict_metadata)
    files = {id(item.file) for item in again.storage_data.values() if item.file is not None}
    assert len(files) == 1
    assert type(again.planner_data["w"]) is tuple
    assert type(again.state_dict_metadata["w"].size) is torch.Size
    bare = Metadata({}, storage_data={})
    assert parse_manifest(format_manifest(bare), "path") == bare


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def typed(value: Any) -> Any:
    """Types and signs too, which equality leaves out."""
    if isinstance(value, dict):
        return dict, {key: typed(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [typed(element) for element in value]
    return type(value), value.hex() if isinstance(value, float) else value


@settings(max_examples=200, deadline=None)
@given(plain)
def test_any_plain_planner_data(value: Any) -> None:
    again = parse_manifest(format_manifest(Metadata({}, value, {})), "path")
    assert typed(again.planner_data) == typed(value)


class Colour(str, enum.Enum):
    RED = "red"


def deep(levels: int) -> Any:
    return [deep(levels - 1)] if levels else []


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"a": [{1}]}, "planner_data['a'][0]"),
        ({1: "a"}, "a key of planner_data"),
        (float("nan"), "planner_data"),
        (2**63, "planner_data"),
        (torch.Size((1,)), "planner_data"),
        (OrderedDict(), "OrderedDict"),
        (Colour.RED, "Colour"),
        (b"bytes", "bytes"),
        (deep(101), "nested"),
    ],
)
def test_planner_data_that_json_cannot_hold(value: Any, name: str) -> None:
    with pytest.raises(tl.Unsupported) as caught:
        format_manifest(Metadata({}, value, {}))
    assert name in str(caught.value)


def test_metadata_of_other_types() -> None:
    class MyBytes(BytesStorageMetadata):
        pass

    class MyMeta(StorageMeta):
        pass

    base = example()
    for metadata, name in (
        (replace(base, state_dict_metadata={"mine": MyBytes()}), "'mine'"),
        (replace(base, state_dict_metadata={3: BytesStorageMetadata()}), "state dict"),
        (replace(base, storage_meta=MyMeta()), "storage_meta"),
        (replace(base, storage_meta=StorageMeta(checkpoint_id=3)), "checkpoint_id"),
    ):
        with pytest.raises(tl.Unsupported, match=name):
            format_manifest(metadata)


def test_every_flipped_bit_cut_and_addition() -> None:
    data = format_manifest(example())
    for at in range(len(data)):
        for bit in range(8):
            with pytest.raises((tl.Corrupt, tl.Format)) as caught:
                parse_manifest(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :], "the path")
            assert caught.value.filename == "the path"
    for other in (*(data[:at] for at in range(len(data))), data + b"\n", b"\n" + data):
        with pytest.raises((tl.Corrupt, tl.Format)):
            parse_manifest(other, "the path")


def test_a_newer_version_is_named(tmp_path: Path) -> None:
    data = format_manifest(example()).replace(b"trunkline-dcp 1", b"trunkline-dcp 12", 1)
    for newer in (
        data,
        b"trunkline-dcp 2 sha256=0123 rows=7\n{}",  # only the words up to the version are kept
        b"trunkline-dcp 12 ",
        b"trunkline-dcp 12345678901 crc32c=01234567 bytes=0\n",
    ):
        with pytest.raises(tl.Format, match="has format version [0-9]+.*upgrade") as caught:
            parse_manifest(newer, "the path")
        assert type(caught.value) is tl.Format
    path = tmp_path / "dcp.manifest"
    path.write_bytes(b"trunkline-dcp 2 " + b"x" * 1000)
    with pytest.raises(tl.Format, match="has format version 2"):
        read_manifest(path)


def test_a_manifest_that_is_empty_or_cut_off_is_corrupt(tmp_path: Path) -> None:
    data = format_manifest(example())
    path = tmp_path / "dcp.manifest"
    for nbytes in range(len(data)):
        with pytest.raises(tl.Corrupt):
            parse_manifest(data[:nbytes], "the path")
    for nbytes in (0, 5, 14, 15, 40, len(data) - 1):
        path.write_bytes(data[:nbytes])
        with pytest.raises(tl.Corrupt):
            read_manifest(path)
    for other in (b"trunkline", b"trunkline-dcp 0 crc32c=01234567 bytes=0\n", b"trunkline-dcp x"):
        with pytest.raises(tl.Corrupt):
            parse_manifest(other, "the path")
    for other in (b"x", b"PK", b"trunkline-pack "):
        with pytest.raises(tl.Format, match="another file"):
            parse_manifest(other, "the path")


def changed(*path: Any, to: Any) -> bytes:
    """Return a manifest whose checksum is right, but not this value; `to` ...: without it."""
    document = json.loads(format_manifest(example()).partition(b"\n")[2])
    at = document
    for step in path[:-1]:
        at = at[step]
    if to is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = to
    return framed(json.dumps(document).encode())


REFUSED = [
    framed(b""),
    framed(b"[]"),
    framed(b"{}"),
    framed(b"\xff"),
    framed(b"[" * 100_000),
    framed(b'{"version":1,"version":1}'),
    framed(b'{"version":NaN}'),
    changed("items", to=...),
    changed("more", to=1),
    changed("version", to=1),
    changed("planner_data", to={"set": []}),
    changed("planner_data", to={"tuple": [], "dict": {}}),
    changed("planner_data", to={"tuple": {}}),
    changed("planner_data", to={"float": "1.5"}),
    changed("planner_data", to={"float": "inf"}),
    changed("planner_data", to=1.5),
    changed("planner_data", to=2**63),
    changed("planner_data", to=deep(200)),
    changed("state_dict", "w", "dtype", to="load"),
    changed("state_dict", "w", "dtype", to="no_such"),
    changed("state_dict", "w", "layout", to=["strided"]),
    changed("state_dict", "w", "memory_format", to=""),
    changed("state_dict", "w", "requires_grad", to=1),
    changed("state_dict", "w", "size", to=[-1, 3]),
    changed("state_dict", "w", "size", to=[True, 3]),
    changed("state_dict", "w", "size", to=[2.0, 3]),
    changed("state_dict", "w", "size", to=[2]),
    changed("state_dict", "w", "chunks", 0, to=[[0, 0]]),
    changed("state_dict", "w", "chunks", 0, 1, to=[2]),
    changed("storage_meta", to=[]),
    changed("storage_meta", "modules", to=[1]),
    changed("storage_meta", "save_id", to=...),
    changed("files", 0, "name", to="../../etc/passwd"),
    changed("files", 0, "name", to=NAME + "/x"),
    changed("files", 0, "bytes", to=1 << 20),
    changed("files", 0, "bytes", to=1 << 63),
    changed("files", 0, "crc32c", to="0" * 15),
    changed("files", 0, "crc32c", to="0" * 15 + "A"),
    changed("files", 0, "crc32c", to=None),
    changed("files", to=[{"name": NAME, "bytes": 0, "crc32c": ""}] * 2),
    changed("items", 0, "file", to=1),
    changed("items", 0, "file", to=-1),
    changed("items", 0, "file", to=None),
    changed("items", 0, "offset", to=4097),
    changed("items", 0, "offset", to=2 << 20),
    changed("items", 0, "offset", to=(1 << 63) - 1),
    changed("items", 0, "bytes", to=11),
    changed("items", 0, "shape", to=None),
    changed("items", 0, "shape", to=[2, 4]),
    changed("items", 0, "shape", to=[1 << 62, 1 << 62]),
    changed("items", 0, "dtype", to="float32"),
    changed("items", 0, "hint", to="0"),
    changed("items", 0, "chunk", to=[[0]]),
    changed("items", 0, "fqn", to=None),
    changed("items", 1, to={}),
]


@pytest.mark.parametrize("data", REFUSED, ids=map(str, range(len(REFUSED))))
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(tl.Format) as caught:
        parse_manifest(data, "the path")
    assert str(caught.value).startswith("the path: ")


def test_an_item_twice() -> None:
    document = json.loads(format_manifest(example()).partition(b"\n")[2])
    document["items"].append(document["items"][0])
    with pytest.raises(tl.Format, match="is duplicated"):
        parse_manifest(framed(json.dumps(document).encode()), "the path")
