"""Damaged, foreign, old and malicious `.pt` files: typed errors, nothing run, nothing wrong returned."""

import collections
import contextlib
import io
import os
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trunkline as tl
from trunkline._formats import pt as pt_format
from trunkline._formats.pt import pickle as pt_pickle
from trunkline._formats.pt import zip as pt_zip

relaxed = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
STATE = {"weight": torch.arange(1, 7, dtype=torch.float32).reshape(2, 3), "steps": torch.tensor([3, 4])}


def stock(obj: object) -> bytes:
    file = io.BytesIO()
    torch.save(obj, file)
    return file.getvalue()


def is_state(loaded: Any) -> bool:
    return (
        type(loaded) is dict
        and list(loaded) == list(STATE)
        and all(torch.equal(loaded[name], STATE[name]) for name in STATE)
    )


class Stored:
    """A storage, in a pickle made by hand."""

    def __init__(self, kind: Any, key: Any, numel: int, location: str = "cpu") -> None:
        self.identity = ("storage", kind, key, location, numel)


class Called:
    """Pickled as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


class Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.identity if isinstance(obj, Stored) else None


def pickled(obj: object, protocol: int = 2) -> bytes:
    file = io.BytesIO()
    Pickler(file, protocol).dump(obj)
    return file.getvalue()


def tensor_call(storage: Stored, shape: tuple[int, ...], strides: tuple[int, ...], offset: Any = 0) -> Called:
    return Called(
        torch._utils._rebuild_tensor_v2, storage, offset, shape, strides, False, collections.OrderedDict()
    )


def archive(path: Path, pickle_bytes: bytes, storages: dict[str, bytes], **more: str) -> Path:
    """Write a file as torch 1.6 did: no byteorder, no format version, no alignment."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickle_bytes)
        for name, text in more.items():
            file.writestr(f"archive/{name}", text)
        for key, data in storages.items():
            file.writestr(f"archive/data/{key}", data)
        file.writestr("archive/version", "3\n")
    return path


FLOATS = struct.pack("<4f", 1, 2, 3, 4)


def test_a_file_of_torch_1_6(tmp_path: Path) -> None:
    storage = Stored(torch.FloatStorage, "94021", 4, "cuda:0")
    model = collections.OrderedDict(
        w=tensor_call(storage, (2, 2), (2, 1)), b=tensor_call(storage, (2,), (1,), 2)
    )
    path = archive(tmp_path / "old.pt", pickled({"model": model, "epoch": 3}), {"94021": FLOATS})
    loaded = pt_format.load(path, verify=True)
    assert loaded["epoch"] == 3
    assert loaded["model"]["w"].tolist() == [[1, 2], [3, 4]]
    assert loaded["model"]["b"].tolist() == [3, 4]
    assert loaded["model"]["b"].data_ptr() == loaded["model"]["w"].data_ptr() + 8


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_other_protocols(tmp_path: Path, protocol: int) -> None:
    file = tmp_path / "state.pt"
    torch.save(STATE, file, pickle_protocol=protocol)
    assert is_state(pt_format.load(file, verify=True))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_protocol_4_is_unsupported(tmp_path: Path) -> None:
    file = tmp_path / "state.pt"
    torch.save(STATE, file, pickle_protocol=4)
    with pytest.raises(tl.Unsupported, match="operand"):
        pt_format.load(file)


def test_the_other_byte_order(tmp_path: Path) -> None:
    other, form = ("big", ">4f") if sys.byteorder == "little" else ("little", "<4f")
    obj = pickled([tensor_call(Stored(torch.FloatStorage, "0", 4), (4,), (1,))])
    path = archive(tmp_path / "big.pt", obj, {"0": struct.pack(form, 1, 2, 3, 4)}, byteorder=other)
    assert pt_format.load(path, verify=True)[0].tolist() == [1, 2, 3, 4]


def test_files_without_crcs(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(STATE, path)
    finally:
        torch.serialization.set_crc32_options(True)
    for verify in ("auto", False):
        assert is_state(pt_format.load(path, verify=verify))  # type: ignore[arg-type]
    with pytest.raises(tl.Format, match="no CRC-32"):
        pt_format.load(path, verify=True)


def test_data_filled_in_after_skip_data(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    with torch.serialization.skip_data():
        torch.save(STATE, path)
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as file:
        header = file.getinfo("state/data/0").header_offset
    offset = header + 30 + sum(struct.unpack_from("<HH", data, header + 26))
    data[offset : offset + 24] = struct.pack("<6f", *range(1, 7))
    path.write_bytes(data)
    assert pt_format.load(path)["weight"].tolist() == STATE["weight"].tolist()
    with pytest.raises(tl.Format, match="no CRC-32"):
        pt_format.load(path, verify=True)


def test_a_corrupt_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    for eager in (False, True):
        state: dict[str, Any] = {"model": {"w": torch.arange(1000), "v": torch.arange(400_000)}}
        if eager:
            state["counts"] = collections.Counter("aab")
        for name in "wv":
            data = bytearray(stock(state))
            content = bytes(state["model"][name].numpy())
            data[data.index(content) + 4001] ^= 4
            path.write_bytes(data)
            with pytest.raises(tl.Corrupt, match=f"model.{name}") as caught:
                pt_format.load(path)
            assert caught.value.tensor == f"model.{name}"
            assert caught.value.file == str(path)
            with pytest.raises(tl.Corrupt):
                pt_format.load(path, mmap=True, verify=True)
            assert torch.equal(
                pt_format.load(path, verify=False)["model"][name][:500], state["model"][name][:500]
            )


@pytest.mark.parametrize("flip", [0x01, 0xFF])
def test_every_flipped_byte(tmp_path: Path, flip: int) -> None:
    path = tmp_path / "state.pt"
    data = bytearray(stock(STATE))
    refused = 0
    for at in range(len(data)):
        data[at] ^= flip
        path.write_bytes(data)
        try:
            assert is_state(pt_format.load(path)), f"byte {at} is flipped, and what is loaded differs"
        except tl.Error:
            refused += 1
        data[at] ^= flip
    # The rest are padding, times and versions.
    assert refused > len(data) // 4


def test_every_truncation(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    data = stock(STATE)
    for size in [*range(0, len(data) - 200, 7), *range(len(data) - 200, len(data))]:
        path.write_bytes(data[:size])
        with pytest.raises((tl.Format, tl.Corrupt)):
            pt_format.load(path)
    path.write_bytes(data + b"x")
    with pytest.raises(tl.Format):
        pt_format.load(path)


# A state with what the scanner of pickles knows, and does not know.
PICKLE = pickled(
    {
        "a": tensor_call(Stored(torch.FloatStorage, "0", 4), (2, 2), (2, 1)),
        "b": [1, -5, 2.5, "text", b"bytes", (1, 2, 3, 4), True, None, 1 << 70, {1: 2}],
        "c": collections.OrderedDict(x=torch.Size([1]), y=torch.device("cpu"), z=torch.float16),
        "d": collections.Counter("aa"),
        "e": Called(
            torch._utils._rebuild_parameter,
            tensor_call(Stored(torch.FloatStorage, "0", 4), (4,), (1,)),
            True,
            collections.OrderedDict(),
        ),
    }
)


@relaxed
@given(
    edits=st.lists(st.tuples(st.integers(0, len(PICKLE) - 1), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.none() | st.integers(0, len(PICKLE)),
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damaged_pickles(tmp_path: Path, edits: list[tuple[int, int]], cut: int | None) -> None:
    """Pickles whose CRC is right, but which make little sense."""
    damaged = bytearray(PICKLE)
    for at, value in edits:
        damaged[at] = value
    path = archive(tmp_path / "damaged.pt", bytes(damaged[:cut]), {"0": FLOATS})
    for mmap in (False, True):
        with contextlib.suppress(tl.Error):
            pt_format.load(path, mmap=mmap)


@relaxed
@given(data=st.binary(max_size=200))
def test_random_bytes(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "random.pt"
    for content in (data, b"PK\3\4" + data, b"PK\3\4" + data + b"PK\5\6" + data[:18].ljust(18) + b"\0\0"):
        path.write_bytes(content)
        with pytest.raises((tl.Format, tl.Corrupt)):
            pt_format.load(path)


class Instance:
    """A class that nobody allowed."""


def malicious(marker: Path) -> Iterator[tuple[str, bytes]]:
    command = f"touch {marker}"
    calls = {
        "os.system": Called(os.system, command),
        "eval": Called(eval, f"open({str(marker)!r}, 'w')"),
        "exec": Called(exec, f"open({str(marker)!r}, 'w')"),
        "open": Called(open, str(marker), "w"),
        "getattr": Called(getattr, torch.Tensor, "__reduce__"),
        "torch.load": Called(torch.load, str(marker)),
        "an instance": Instance(),
        "a second object": [tensor_call(Stored(torch.FloatStorage, "0", 4), (4,), (1,)), Instance()],
        "an argument": tensor_call(
            Stored(torch.FloatStorage, "0", 4), (4,), (1,), Called(os.system, command)
        ),
        "a dict key": {Called(os.system, command): 1},
    }
    for name, obj in calls.items():
        yield name, pickled(obj)
    yield "a persistent id that is not a storage", b"\x80\x02cos\nsystem\nX\x05\x00\x00\x00touch\x86Q."
    yield "an INST opcode", b"(S'touch %s'\nios\nsystem\n." % os.fsencode(marker)
    yield "an OBJ opcode", b"(cos\nsystem\nS'touch %s'\no." % os.fsencode(marker)
    yield "STACK_GLOBAL", b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x01x\x85R."


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_malicious_pickles_run_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for name, data in malicious(marker):
        path = archive(tmp_path / "malicious.pt", data, {"0": FLOATS})
        for mmap in (False, True):
            with pytest.raises((tl.Unsupported, tl.Format)):
                pt_format.load(path, mmap=mmap)
        assert not marker.exists(), name


def test_what_reads_elements_is_not_deferred() -> None:
    """Elements are read after the pickle has run only where nothing in it can look at them."""
    storage = Stored(torch.FloatStorage, "0", 4)
    tensor = tensor_call(storage, (4,), (1,))
    looking = [
        Called(complex, tensor),
        Called(torch.Size, [tensor]),
        Called(torch.Tensor, [tensor]),
        tensor_call(storage, (4,), (1,), tensor),
        tensor_call(storage, (tensor,), (1,)),  # type: ignore[arg-type]
        Called(torch._utils._rebuild_sparse_tensor, torch.sparse_coo, (tensor, tensor, (4,))),
        Called(torch._utils._rebuild_qtensor, storage, 0, (4,), (1,), (), False, collections.OrderedDict()),
        Called(bytearray, tensor),
        Called(collections.Counter, tensor),
        Instance(),
    ]
    for obj in looking:
        scan = pt_pickle.scan(pickled(obj))
        assert scan is not None
        assert not scan.plain
    scan = pt_pickle.scan(pickled({"t": tensor, "size": torch.Size([2]), "set": {1}}))
    assert scan is not None
    assert scan.plain


@pytest.mark.parametrize(
    ("kind", "key", "numel", "shape", "error"),
    [
        (torch.FloatStorage, "0", 5, (5,), "has 16 bytes"),
        (torch.FloatStorage, "0", 3, (3,), "has 16 bytes"),
        (torch.FloatStorage, "0", 0, (0,), "has 16 bytes"),
        (torch.DoubleStorage, "0", 4, (4,), "has 16 bytes"),
        (torch.FloatStorage, "1", 4, (4,), "no record"),
        (torch.FloatStorage, "0", 4, (5,), "resiz"),
        (torch.FloatStorage, "0", 4, (1 << 62, 4), "."),
        (torch.FloatStorage, "0", -4, (4,), "."),
        (torch.FloatStorage, "0", 1 << 62, (4,), "."),
        (torch.FloatStorage, 0, 4 << 40, (4,), "."),
    ],
)
@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("byteorder", ["little", "big"])
def test_sizes_that_do_not_fit(
    tmp_path: Path,
    kind: Any,
    key: Any,
    numel: int,
    shape: tuple[int, ...],
    error: str,
    mmap: bool,
    byteorder: str,
) -> None:
    obj = pickled(tensor_call(Stored(kind, key, numel), shape, (1,) * len(shape)))
    path = archive(tmp_path / "sizes.pt", obj, {"0": FLOATS}, byteorder=byteorder)
    with pytest.raises((tl.Format, tl.Unsupported), match=error):
        pt_format.load(path, mmap=mmap)


def test_a_large_storage_cannot_be_outgrown(tmp_path: Path) -> None:
    """Torch resizes a storage that is too small for a tensor on it, if it can."""
    large = Stored(torch.ByteStorage, "0", 2 << 20)
    path = archive(tmp_path / "l.pt", pickled(tensor_call(large, (3 << 20,), (1,))), {"0": bytes(2 << 20)})
    with pytest.raises(tl.Format, match="resiz"):
        pt_format.load(path)


def test_one_record_under_two_keys(tmp_path: Path) -> None:
    """Torch takes keys of any type, and looks records up without regard to case."""
    for key, other in (("0", 0), ("a", "A")):
        obj = pickled([tensor_call(Stored(torch.FloatStorage, k, 4), (4,), (1,)) for k in (key, other)])
        path = archive(tmp_path / "twice.pt", obj, {key: FLOATS})
        try:
            loaded = pt_format.load(path)
        except tl.Error:
            continue
        assert [tensor.tolist() for tensor in loaded] == [[1, 2, 3, 4]] * 2


def records_of(path: Path) -> list[pt_zip.Record]:
    data = path.read_bytes()

    def read(offset: int, nbytes: int) -> bytes:
        return data[offset : offset + nbytes]

    directory = pt_zip.read_directory(read, len(data), str(path))
    headers = [read(entry.header, pt_zip.header_bytes(entry)) for entry in directory.entries]
    return list(pt_zip.place_records(directory, headers, str(path)))


@pytest.mark.parametrize(
    ("field", "form", "value"),
    [
        ("overlap", "<I", None),
        ("offset outside", "<I", 0x7FFFFFF0),
        ("size", "<I", 17),
        ("huge size", "<I", 0xFFFFFFF0),
        ("zip64 size without a field", "<I", 0xFFFFFFFF),
        ("method", "<H", 8),
        ("flags", "<H", 1),
    ],
)
def test_directories_that_lie(tmp_path: Path, field: str, form: str, value: int | None) -> None:
    two = [tensor_call(Stored(torch.FloatStorage, str(k), 4), (4,), (1,)) for k in range(2)]
    path = archive(tmp_path / "lies.pt", pickled(two), {"0": FLOATS, "1": FLOATS})
    data = bytearray(path.read_bytes())
    first, second = (record for record in records_of(path) if record.is_storage)
    at = {"overlap": 42, "offset outside": 42, "method": 10, "flags": 8}.get(field, 24)
    struct.pack_into(form, data, second.entry + at, first.header if value is None else value)
    if at == 24:
        struct.pack_into(form, data, second.entry + 20, value)
    path.write_bytes(data)
    with pytest.raises(tl.Format, match="data/1"):
        pt_format.load(path)


def test_a_local_header_that_lies(tmp_path: Path) -> None:
    obj = pickled(tensor_call(Stored(torch.FloatStorage, "0", 4), (4,), (1,)))
    path = archive(tmp_path / "lies.pt", obj, {"0": FLOATS})
    record = next(record for record in records_of(path) if record.is_storage)
    for at, byte in ((0, 1), (8, 8), (18, 17), (22, 3), (26, 1), (30, 0x41)):
        data = bytearray(path.read_bytes())
        data[record.header + at] = byte
        lying = tmp_path / "lying.pt"
        lying.write_bytes(data)
        with pytest.raises(tl.Format, match="data/0"):
            pt_format.load(lying)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_names_that_occur_twice(tmp_path: Path) -> None:
    for again in ("archive/data/0", "archive/DATA/0"):
        path = tmp_path / "twice.pt"
        with zipfile.ZipFile(path, "w") as file:
            file.writestr(
                "archive/data.pkl", pickled(tensor_call(Stored(torch.FloatStorage, "0", 4), (4,), (1,)))
            )
            file.writestr("archive/data/0", FLOATS)
            file.writestr(again, FLOATS[::-1])
        with pytest.raises(tl.Format, match="same name"):
            pt_format.load(path)


def test_two_archives_in_one(tmp_path: Path) -> None:
    path = tmp_path / "two.pt"
    with zipfile.ZipFile(path, "w") as file:
        for name in ("archive", "another"):
            file.writestr(f"{name}/data.pkl", pickled([name]))
            file.writestr(f"{name}/version", "3\n")
        file.filelist.reverse()
    with pytest.raises(tl.Format, match="archive/|another/"):
        pt_format.load(path)


def test_deep_pickles(tmp_path: Path) -> None:
    depth = 100_000
    data = (
        b"\x80\x02"
        + b"]" * depth
        + pickled(tensor_call(Stored(torch.FloatStorage, "0", 4), (4,), (1,)))[2:-1]
    )
    path = archive(tmp_path / "deep.pt", data + b"a" * depth + b".", {"0": FLOATS})
    content = path.read_bytes()
    path.write_bytes(content.replace(FLOATS, FLOATS[::-1]))
    with pytest.raises(tl.Corrupt) as caught:
        pt_format.load(path)
    assert caught.value.tensor == "0"


def test_compressed_records_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "compressed.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", pickled([1, 2] * 100))
    with pytest.raises(tl.Format, match="compressed"):
        pt_format.load(path)


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "other.pt"
    torch.save(STATE, path, _use_new_zipfile_serialization=False)
    with pytest.raises(tl.Format, match="torch.load"):
        pt_format.load(path)
    path.write_bytes(b"")
    with pytest.raises(tl.Format, match="empty"):
        pt_format.load(path)
    with pytest.raises(FileNotFoundError) as missing:
        pt_format.load(tmp_path / "missing.pt")
    assert isinstance(missing.value, tl.Error)
    with pytest.raises(tl.Error):
        pt_format.load(tmp_path)
    archive(path, b"N.", {}, **{"constants.pkl": "x"})
    with pytest.raises(tl.Format, match="torch.jit.load"):
        pt_format.load(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/readme", "x")
    with pytest.raises(tl.Format, match="data.pkl"):
        pt_format.load(path)
    with pytest.raises(ValueError, match="^verify: "):
        pt_format.load(path, verify="yes")  # type: ignore[arg-type]


def test_skip_data_never_skips_data_unnoticed(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.save(STATE, path)
    with torch.serialization.skip_data():
        assert torch.equal(pt_format.load(path)["weight"], STATE["weight"])
    torch.save({**STATE, "set": {1}}, path)  # for torch's unpickler
    with torch.serialization.skip_data(), pytest.raises(tl.Format, match="skip_data"):
        pt_format.load(path)


def test_what_is_no_zip_archive_says_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.touch()
    with pytest.raises(tl.CutOff, match="is empty"):
        tl.load(path)
    torch.save({"a": torch.ones(3)}, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(tl.CutOff, match="it is truncated or was never finished; copy or save it again"):
        tl.load(path)
    tl.save({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").rename(path)
    with pytest.raises(tl.Format, match="looks like a safetensors file"):
        tl.load(path)
    for protocol in (2, 5):
        torch.save({"a": torch.ones(3)}, path, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
        with pytest.raises(tl.Format, match=r"torch < 1\.6.*with torch\.load"):
            tl.load(path)


@pytest.mark.parametrize("content", [b"x", b"no model at all", pickle.dumps([1, 2]), bytes(5000)])
def test_other_files_are_not_called_old_ones_of_torch(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    with pytest.raises(
        tl.Format, match="is neither a file of torch.save .* nor of safetensors; check the path"
    ):
        tl.load(path)


def test_a_pointer_of_git_lfs_is_called_one(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n")
    with pytest.raises(tl.Format, match="is a pointer of Git LFS, not the file itself; download it with git"):
        tl.load(path)


def test_a_name_that_is_no_dtype_imports_nothing(tmp_path: Path, run_script: Callable[..., str]) -> None:
    path = tmp_path / "honest.pt"
    torch.save(torch.zeros(4, dtype=torch.uint16), path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    honest = members["honest/data.pkl"]
    members["honest/data.pkl"] = honest.replace(b"ctorch\nuint16\n", b"ctorch\n_dynamo\n")
    assert members["honest/data.pkl"] != honest
    forged = tmp_path / "forged.pt"
    with zipfile.ZipFile(forged, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    printed = run_script(f"""
        import sys
        import trunkline as tl
        assert "torch._dynamo" not in sys.modules
        try:
            tl.load({str(forged)!r})
        except tl.Error as error:
            print("refused")
        print("torch._dynamo" in sys.modules)
    """)
    assert printed == "refused\nFalse\n"
