"""Futures in asyncio code."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trunkline as tl


@pytest.fixture
def file(faults: tl.Faults, tmp_path: Path) -> Iterator[tl.File]:
    with (
        tl.Engine(faults=faults, block_bytes=4096, queue_depth=2, lanes=1) as engine,
        tl.open(tmp_path / "file", "w", engine=engine) as opened,
    ):
        opened.pwrite(bytes(range(256)) * 400)
        yield opened
        faults.release()


def test_await(file: tl.File) -> None:
    async def main() -> None:
        targets = [bytearray(1000 + i) for i in range(20)]
        sizes = await asyncio.gather(*(wait(file.async_pread(target, i)) for i, target in enumerate(targets)))
        assert sizes == [len(target) for target in targets]
        for i, target in enumerate(targets):
            assert target == (bytes(range(256)) * 5)[i : i + len(target)]

    asyncio.run(main())


async def wait(future: tl.Future) -> int:
    return await future


def test_await_what_is_done(file: tl.File) -> None:
    future = file.async_pread(bytearray(10))
    future.result()

    async def main() -> int:
        return await future + await future

    assert asyncio.run(main()) == 20


def test_await_raises_the_error(file: tl.File) -> None:
    async def main() -> None:
        with pytest.raises(tl.EndOfFile):
            await file.async_pread(bytearray(10), 1 << 30)

    asyncio.run(main())


def test_the_loop_runs_while_an_operation_is_pending(file: tl.File, faults: tl.Faults) -> None:
    async def main() -> None:
        faults.hold("read", 0)
        task = asyncio.ensure_future(wait(file.async_pread(bytearray(100))))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not task.done()
        faults.release()
        assert await task == 100

    asyncio.run(main())


class Weak(np.ndarray[Any, Any]):
    """A numpy array that can be watched for its end."""


def test_cancelling_the_task_cancels_the_operation(file: tl.File, faults: tl.Faults) -> None:
    """The memory stays until what was sent has ended."""
    target = np.zeros(100_000, np.uint8).view(Weak)
    watch = weakref.ref(target)
    future = file.async_pread(bytearray(1))
    future.result()

    async def main(target: Any) -> tl.Future:
        faults.hold("read", faults.commands("read"), 2)
        sent = faults.commands("read")
        pending = file.async_pread(target)
        del target
        while faults.commands("read") < sent + 2:
            await asyncio.sleep(0)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait(pending), 0.01)
        return pending

    handed, target = target, np.zeros(0).view(Weak)
    pending = asyncio.run(main(handed))
    del handed
    assert not pending.done()
    gc.collect()
    assert watch() is not None
    ended = threading.Event()
    pending.add_done_callback(lambda _: ended.set())
    faults.release()
    assert ended.wait(60)
    assert isinstance(pending.exception(), tl.Cancelled)


def test_a_closed_loop_is_left_alone(
    file: tl.File, faults: tl.Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", reports.append)

    async def main() -> tl.Future:
        faults.hold("read", 0)
        future = file.async_pread(bytearray(10))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait(future), 0.01)
        return future

    future = asyncio.run(main())
    passed = threading.Event()
    future.add_done_callback(lambda _: passed.set())
    faults.release()
    assert passed.wait(60)
    assert reports == []
