"""tl.save to names without suffixes and to open files, and what it says of files that cannot be loaded."""

import argparse
import collections
import errno
import io
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch

import trunkline as tl

STATE = {"weight": torch.randn(3000, 300), "empty": torch.ones(0, 3), "bias": torch.arange(5)}


def assert_same(loaded: Any) -> None:
    assert loaded.keys() == STATE.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in STATE.items())


@pytest.mark.parametrize("name", ["model", "model.v1", "pytorch_model.bin.tmp", ".hidden", "model.2"])
def test_format_names_the_format(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    tl.save(STATE, path, format="safetensors")
    assert_same(safetensors.torch.load_file(path))
    assert_same(tl.load(path))
    assert tl.load(path, keys="bias").keys() == {"bias"}
    tl.save_async(STATE, path, format="pt").wait()
    assert_same(torch.load(path, weights_only=True))
    assert_same(tl.load(path))
    with tl.open_tensors(path) as tensors:
        assert torch.equal(tensors["bias"], STATE["bias"])


def test_a_format_that_contradicts_the_suffix(tmp_path: Path) -> None:
    for name, chosen in (("m.safetensors", "pt"), ("m.pt", "safetensors"), ("m.bin", "safetensors")):
        with pytest.raises(ValueError, match=f'^format: is "{chosen}", but the suffix of'):
            tl.save(STATE, tmp_path / name, format=chosen)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='^format: must be "pt" or "safetensors", not'):
        tl.save(STATE, tmp_path / "m", format="zip")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='or pass format="pt"'):
        tl.save(STATE, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []
    tl.save(STATE, tmp_path / "m.PT", format="pt")
    assert_same(tl.load(tmp_path / "m.PT"))


class Slow(io.RawIOBase):
    """An unbuffered file that writes a few bytes at a time."""

    def __init__(self) -> None:
        self.written = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        taken = bytes(memoryview(data).cast("B")[:100_000])
        self.written += taken
        return len(taken)


@pytest.mark.parametrize("checksum", [True, False])
def test_open_files(tmp_path: Path, checksum: bool) -> None:
    buffer = io.BytesIO()
    tl.save(STATE, buffer)
    buffer.seek(0)
    assert_same(torch.load(buffer, weights_only=True))
    (tmp_path / "a.pt").write_bytes(buffer.getvalue())
    assert_same(tl.load(tmp_path / "a.pt", verify=True))
    buffer = io.BytesIO()
    tl.save(STATE, buffer, format="safetensors", checksum=checksum)
    assert_same(safetensors.torch.load(buffer.getvalue()))
    tl.save(STATE, tmp_path / "path.safetensors", checksum=checksum)
    assert buffer.getvalue() == (tmp_path / "path.safetensors").read_bytes()
    slow = Slow()
    tl.save(STATE, slow, format="safetensors", checksum=checksum)
    assert bytes(slow.written) == buffer.getvalue()
    with (tmp_path / "b.pt").open("wb") as file:
        tl.save(STATE, file)
        assert not file.closed
    assert_same(tl.load(tmp_path / "b.pt", verify=True))
    with (
        (tmp_path / "text").open("w", encoding="utf-8") as text,
        pytest.raises(TypeError, match="writing bytes"),
    ):
        tl.save(STATE, text)  # type: ignore[arg-type]
    (tmp_path / "there").write_bytes(b"x")
    with (
        (tmp_path / "there").open("rb") as to_read,
        pytest.raises(ValueError, match='^path: .*there was opened for reading; open it with "wb"$'),
    ):
        tl.save({}, to_read)
    with pytest.raises(TypeError, match=r"^path: must be str, .* not dict; the order is \(obj, path\)$"):
        tl.save(tmp_path / "a.pt", {"a": 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not an open file"):
        tl.save_async(STATE, io.BytesIO())  # type: ignore[arg-type]
    with pytest.raises(tl.Unsupported, match="sparse"):
        tl.save({"a": torch.eye(3).to_sparse()}, io.BytesIO(), format="safetensors")


class Config:
    """An object of a class of the user."""


def test_a_warning_names_what_cannot_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    state = {
        "model": torch.nn.Linear(2, 2).state_dict(),
        "args": argparse.Namespace(rate=0.1),
        "nested": [1, {"config": Config()}],
    }
    with pytest.warns(
        RuntimeWarning, match=r"obj\['args'\] \(a argparse\.Namespace\), obj\['nested'\]\[1\]"
    ) as caught:
        tl.save(state, path)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with pytest.raises(tl.Unsupported):
        tl.load(path)
    assert torch.load(path, weights_only=False)["args"].rate == 0.1
    with pytest.warns(RuntimeWarning, match=r"obj \(a torch\.nn\.modules\.linear\.Linear\) cannot be loaded"):
        tl.save_async(torch.nn.Linear(2, 2), path).wait()
    with pytest.warns(RuntimeWarning, match=r"obj\['rng'\] \(a numpy\.ndarray\) cannot"):
        tl.save({"rng": numpy.ones(3)}, io.BytesIO())
    with pytest.warns(RuntimeWarning, match=r"obj\['optimizer'\] \(a builtins\.type\) cannot"):
        tl.save({"optimizer": torch.optim.Adam}, path)


def test_no_warning_for_what_can_be_loaded(tmp_path: Path) -> None:
    """pytest makes errors of warnings; what warns must not load, and what does not warn must."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    states: list[Any] = [
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        {"parameter": torch.nn.Parameter(torch.ones(3)), "size": torch.Size([3]), "dtype": torch.float16},
        {"set": {1, 2}, "counter": collections.Counter("aab"), "complex": 1j, "bytes": b"x", "int": 2**70},
        {"sparse": torch.eye(3).to_sparse()},
        {"meta": torch.ones(3, device="meta"), "device": torch.device("cpu")},
        torch.ones(3),
        3,
    ]
    for state in states:
        tl.save(state, tmp_path / "m.pt")
        tl.load(tmp_path / "m.pt")


def test_allowed_classes_are_not_warned_of(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([Config]):
        tl.save({"config": Config()}, tmp_path / "m.pt")
        assert isinstance(tl.load(tmp_path / "m.pt")["config"], Config)


class ShortWriter(io.RawIOBase):
    """Accepts a few bytes at a time, up to `room`; None: nothing more without blocking."""

    def __init__(self, room: int = 1 << 40) -> None:
        super().__init__()
        self.data = bytearray()
        self.room = room

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int | None:
        some = bytes(data)[: min(1000, self.room - len(self.data))]
        self.data += some
        return len(some) or None


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_an_unbuffered_file_that_writes_less_at_once_gets_all_bytes(kind: Any) -> None:
    file, whole = ShortWriter(), io.BytesIO()
    tl.save(STATE, file, format=kind)
    tl.save(STATE, whole, format=kind)
    assert bytes(file.data) == whole.getvalue()


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_a_file_that_would_block_raises(kind: Any) -> None:
    with pytest.raises(
        tl.Error, match="cannot write all of it to a ShortWriter: the file accepts no more"
    ) as caught:
        tl.save(STATE, ShortWriter(100), format=kind)
    assert caught.value.errno == errno.EAGAIN


class OtherWriter:
    """Writes all bytes, as an object that compresses them may, and returns something else."""

    def __init__(self, returns: Any) -> None:
        self.data = bytearray()
        self.returns = returns

    def write(self, data: Any, /) -> Any:
        self.data += data
        return self.returns


@pytest.mark.parametrize("returns", [True, 0, 10, 1 << 40, "all"])
@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_a_write_that_does_not_say_that_it_has_written_all_raises(kind: Any, returns: Any) -> None:
    file = OtherWriter(returns)
    with pytest.raises(TypeError, match=f"write\\(\\) of OtherWriter returned {returns!r} for"):
        tl.save(STATE, file, format=kind)
    assert len(file.data) < 10_000  # nothing was written again


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_a_write_that_returns_nothing_has_written_all(kind: Any) -> None:
    file, whole = OtherWriter(None), io.BytesIO()
    tl.save(STATE, file, format=kind)
    tl.save(STATE, whole, format=kind)
    assert bytes(file.data) == whole.getvalue()


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_an_unbuffered_temporary_file_gets_all_bytes(kind: Any) -> None:
    whole = io.BytesIO()
    tl.save(STATE, whole, format=kind)
    with tempfile.NamedTemporaryFile(buffering=0) as file:
        tl.save(STATE, file, format=kind)
        assert Path(file.name).read_bytes() == whole.getvalue()


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_a_path_of_an_open_file_without_a_name_is_rejected(kind: Any) -> None:
    with tempfile.TemporaryFile() as file:
        path = f"/proc/self/fd/{file.fileno()}"
        with pytest.raises(ValueError, match=r"fd/.*has no name, or not any more; pass the open file"):
            tl.save(STATE, path, format=kind)
        assert os.fstat(file.fileno()).st_size == 0
        tl.save(STATE, file, format=kind)
        assert os.fstat(file.fileno()).st_size > 0


@pytest.mark.parametrize("buffering", [-1, 0])
@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_a_full_disk_is_an_error_that_names_the_file(kind: Any, buffering: int) -> None:
    file = Path("/dev/full").open("wb", buffering=buffering)  # noqa: SIM115 - closing it fails as well
    wanted = "cannot write all of it to /dev/full: No space left on device"
    with pytest.raises(tl.Error, match=wanted) as caught:
        tl.save({"a": torch.ones(1 << 20)}, file, format=kind)
    with suppress(OSError):  # of what is in its buffer
        file.close()
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == "/dev/full"
