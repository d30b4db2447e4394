"""tl.data.index of .npz files."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import sample_files

import trunkline as tl

ARRAYS = {
    "image": numpy.arange(24, dtype="<f4").reshape(2, 3, 4),
    "fortran": numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
    "scalar": numpy.int64(7),
    "empty": numpy.zeros((0, 3)),
    "text": numpy.array(["a", "bcd"]),
    "big": numpy.arange(100_000),
    "structured": numpy.zeros(3, [("x", "<f4"), ("y", "<i8")]),
}
SAVE: list[Callable[..., None]] = [numpy.savez, numpy.savez_compressed]


@pytest.mark.parametrize("save", SAVE)
def test_members_are_arrays(tmp_path: Path, save: Callable[..., None]) -> None:
    save(tmp_path / "a.npz", **ARRAYS)
    save(tmp_path / "b.npz", one=numpy.arange(3))
    index = pickle.loads(pickle.dumps(tl.data.index(tmp_path)))
    assert (len(index), index.format) == (len(ARRAYS) + 1, "npz")
    for sample, array in enumerate([*ARRAYS.values(), numpy.arange(3)]):
        seen = sample_files.view(index, sample)
        assert isinstance(seen, numpy.ndarray)
        assert (seen.dtype, seen.shape) == (array.dtype, array.shape)
        assert (seen == array).all()
        assert seen.flags.f_contiguous == numpy.asarray(array).flags.f_contiguous
    assert index._lengths is not None
    if save is numpy.savez:
        assert int(index._lengths[5]) > 800_000
    else:
        assert int(index._lengths[5]) < 400_000


@pytest.mark.parametrize("save", SAVE)
def test_damage_of_any_member_is_noticed(tmp_path: Path, save: Callable[..., None]) -> None:
    path = tmp_path / "a.npz"
    save(path, a=numpy.arange(100), b=numpy.arange(50))
    index = tl.data.index(path, cache=None)
    good = path.read_bytes()
    offset, length = sample_files.ranges_of(index, 1)[1][0]
    for place in range(offset + 60, offset + length, 7):
        damaged = bytearray(good)
        damaged[place] ^= 4
        path.write_bytes(damaged)
        with pytest.raises((tl.Corrupt, tl.Format), match=r"a\.npz"):
            sample_files.view(index, 1)
        assert (sample_files.view(index, 0) == numpy.arange(100)).all()  # type: ignore[attr-defined]


def test_objects_are_unsupported(tmp_path: Path) -> None:
    numpy.savez(tmp_path / "a.npz", good=numpy.arange(3), bad=numpy.array([{}]))
    with pytest.raises(tl.Unsupported, match=r"a\.npz: bad\.npy: holds Python objects"):
        tl.data.index(tmp_path, cache=None)
    index = tl.data.index(tmp_path, cache=None, on_error="skip")
    assert len(index) == len(index.skipped) == 1
    assert (sample_files.view(index, 0) == numpy.arange(3)).all()  # type: ignore[attr-defined]


def test_other_members_and_methods_are_unsupported(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("a.npy", b"x" * 100)
    with pytest.raises(tl.Unsupported, match="method 12"):
        tl.data.index(path, cache=None)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "this is no array, but text")
    with pytest.raises(tl.Format, match=r"readme\.txt: is not a \.npy file"):
        tl.data.index(path, cache=None)

    class Pipe(io.RawIOBase):
        def __init__(self) -> None:
            self.data = b""

        def writable(self) -> bool:
            return True

        def write(self, data: bytes) -> int:  # type: ignore[override]
            self.data += bytes(data)
            return len(data)

    pipe = Pipe()
    numpy.savez(pipe, a=numpy.arange(3))
    path.write_bytes(pipe.data)
    with pytest.raises(tl.Unsupported, match="pipe"):
        tl.data.index(path, cache=None)


@pytest.mark.parametrize("size", [0, 3, 10, 100, 500, -1, -30])
def test_truncated_archives_are_noticed(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.npz"
    numpy.savez(path, a=numpy.arange(100), b=numpy.arange(50))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises((tl.Corrupt, tl.Format), match=r"a\.npz: is not a \.npz file"):
        tl.data.index(path, cache=None)
    numpy.savez(tmp_path / "b.npz", a=numpy.arange(100))
    index = tl.data.index(tmp_path, cache=None, on_error="skip")
    assert (len(index), len(index.skipped)) == (1, 1)


_PARSED_IN_THREADS = """
import gc, io, sys, threading
import numpy
from trunkline.data._npy import parse_head

class Garbage:
    def __init__(self):
        self.itself = self
    def __del__(self):
        for _ in range(50):
            pass

written = io.BytesIO()
numpy.lib.format.write_array(written, numpy.zeros((50, 1, 1), numpy.uint8))
failed = []

def parse():
    for _ in range(3000):
        Garbage()
        try:
            assert parse_head(written.getvalue(), "x").shape == (50, 1, 1)
        except BaseException as error:
            failed.append(error)

sys.setswitchinterval(1e-6)
gc.set_threshold(5)
threads = [threading.Thread(target=parse) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failed, failed[0]
"""


def test_headers_are_parsed_in_several_threads_while_garbage_is_collected() -> None:
    """CPython 3.11 raises SystemError in one of some hundred calls, which is none of the file."""
    subprocess.run([sys.executable, "-c", _PARSED_IN_THREADS], check=True, timeout=120)
