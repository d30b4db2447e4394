"""Threads that wait for storage sleep: the process uses next to no processor time while a device does not
answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import pytest
import safetensors.torch
import torch

import trunkline as tl
from trunkline._core import WeightStream

MIB = 1 << 20
WATCHED = 0.5  # seconds
MOST_USED = 0.1  # seconds of processor time; a single thread that spins would use WATCHED
ALL = 1 << 40
Op: TypeAlias = Literal["read", "write"]
STATE = {name: torch.arange(2 * MIB, dtype=torch.int32) for name in "abc"}


@pytest.fixture
def faults() -> tl.Faults:
    return tl.Faults()


@pytest.fixture(params=["io_uring", "libaio", "threads"])
def engine(request: pytest.FixtureRequest, faults: tl.Faults) -> Iterator[tl.Engine]:
    try:
        engine = tl.Engine(backend=request.param, faults=faults)
    except tl.Error as error:
        pytest.skip(f"{request.param} does not work here: {error}")
    with engine:
        yield engine


def used_while_held(faults: tl.Faults, op: Op, call: Callable[[], object]) -> tuple[float, object]:
    """Processor time within WATCHED seconds in which `call` waits for commands that are not answered, and
    what it returns when they are.
    """
    results: list[object] = []
    sent = faults.commands(op)
    faults.hold(op, sent, ALL)
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    try:
        # Until it has sent what it sends, and done what it does meanwhile: processor time no longer grows.
        deadline = time.monotonic() + 60
        while faults.commands(op) == sent:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        used = WATCHED
        while used > MOST_USED and time.monotonic() < deadline:
            before = time.process_time()
            time.sleep(WATCHED)
            used = time.process_time() - before
        assert results == []
    finally:
        faults.release()
        thread.join()
    return used, results[0]


def same(loaded: object) -> bool:
    assert isinstance(loaded, dict)
    return loaded.keys() == STATE.keys() and all(torch.equal(loaded[name], STATE[name]) for name in STATE)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_loads(tmp_path: Path, engine: tl.Engine, faults: tl.Faults, suffix: str) -> None:
    path = tmp_path / f"m{suffix}"
    if suffix == ".pt":
        torch.save(STATE, path)
    else:
        safetensors.torch.save_file(STATE, path)
    used, loaded = used_while_held(faults, "read", lambda: tl.load(path, engine=engine))
    assert used < MOST_USED
    assert same(loaded)


def test_saves(tmp_path: Path, engine: tl.Engine, faults: tl.Faults) -> None:
    path = tmp_path / "m.safetensors"
    used, _ = used_while_held(faults, "write", lambda: tl.save(STATE, path, engine=engine))
    assert used < MOST_USED
    assert same(tl.load(path))


def test_saves_of_checkpoints(tmp_path: Path, engine: tl.Engine, faults: tl.Faults) -> None:
    with tl.Checkpointer(tmp_path / "run", engine=engine) as checkpointer:
        used, _ = used_while_held(faults, "write", lambda: checkpointer.save(1, STATE, block=True))
        assert used < MOST_USED
        assert same(checkpointer.load())


def test_streamed_weights(tmp_path: Path, engine: tl.Engine, faults: tl.Faults) -> None:
    path = tmp_path / "units"
    path.write_bytes(bytes([1]) * MIB + bytes([2]) * MIB + bytes([3]) * MIB)
    units = [(f"unit{i}", MIB, [(0, i * MIB, MIB, 0, None)]) for i in range(3)]
    with tl.open(path, engine=engine) as file:

        def stream() -> bytes:
            stream = WeightStream([file], units, memory_bytes=2 * MIB, engine=engine)
            index, offset = stream.acquire(0)
            got = bytes(memoryview(stream.memory[index])[offset : offset + MIB])
            stream.release(0)
            return got

        used, got = used_while_held(faults, "read", stream)
    assert used < MOST_USED
    assert got == bytes([1]) * MIB


def test_samples(tmp_path: Path, engine: tl.Engine, faults: tl.Faults) -> None:
    path = tmp_path / "samples.npy"
    np.save(path, np.arange(64 * 4096, dtype=np.uint8).reshape(64, 4096))
    index = tl.data.index(path)

    def first() -> int:
        return len(next(iter(tl.data.Loader(index, 8, engine=engine, seed=1))).indices)

    used, count = used_while_held(faults, "read", first)
    assert used < MOST_USED
    assert count == 8
