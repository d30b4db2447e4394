"""Weights that are read again after errors, as the plugin of SGLang does."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest
import torch

import trunkline as tl
from trunkline import _core
from trunkline._core import WeightStream
from trunkline.sglang._retries import RetryingMemory

KIB = 1 << 10
UNITS = 6


def make_memory(
    folder: Path, engine: tl.Engine, retry_seconds: float, checksum: int | None = None
) -> RetryingMemory:
    """A stream of units, each full of its number."""
    path = folder / "weights"
    with tl.open(path, "w") as file:
        for number in range(UNITS):
            file.pwrite(torch.full((64 * KIB,), number, dtype=torch.uint8), number * 64 * KIB)
    units = [
        (str(number), 64 * KIB, [(0, number * 64 * KIB, 64 * KIB, 0, checksum)]) for number in range(UNITS)
    ]
    stream = WeightStream([_core.open(path, engine=engine)], units, memory_bytes=2 * 64 * KIB, engine=engine)
    return RetryingMemory(stream, "remove it", retry_seconds=retry_seconds)


def contents(memory: RetryingMemory, unit: int) -> int:
    """The one value of a unit."""
    tensor, begin = memory.acquire(unit)
    values = set(memory.tensors[tensor][begin : begin + 64 * KIB].tolist())
    memory.release(unit)
    assert len(values) == 1
    return int(values.pop())


def test_a_fault_that_passes_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    faults = tl.Faults()
    with tl.Engine("threads", faults=faults) as engine:
        memory = make_memory(tmp_path, engine, retry_seconds=30)
        assert [contents(memory, unit) for unit in range(UNITS)] == list(range(UNITS))
        faults.fail("read", faults.commands("read") + 1, errno.EIO, 7)
        for _ in range(4):
            assert [contents(memory, unit) for unit in range(UNITS)] == list(range(UNITS))
        assert faults.injected == 7
    assert "cannot read weights" in caplog.text
    assert "requests wait" in caplog.text
    assert "weights can be read again, after" in caplog.text


def test_a_fault_that_stays_is_an_error_in_the_end(tmp_path: Path) -> None:
    faults = tl.Faults()
    with tl.Engine("threads", faults=faults) as engine:
        memory = make_memory(tmp_path, engine, retry_seconds=0.5)
        assert contents(memory, 0) == 0
        faults.fail("read", 0, errno.EIO, 1 << 30)
        begin = time.monotonic()
        with pytest.raises(tl.Error) as error:
            [contents(memory, unit) for unit in [*range(1, UNITS), *range(UNITS)]]
        assert error.value.errno == errno.EIO
        assert 0.2 < time.monotonic() - begin < 30


def test_damage_is_an_error_at_once(tmp_path: Path) -> None:
    with tl.Engine("threads") as engine:
        memory = make_memory(tmp_path, engine, retry_seconds=1e6, checksum=1)
        with pytest.raises(tl.Corrupt, match="remove it"):
            contents(memory, 0)


def test_without_retries_an_error_is_raised_at_once(tmp_path: Path) -> None:
    faults = tl.Faults()
    with tl.Engine("threads", faults=faults) as engine:
        memory = make_memory(tmp_path, engine, retry_seconds=0)
        faults.fail("read", 0, errno.EIO, 1 << 30)
        with pytest.raises(OSError, match="weights"):
            [contents(memory, unit) for unit in [*range(UNITS), *range(UNITS)]]
