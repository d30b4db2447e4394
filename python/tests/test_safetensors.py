"""Safetensors files: each of both libraries reads what the other writes, and flips are found."""

import errno
import gc
import json
import math
import random
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trunkline as tl
from trunkline import _core

torch = pytest.importorskip("torch")
reference = pytest.importorskip("safetensors.torch")

from safetensors import SafetensorError, safe_open  # noqa: E402

from trunkline._formats.safetensors import (  # noqa: E402
    checksums,
    lay_out,
    load,
    load_folder,
)
from trunkline._tensor_io.tensors import _SAFETENSORS_NAMES  # noqa: E402
from trunkline._tensor_io.transfer import write_layouts  # noqa: E402

DTYPES = list(_SAFETENSORS_NAMES)
CHUNK = 1 << 20


@pytest.fixture(scope="module")
def engine() -> Iterator[tl.Engine]:
    with tl.Engine("threads") as made:
        yield made


def filled(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any bits but, for bool, those of booleans."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    if dtype is torch.bool:
        raw &= 1
    return raw.view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        other = b[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
        assert bits(tensor) == bits(other), name


def read_by_reference(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def save(tensors: Any, path: Path, engine: tl.Engine, **options: Any) -> None:
    write_layouts([lay_out(tensors, path, **options)], engine=engine, durable=False)


def header_of(data: bytes) -> tuple[int, dict[str, Any]]:
    """Where the data begin, and the JSON."""
    [length] = struct.unpack("<Q", data[:8])
    return 8 + length, json.loads(data[8 : 8 + length])


def several() -> dict[str, torch.Tensor]:
    """Three chunks of data, the middle of which is of several tensors."""
    return {
        "large": filled(torch.float32, (300_000,), 1),
        "page": filled(torch.bfloat16, (2048, 3), 2),
        "größe\n\"x\\'": filled(torch.int64, (7,), 3),
        "scalar": filled(torch.float64, (), 4),
        "empty": filled(torch.float16, (0, 3), 5),
        "other": filled(torch.uint8, (1_300_001,), 6),
    }


# Writing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_read_by_the_reference_and_by_load(
    dtype: torch.dtype, checksum: bool, tmp_path: Path, engine: tl.Engine
) -> None:
    tensors = {
        "matrix": filled(dtype, (4, 6), 1),
        "transposed": filled(dtype, (4, 6), 2).t(),
        "empty": filled(dtype, (2, 0, 3)),
        "page": filled(dtype, (4096 // dtype.itemsize,), 3),
        "expanded": filled(dtype, (1, 6), 4).expand(3, 6),
    }
    if dtype is not torch.float4_e2m1fn_x2:
        tensors["scalar"] = filled(dtype, (), 5)
    path = tmp_path / "a.safetensors"
    save(tensors, path, engine, checksum=checksum, metadata={"format": "pt"})
    found, metadata = read_by_reference(path)
    assert_same(found, tensors)
    assert metadata.pop("format") == "pt"
    assert metadata.keys() == ({"trunkline.crc32c"} if checksum else set())
    assert_same(load(path, engine=engine, verify=True if checksum else "auto"), tensors)
    assert_same(load(path, engine=engine, mmap=True), tensors)


def test_data_are_aligned(tmp_path: Path, engine: tl.Engine) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {
        "odd": filled(torch.uint8, (3,)),
        "a": filled(torch.float32, (1024, 5)),
        "b": filled(torch.int8, (8192,)),
    }
    save(tensors, path, engine)
    begin, header = header_of(path.read_bytes())
    assert begin % 4096 == 0
    assert {name: header[name]["data_offsets"][0] % 4096 for name in "ab"} == {"a": 0, "b": 0}


def test_lazy_tensors_and_parameters(tmp_path: Path, engine: tl.Engine) -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    path = tmp_path / "a.safetensors"
    save(
        {"conj": z.conj(), "neg": z.conj().imag, "parameter": torch.nn.Parameter(torch.ones(2))}, path, engine
    )
    found = load(path, engine=engine)
    assert found["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert found["neg"].tolist() == [-2, 4]
    assert found["parameter"].tolist() == [1, 1]


def test_tied_weights_are_stored_under_each_name(tmp_path: Path, engine: tl.Engine) -> None:
    weight = filled(torch.float32, (100, 100))
    tensors = {"embed": weight, "head": weight, "rows": weight[3:]}
    save(tensors, tmp_path / "a.safetensors", engine)
    assert_same(read_by_reference(tmp_path / "a.safetensors")[0], tensors)
    assert_same(load(tmp_path / "a.safetensors", engine=engine, verify=True), tensors)


def test_no_tensors(tmp_path: Path, engine: tl.Engine) -> None:
    save({}, tmp_path / "a.safetensors", engine)
    assert load(tmp_path / "a.safetensors", engine=engine, verify=True) == {}
    assert read_by_reference(tmp_path / "a.safetensors")[0] == {}


def test_many_tensors(tmp_path: Path, engine: tl.Engine) -> None:
    tensors = {f"layers.{i}": torch.full((i % 7,), i) for i in range(30_000)}
    save(tensors, tmp_path / "a.safetensors", engine)
    assert_same(load(tmp_path / "a.safetensors", engine=engine, verify=True), tensors)


@pytest.mark.parametrize(
    ("tensors", "metadata", "kind", "says"),
    [
        (
            {3: torch.zeros(1)},
            None,
            TypeError,
            "obj: the keys in a .safetensors file must be str, not int",
        ),
        ({"a": [1.0]}, None, TypeError, "obj: 'a' is a list, and a .safetensors file holds only tensors by"),
        ([torch.zeros(1)], None, TypeError, "by name, and this is a list; save it in a .pt file"),
        (torch.zeros(1), None, TypeError, "by name, and this is a Tensor; save it in a .pt file"),
        (torch.nn.Linear(2, 2), None, TypeError, "by name, and this is a Linear; save its state_dict()"),
        ({"a": torch.zeros(1)}, {"x": 1}, TypeError, "'x': 1"),
        ({"a": torch.zeros(1)}, {1: "x"}, TypeError, "1: 'x'"),
        ({"a": torch.zeros(1)}, {"x": "\ud800"}, ValueError, "UTF-8"),
        ({"\ud800": torch.zeros(1)}, None, ValueError, "UTF-8"),
        ({"__metadata__": torch.zeros(1)}, None, ValueError, "__metadata__"),
        (
            {"a": torch.zeros(1, dtype=torch.complex128)},
            None,
            tl.Unsupported,
            "'a' has the dtype torch.complex128",
        ),
        ({"a": filled(torch.float4_e2m1fn_x2, ())}, None, tl.Unsupported, "no dimension"),
        ({"a": torch.zeros(1).to_sparse()}, None, tl.Unsupported, "'a' is a sparse tensor"),
        (
            {"a": torch.zeros(1, device="meta")},
            None,
            tl.Unsupported,
            "'a' is on the meta device, where tensors have no memory; load or initialize it on another",
        ),
    ],
)
def test_what_the_format_cannot_hold(tensors: Any, metadata: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=re.escape(says)) as caught:
        lay_out(tensors, "a.safetensors", metadata=metadata)
    if kind is tl.Unsupported and "meta" not in says:  # which no format can hold
        assert ".pt" in str(caught.value)


# Checksums ----------------------------------------------------------------------------------------------


def test_checksums_are_as_documented(tmp_path: Path, engine: tl.Engine) -> None:
    assert _core.crc32c(b"123456789") == 0xE3069283
    path = tmp_path / "a.safetensors"
    save(several(), path, engine, metadata={"trunkline.crc32c": "of another file", "a": "b"})
    data = path.read_bytes()
    begin, header = header_of(data)
    entry = header["__metadata__"]["trunkline.crc32c"]
    fields, sums = entry[:33], entry[33:]
    chunk, head_bytes, check = fields.split()
    assert (int(chunk), int(head_bytes)) == (CHUNK, begin)
    assert int(check, 16) == _core.crc32c(fields[:24].encode())
    blank = data[:begin].replace(sums.encode(), b"0" * len(sums))
    assert int(sums[:8], 16) == _core.crc32c(blank)
    chunks = [data[at : at + CHUNK] for at in range(begin, len(data), CHUNK)]
    assert len(chunks) == 3
    assert sums[8:] == "".join(f"{_core.crc32c(c):08x}" for c in chunks)
    assert header["__metadata__"]["a"] == "b"


def test_headers_end_in_more_spaces_than_the_reference_writes(tmp_path: Path, engine: tl.Engine) -> None:
    save({"": torch.zeros(1)}, tmp_path / "a.safetensors", engine)
    used = len((tmp_path / "a.safetensors").read_bytes()[:4096].rstrip(b" "))
    sizes = set()
    for length in range(4096 - used - 20, 4096 - used + 3):
        path = tmp_path / "a.safetensors"
        save({"x" * length: torch.zeros(1)}, path, engine)
        begin, _ = header_of(path.read_bytes())
        assert path.read_bytes()[begin - 8 : begin] == b" " * 8
        assert begin % 4096 == 0
        assert load(path, engine=engine, verify=True).keys() == {"x" * length}
        sizes.add(begin)
    assert sizes == {4096, 8192}


@pytest.mark.parametrize("at", [0, CHUNK - 1, CHUNK, 2 * CHUNK, -1])
def test_a_flip_in_the_data_is_found_and_named(at: int, tmp_path: Path, engine: tl.Engine) -> None:
    path = tmp_path / "a.safetensors"
    save(several(), path, engine)
    data = bytearray(path.read_bytes())
    begin, header = header_of(data)
    place = at if at >= 0 else len(data) - begin + at
    data[begin + place] ^= 16
    path.write_bytes(data)
    for verify in ("auto", True):
        with pytest.raises(tl.Corrupt) as caught:
            load(path, engine=engine, verify=verify)
        error = caught.value
        assert error.file == str(path)
        assert error.chunk == place // CHUNK
        low, high = error.chunk * CHUNK, (error.chunk + 1) * CHUNK
        concerned = {
            name
            for name, stored in header.items()
            if name != "__metadata__" and stored["data_offsets"][0] < high and stored["data_offsets"][1] > low
        }
        assert error.tensor in concerned
        assert repr(error.tensor) in str(error)
        assert f"chunk {error.chunk}" in str(error)
    load(path, engine=engine, verify=False)


def test_every_flip_of_a_bit_in_the_header_is_found(tmp_path: Path, engine: tl.Engine) -> None:
    path = tmp_path / "a.safetensors"
    save(
        {"a": filled(torch.float32, (5,)), "b": filled(torch.int8, (2, 3))}, path, engine, metadata={"k": "v"}
    )
    data = bytearray(path.read_bytes())
    begin, _ = header_of(data)
    used = len(bytes(data[:begin]).rstrip(b" "))
    unnoticed = []
    for bit in [*range(used * 8), *range(begin * 8 - 80, begin * 8)]:
        data[bit // 8] ^= 1 << bit % 8
        with path.open("r+b") as file:
            file.write(data)
        try:
            load(path, engine=engine)
        except (tl.Corrupt, tl.Format):
            pass
        else:
            unnoticed.append(bit)
        data[bit // 8] ^= 1 << bit % 8
    assert unnoticed == []
    path.write_bytes(data)
    load(path, engine=engine, verify=True)


def test_what_the_reference_rewrote_is_loaded(tmp_path: Path, engine: tl.Engine) -> None:
    for length in range(1, 80):  # headers of every size of padding
        path = tmp_path / "a.safetensors"
        tensors = {"x" * length: filled(torch.float32, (10,)), "b": filled(torch.int8, (4096,))}
        save(tensors, path, engine)
        _, metadata = read_by_reference(path)
        tensors["b"] += 1
        reference.save_file(tensors, path, metadata)
        assert_same(load(path, engine=engine), tensors)
        with pytest.raises(tl.Format, match="has no checksums"):
            load(path, engine=engine, verify=True)


def test_what_was_renamed_or_cut(tmp_path: Path, engine: tl.Engine) -> None:
    path = tmp_path / "a.safetensors"
    save(several(), path, engine)
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"trunkline.crc32c"', b'"trunkline.crc32d"'))
    with pytest.raises(tl.Corrupt, match="name of its checksums"):
        load(path, engine=engine)
    path.write_bytes(data.replace(b'"scalar"', b'"skalar"'))
    with pytest.raises(tl.Corrupt, match="header does not match its checksum"):
        load(path, engine=engine)
    assert "skalar" in load(path, engine=engine, verify=False)
    for end in (-1, len(data) // 2, 100, 5, 0):
        path.write_bytes(data[:end])
        for kind in (tl.Corrupt, tl.Format):  # whichever a program looks for
            with pytest.raises(kind, match="cut off|it has [05] bytes"):
                load(path, engine=engine)
    path.write_bytes(data + b"x")
    with pytest.raises(tl.Format, match="the last 1 belong to no tensor") as caught:
        load(path, engine=engine)
    assert not isinstance(caught.value, tl.Corrupt)


def test_a_file_without_checksums(tmp_path: Path, engine: tl.Engine) -> None:
    path = tmp_path / "a.safetensors"
    reference.save_file(several(), path)
    for verify in ("auto", False):
        assert_same(load(path, engine=engine, verify=verify), several())
    with pytest.raises(tl.Format, match="has no checksums"):
        load(path, engine=engine, verify=True)
    with pytest.raises(ValueError, match="^verify: "):
        load(path, engine=engine, verify="always")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="^verify: "):
        load(path, engine=engine, verify=True, mmap=True)


# Reading ------------------------------------------------------------------------------------------------


def test_files_that_are_none(tmp_path: Path, engine: tl.Engine) -> None:
    path = tmp_path / "a.safetensors"
    for data in (
        b"",
        b"1234567",
        b"\xff" * 8,
        b"\xff" * 100,
        b"\x02\0\0\0\0\0\0\0{",
        b"\x02\0\0\0\0\0\0\0[]",
    ):
        path.write_bytes(data)
        with pytest.raises(tl.Format, match=re.escape(str(path))):
            load(path, engine=engine)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "missing.safetensors", engine=engine)


def write_raw(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_dtypes_and_shapes_that_torch_lacks(tmp_path: Path, engine: tl.Engine) -> None:
    path = tmp_path / "a.safetensors"
    for dtype, shape, nbytes, kind in (
        ("F6_E2M3", [4], 3, tl.Unsupported),
        ("F4", [2, 3], 3, tl.Unsupported),
        ("F32", [0, 2**63], 0, tl.Format),
    ):
        write_raw(path, {"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, nbytes]}}, bytes(nbytes))
        for mmap in (False, True):
            with pytest.raises(kind, match="'a'"):
                load(path, engine=engine, mmap=mmap)


def test_unaligned_data(tmp_path: Path, engine: tl.Engine) -> None:
    path = tmp_path / "a.safetensors"
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F64", "shape": [200_000], "data_offsets": [1, 1_600_001]},
    }
    values = filled(torch.float64, (200_000,))
    write_raw(path, header, b"\x07" + bits(values))
    for mmap in (False, True):
        found = load(path, engine=engine, mmap=mmap)
        assert_same(found, {"a": torch.tensor([7], dtype=torch.uint8), "b": values})
        assert found["b"].data_ptr() % 8 == 0


def test_large_tensors_have_pages_of_their_own(tmp_path: Path, engine: tl.Engine) -> None:
    path = tmp_path / "a.safetensors"
    save({"a": torch.zeros(CHUNK // 4), "b": torch.ones(CHUNK // 4), "c": torch.zeros(3)}, path, engine)
    found = load(path, engine=engine)
    for name in "ab":
        assert found[name].data_ptr() % 4096 == 0
        assert found[name].untyped_storage().nbytes() == CHUNK
        found[name] += 1  # writable
    b = found["b"]
    del found
    gc.collect()
    assert b.unique().tolist() == [2]


def mutations(rng: random.Random, data: bytes) -> bytes:
    """Change a file in one of many ways, mostly in its header."""
    begin = min(8 + struct.unpack("<Q", data[:8])[0], len(data))
    out = bytearray(data)
    way = rng.randrange(8)
    if way == 0:
        out[rng.randrange(begin)] ^= 1 << rng.randrange(8)
    elif way == 1:
        out[rng.randrange(begin)] = rng.randrange(256)
    elif way == 2:
        del out[rng.randrange(len(out)) :]
    elif way == 3:
        out += rng.randbytes(rng.randrange(1, 9))
    else:
        text = bytes(out[8:begin])
        if not text:
            return data
        if way in (4, 5):
            numbers = list(re.finditer(rb"\d+", text))
            if not numbers:
                return data
            number = rng.choice(numbers)
            new = rng.choice(
                [
                    b"0",
                    b"1",
                    b"-1",
                    b"1.0",
                    b"1e1",
                    b"007",
                    b"18446744073709551616",
                    b"9223372036854775808",
                    b"null",
                ]
                + [str(int(number[0]) + d).encode() for d in (-4, -1, 1, 4)]
                + [other[0] for other in numbers]
            )
            text = text[: number.start()] + new + text[number.end() :]
        elif way == 6:
            pieces = [
                b'"a":',
                b"{",
                b"}",
                b",",
                b"[",
                b"]",
                b" ",
                b'"F32"',
                b'"U8"',
                b'"F4"',
                b'"dtype"',
                b"\0",
                b"\n",
            ]
            pieces += [
                b'"__metadata__":{"x":"y"},',
                b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},',
                b"\\u0061",
            ]
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice(pieces) + text[at + rng.choice([0, 0, 1, 3]) :]
        else:
            names = [
                b"BOOL",
                b"F4",
                b"F6_E2M3",
                b"F8_E8M0",
                b"BF16",
                b"F32",
                b"I64",
                b"C64",
                b"U8",
                b"x",
                b"a",
                b"b",
            ]
            words = list(re.finditer(rb'"\w+"', text))
            if not words:
                return data
            word = rng.choice(words)
            text = text[: word.start() + 1] + rng.choice(names) + text[word.end() - 1 :]
        if rng.random() < 0.5:  # keep the size, so that what follows stays in place
            text = text.rstrip(b" ").ljust(begin - 8)
        out[8:begin] = text
        out[:8] = struct.pack("<Q", len(text))
    return bytes(out)


def test_what_the_reference_rejects_is_rejected(tmp_path: Path, engine: tl.Engine) -> None:
    path = tmp_path / "a.safetensors"
    bases = []
    small = {
        "a": filled(torch.float32, (2, 3)),
        "b": filled(torch.uint8, (8,)),
        "e": filled(torch.int64, (0, 2)),
    }
    reference.save_file(small, path, {"x": "y"})
    bases.append(path.read_bytes())
    for options in ({"checksum": False}, {"checksum": True, "metadata": {"format": "pt"}}):
        save(small, path, engine, **options)
        bases.append(path.read_bytes())
    rng = random.Random(0)
    accepted = rejected = stricter = 0
    for round_number in range(4000):
        data = rng.choice(bases)
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            if len(data) > 9:
                data = mutations(rng, data)
        path.write_bytes(data)
        try:
            found = load(path, engine=engine, verify=rng.choice([False, "auto"]))
        except (tl.Format, tl.Corrupt, tl.Unsupported):
            rejected += 1
            try:
                read_by_reference(path)
            except Exception:  # of torch, for dtypes that it lacks
                continue
            stricter += 1
            continue
        accepted += 1
        try:
            theirs, _ = read_by_reference(path)
        except SafetensorError as error:
            pytest.fail(f"round {round_number}: accepted what the reference rejects ({error}): {data!r}")
        assert_same(found, theirs)
    assert accepted > 200
    assert rejected > 2000
    assert stricter < 400


# Folders ------------------------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path, engine: tl.Engine) -> tuple[Path, dict[str, torch.Tensor]]:
    """A model of three files: one with checksums, one of the reference, one that is a link."""
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    parts = [{f"{part}.{i}": filled(torch.float32, (100_000 * i,), i) for i in range(4)} for part in "abc"]
    files = ["model-1.safetensors", "sub/model-2.safetensors", "model-3.safetensors"]
    save(parts[0], folder / files[0], engine)
    reference.save_file(parts[1], folder / files[1])
    save(parts[2], tmp_path / "blobs/0123", engine)
    (folder / files[2]).symlink_to("../blobs/0123")
    weight_map = {name: file for part, file in zip(parts, files, strict=True) for name in part}
    write_index(folder, {"metadata": {"total_size": 1}, "weight_map": weight_map})
    return folder, {name: tensor for part in parts for name, tensor in part.items()}


def write_index(folder: Path, index: Any) -> None:
    text = index if isinstance(index, bytes) else json.dumps(index).encode()
    (folder / "model.safetensors.index.json").write_bytes(text)


def test_a_folder_with_an_index(shards: tuple[Path, dict[str, torch.Tensor]], engine: tl.Engine) -> None:
    folder, tensors = shards
    assert_same(load_folder(folder, engine=engine), tensors)
    assert_same(load_folder(folder / "model.safetensors.index.json", engine=engine), tensors)
    assert_same(load_folder(str(folder), engine=engine, mmap=True), tensors)
    with pytest.raises(tl.Format, match="model-2.safetensors has no checksums"):
        load_folder(folder, engine=engine, verify=True)


def test_a_flip_in_one_of_several_files(
    shards: tuple[Path, dict[str, torch.Tensor]], engine: tl.Engine
) -> None:
    folder, _ = shards
    path = folder / "model-3.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(tl.Corrupt) as caught:
        load_folder(folder, engine=engine)
    assert (caught.value.file, caught.value.tensor, caught.value.chunk) == (str(path), "c.3", 2)


def test_a_folder_with_one_file(tmp_path: Path, engine: tl.Engine) -> None:
    with pytest.raises(FileNotFoundError, match="without safetensors files; pass the path"):
        load_folder(tmp_path, engine=engine)
    here = re.escape(repr(str(tmp_path)))
    for other, reader in (
        ("trunkline-checkpoints.json", rf"trunkline.Checkpointer\({here}\).load\(\)"),
        ("dcp.manifest", rf"dcp.load and trunkline.dcp.StorageReader\({here}\)"),
        (".metadata", "dcp.load and torch.distributed.checkpoint.FileSystemReader"),
    ):
        (tmp_path / other).touch()
        with pytest.raises(
            FileNotFoundError, match=f"is a directory of .*checkpoints?; load it with {reader}"
        ):
            load_folder(tmp_path, engine=engine)
        (tmp_path / other).unlink()
    tensors = several()
    save(tensors, tmp_path / "any.safetensors", engine)
    assert_same(load_folder(tmp_path, engine=engine, verify=True), tensors)
    save({"a": torch.zeros(1)}, tmp_path / "another.safetensors", engine)
    with pytest.raises(tl.Format, match="several files of safetensors, another.safetensors, any.safetensors"):
        load_folder(tmp_path, engine=engine)
    save({"b": torch.zeros(1)}, tmp_path / "model.safetensors", engine)
    assert load_folder(tmp_path, engine=engine).keys() == {"b"}
    (tmp_path / "x.safetensors.index.json").write_text('{"weight_map": {"a": "another.safetensors"}}')
    assert load_folder(tmp_path, engine=engine).keys() == {"a"}
    (tmp_path / "y.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(tl.Format, match="several indices"):
        load_folder(tmp_path, engine=engine)
    with pytest.raises(FileNotFoundError) as caught:
        load_folder(tmp_path / "missing", engine=engine)
    assert caught.value.errno == errno.ENOENT


@pytest.mark.parametrize(
    "name",
    [
        *(
            "../secret.safetensors",
            "/etc/passwd",
            "sub/../../x",
            "a\\b",
            "a\0b",
            "",
            ".",
            "..",
            "./model",
            "a//b",
        ),
        *("a/", 3, None, ["a"], {"a": "b"}, "\ud800"),
    ],
)
def test_names_that_lead_elsewhere_are_refused(name: Any, tmp_path: Path, engine: tl.Engine) -> None:
    (tmp_path / "model").mkdir()
    save({"a": torch.zeros(1)}, tmp_path / "secret.safetensors", engine)
    write_index(tmp_path / "model", {"weight_map": {"a": name}})
    with pytest.raises(tl.Format, match="not a valid index.*of the tensor 'a'"):
        load_folder(tmp_path / "model", engine=engine)


def test_an_absolute_name_is_refused(tmp_path: Path, engine: tl.Engine) -> None:
    save({"a": torch.zeros(1)}, tmp_path / "x.safetensors", engine)
    write_index(tmp_path, {"weight_map": {"a": str(tmp_path / "x.safetensors")}})
    with pytest.raises(tl.Format, match="not a path below"):
        load_folder(tmp_path, engine=engine)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (b"", "Expecting value"),
        (b"[]", "weight_map"),
        (b"{}", "weight_map"),
        (b'{"weight_map": []}', "weight_map"),
        (b'{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}', "'a' is duplicated"),
        (b'{"weight_map": {}, "weight_map": {}}', "'weight_map' is duplicated"),
        (b'{"weight_map": {}, "metadata": NaN}', "NaN"),
        (b'{"weight_map": {}}x', "Extra data"),
        (b'\xef\xbb\xbf{"weight_map": {}}', "BOM"),
        (b'{"weight_map": {"\xff": "1.safetensors"}}', "utf-8"),
        (b'{"weight_map": {}, "metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion"),
        (b'{"weight_map": {}, "metadata": ' + b"1" * 10_000 + b"}", "digits"),
        (b'{"weight_map": {"missing": "1.safetensors"}}', "the tensor 'missing' is not in '1.safetensors'"),
        (
            b'{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}',
            "the tensor 'a' is in '1.safetensors' and in '2.safetensors'",
        ),
        (
            b'{"weight_map": {"b": "1.safetensors", "a": "3.safetensors"}}',
            "the tensor 'b' is not in '1.safetensors'",
        ),
    ],
)
def test_bad_indices(index: bytes, says: str, tmp_path: Path, engine: tl.Engine) -> None:
    save({"a": torch.zeros(1)}, tmp_path / "1.safetensors", engine)
    save({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "2.safetensors", engine)
    save({"c": torch.zeros(1)}, tmp_path / "3.safetensors", engine)
    write_index(tmp_path, index)
    with pytest.raises(tl.Format, match=re.escape(says)) as caught:
        load_folder(tmp_path, engine=engine)
    assert str(caught.value).startswith(str(tmp_path / "model.safetensors.index.json"))


def test_an_oversized_index(tmp_path: Path, engine: tl.Engine) -> None:
    with (tmp_path / "model.safetensors.index.json").open("wb") as file:
        file.truncate(100_000_001)
    with pytest.raises(tl.Format, match="more than"):
        load_folder(tmp_path, engine=engine)


def test_a_missing_shard(tmp_path: Path, engine: tl.Engine) -> None:
    write_index(tmp_path, {"weight_map": {"a": "missing.safetensors"}})
    with pytest.raises(FileNotFoundError, match="missing.safetensors"):
        load_folder(tmp_path, engine=engine)


def test_entries_that_are_none() -> None:
    for change in (
        lambda e: "",
        lambda e: "x" + e[1:],
        lambda e: e + "0",
        lambda e: e[:-1] + "g",
        lambda e: e[:30],
    ):
        head = bytearray(
            b"12345678" + b'{"__metadata__":{"trunkline.crc32c":"' + b"0" * 49 + b'"}}' + b" " * 100
        )
        checksums.fill_in(head)
        [entry] = re.findall(rb'c":"([^"]*)"', head)
        metadata: Callable[[Any], dict[str, str]] = lambda e: {"trunkline.crc32c": e.decode()}  # noqa: E731
        sums = checksums.find(metadata(entry), bytes(head), 100, "a")
        assert sums == checksums.Sums(CHUNK, [0])
        with pytest.raises(tl.Corrupt, match="damaged"):
            checksums.find(metadata(change(entry.decode()).encode()), bytes(head), 100, "a")
        with pytest.raises(tl.Corrupt, match="damaged"):
            checksums.find(metadata(entry), bytes(head), CHUNK + 1, "a")


def test_a_step_of_a_checkpointer_is_not_loaded_as_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"a": torch.ones(3), "more": [1, torch.zeros(2)]}
    tl.Checkpointer(tmp_path / "run", process_group=False).save(100, state, block=True)
    monkeypatch.chdir(tmp_path)
    step = tmp_path / "run" / "step-00000100"
    for path, directory in ((str(step) + "/", str(tmp_path / "run")), ("run/step-00000100", "run")):
        with pytest.raises(tl.Format) as caught:
            tl.load(path)
        assert str(caught.value) == (
            f"{path} is a step of a directory of checkpoints; "
            f"use trunkline.Checkpointer({directory!r}).load(100)"
        )
    (shard,) = step.glob("*.safetensors")
    assert tl.load(shard).keys() == {"a", "more.1"}  # a file that is asked for by its name
    for manifest in step.glob("manifest-*"):
        manifest.unlink()
    with pytest.raises(tl.Format, match="is a step of a directory of checkpoints"):
        tl.load(step)
