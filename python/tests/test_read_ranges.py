"""File.read_ranges and Engine.read_ranges: many ranges as one operation, without a Python object for each."""

from __future__ import annotations

import array
import asyncio
import random
from pathlib import Path

import numpy
import pytest
import torch

import trunkline as tl


@pytest.fixture
def contents() -> bytes:
    return random.Random(5).randbytes(1_000_000)


@pytest.fixture
def path(tmp_path: Path, contents: bytes) -> Path:
    path = tmp_path / "data"
    path.write_bytes(contents)
    return path


def test_ranges_arrive_one_after_another(path: Path, contents: bytes) -> None:
    offsets = [900_000, 3, 3, 500_000, 999_990]
    lengths = [100, 5_000, 7, 0, 10]
    buffer = bytearray(sum(lengths))
    with tl.open(path) as file:
        assert file.read_ranges(buffer, offsets, lengths) == sum(lengths)
    assert buffer == b"".join(
        contents[offset : offset + length] for offset, length in zip(offsets, lengths, strict=True)
    )


def test_the_bytes_between_positions_stay(path: Path, contents: bytes) -> None:
    buffer = bytearray(b"x" * 30)
    with tl.open(path) as file:
        assert file.read_ranges(buffer, [10, 20], [5, 6], positions=[20, 2]) == 11
    assert buffer == b"xx" + contents[20:26] + b"x" * 12 + contents[10:15] + b"x" * 5


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        lambda values: numpy.array(values, numpy.int64),
        lambda values: numpy.array(values, numpy.uint64),
        lambda values: numpy.array(values, numpy.int32),
        lambda values: numpy.repeat(numpy.array(values, numpy.int64), 3)[::3],
        lambda values: torch.tensor(values),
        lambda values: array.array("q", values),
    ],
)
def test_integers_of_any_kind(make, path: Path, contents: bytes) -> None:  # type: ignore[no-untyped-def]
    buffer = numpy.zeros(300, numpy.uint8)
    with tl.open(path) as file:
        file.read_ranges(buffer, make([700, 10, 400]), make([50, 200, 50]), make([0, 100, 50]))
    assert buffer.tobytes() == contents[700:750] + contents[400:450] + contents[10:210]


def test_one_length_for_all(path: Path, contents: bytes) -> None:
    offsets = numpy.random.default_rng(3).integers(0, 900_000, 2_000)
    buffer = torch.zeros(2_000, 64, dtype=torch.uint8)
    with tl.open(path) as file:
        future = file.async_read_ranges(buffer, offsets, 64)
        assert future.result() == 128_000
    for row, offset in zip(buffer.numpy(), offsets, strict=True):
        assert row.tobytes() == contents[offset : offset + 64]


def test_ranges_of_many_files(tmp_path: Path) -> None:
    files = []
    for number in range(5):
        path = tmp_path / str(number)
        path.write_bytes(bytes([number]) * 10_000)
        files.append(tl.open(path))
    engine = tl.Engine()
    index = numpy.arange(1_000) % 5
    buffer = numpy.zeros((1_000, 10), numpy.uint8)
    assert engine.read_ranges(files, index, buffer, numpy.arange(1_000), 10) == 10_000
    assert (buffer == index[:, None]).all()
    assert engine.async_read_ranges(files, [4, 2], buffer, [0, 0], 3).result() == 6
    assert buffer.reshape(-1)[:6].tolist() == [4, 4, 4, 2, 2, 2]


def test_a_striped_file(tmp_path: Path, contents: bytes) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with tl.open([tmp_path / "a", tmp_path / "b", "data"], "w") as file:
        file.pwrite(contents)
        offsets = numpy.random.default_rng(4).integers(0, 900_000, 300)
        buffer = bytearray(300 * 1_000)
        file.read_ranges(buffer, offsets, 1_000)
    assert buffer == b"".join(contents[offset : offset + 1_000] for offset in offsets)


def test_awaited(path: Path, contents: bytes) -> None:
    async def read() -> bytes:
        buffer = bytearray(20)
        with tl.open(path) as file:
            await file.async_read_ranges(buffer, [5, 50], 10)
        return bytes(buffer)

    assert asyncio.run(read()) == contents[5:15] + contents[50:60]


def test_the_range_is_named(path: Path) -> None:
    with tl.open(path) as file:
        with pytest.raises(tl.EndOfFile, match=r"\(range 1\): the file ends at 1000000"):
            file.read_ranges(bytearray(20), [0, 999_995], 10)
        with pytest.raises(ValueError, match="range 2: 10 bytes at position 20 do not fit into the 25 bytes"):
            file.read_ranges(bytearray(25), [0, 1, 2], 10)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((5, 1), TypeError, "offsets: must be an array or a sequence of integers, not int"),
        (([0], "a"), TypeError, "lengths: must be an array or a sequence of integers, not str"),
        ((b"ab", 5), TypeError, "offsets: must be an array or a sequence of integers, not bytes"),
        ((numpy.zeros(2, numpy.int16), 5), TypeError, "of this numpy.ndarray are of another type; convert"),
        (([0, 1], [5]), ValueError, "lengths: has 1 items, but offsets has 2"),
        (([0, 1], 5, [0]), ValueError, "positions: has 1 items, but offsets has 2"),
        (([-1], [5]), ValueError, "offsets: must be at least 0"),
        ((numpy.array([3, -1]), 5), ValueError, "offsets: item 1 is -1; it must be at least 0"),
        ((numpy.array([0.5]), 5), TypeError, "offsets: must hold integers of 32 or 64 bits"),
        ((numpy.zeros((2, 2), numpy.int64), 5), ValueError, "offsets: must have one dimension, not 2"),
        (([2**63], 5), ValueError, "offsets: is beyond"),
        (([2**63 - 1], 5), ValueError, "largest file offset"),
    ],
)
def test_wrong_arguments(arguments: tuple, error: type, text: str, path: Path) -> None:
    with tl.open(path) as file, pytest.raises(error, match=text):
        file.read_ranges(bytearray(100), *arguments)


def test_files_of_another_kind(path: Path) -> None:
    engine = tl.Engine()
    with tl.open(path) as file:
        with pytest.raises(TypeError, match="files: item 1 must be trunkline.File, not str"):
            engine.read_ranges([file, "data"], [0], bytearray(5), [0], 5)
        with pytest.raises(ValueError, match="file_index: item 1 is 1, but there are 1 files"):
            engine.read_ranges([file], [0, 1], bytearray(10), [0, 0], 5)
    with pytest.raises(tl.Error, match="closed"):
        engine.read_ranges([file], [0], bytearray(5), [0], 5)
