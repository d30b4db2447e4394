"""Futures: waiting, results, cancelling, callbacks."""

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trunkline as tl


@pytest.fixture
def file(new_engine: Callable[..., tl.Engine], faults: tl.Faults, tmp_path: Path) -> Iterator[tl.File]:
    engine = new_engine(faults=faults, block_bytes=4096, queue_depth=2, lanes=1)
    with engine, tl.open(tmp_path / "file", "w", engine=engine) as opened:
        opened.pwrite(bytes(range(256)) * 256)
        yield opened
        faults.release()


def held(file: tl.File, faults: tl.Faults, buffer: bytearray) -> tl.Future:
    """A read whose first command was sent and is held."""
    faults.hold("read", faults.commands("read"))
    return file.async_pread(buffer)


def test_wait_and_result(file: tl.File, faults: tl.Faults) -> None:
    target = bytearray(4096)
    future = held(file, faults, target)
    assert not future.done()
    assert future.wait(0) is False
    assert future.wait(0.01) is False
    with pytest.raises(tl.Timeout, match=r"0\.01 s"):
        future.result(0.01)
    with pytest.raises(TimeoutError):
        future.exception(timeout=0)
    with pytest.raises(tl.Timeout):
        tl.wait_all([future], 0)
    assert future.bytes_done == 0
    faults.release()
    assert future.wait(60) is True
    assert future.result() == future.result(0) == future.bytes_done == 4096
    assert future.exception() is None
    assert future.done()
    assert future.cancel() is False
    assert target == bytes(range(256)) * 16


@pytest.mark.parametrize(
    ("wrong", "exception"), [(-1, ValueError), (float("nan"), ValueError), ("1", TypeError)]
)
def test_timeouts_are_checked(file: tl.File, wrong: Any, exception: type[Exception]) -> None:
    future = file.async_pread(bytearray(1))
    for call in (
        future.wait,
        future.result,
        future.exception,
        lambda timeout: tl.wait_all([future], timeout),
    ):
        with pytest.raises(exception, match="^timeout: "):
            call(wrong)
    assert future.wait(float("inf"))


def test_wait_all(file: tl.File) -> None:
    assert tl.wait_all([]) == 0
    good = [file.async_pread(bytearray(100), i) for i in range(10)]
    assert tl.wait_all(iter(good)) == 1000
    bad = file.async_pread(bytearray(100), 1 << 20)
    worse = file.async_pread(bytearray(100), 1 << 30)
    with pytest.raises(tl.EndOfFile) as caught:
        tl.wait_all([*good, bad, worse], timeout=60)
    assert str(caught.value) == str(bad.exception())
    with pytest.raises(TypeError, match="^futures: "):
        tl.wait_all(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="^futures: .*not int"):
        tl.wait_all([1])  # type: ignore[list-item]


def test_cancel_drops_what_was_not_sent(file: tl.File, faults: tl.Faults) -> None:
    faults.hold("read", faults.commands("read"), 2)
    future = file.async_pread(bytearray(65536))  # 16 blocks, of which 2 fit the queue
    while faults.commands("read") < 2:
        assert not future.wait(0.001)
    assert future.cancel() is True
    assert not future.done()  # what was sent is awaited
    faults.release()
    assert isinstance(future.exception(), tl.Cancelled)
    with pytest.raises(tl.Cancelled):
        future.result()
    assert faults.commands("read") == 2
    assert file.pread(bytearray(10)) == 10


def test_cancel_when_all_was_sent_changes_nothing(file: tl.File, faults: tl.Faults) -> None:
    future = held(file, faults, bytearray(100))
    while faults.commands("read") < 1:
        assert not future.wait(0.001)
    assert future.cancel() is False
    faults.release()
    assert future.result() == 100


def test_callbacks(file: tl.File, faults: tl.Faults) -> None:
    calls: list[tuple[tl.Future, str]] = []
    all_called = threading.Event()
    future = held(file, faults, bytearray(100))
    future.add_done_callback(lambda done: calls.append((done, threading.current_thread().name)))
    future.add_done_callback(lambda done: all_called.set())
    assert not all_called.wait(0)
    faults.release()
    assert all_called.wait(60)
    assert [call[0] for call in calls] == [future]
    assert calls[0][1] != threading.main_thread().name
    late = threading.Event()
    future.add_done_callback(lambda done: late.set())
    assert late.wait(60)
    with pytest.raises(TypeError, match="^fn: "):
        future.add_done_callback(3)  # type: ignore[arg-type]


def test_a_failing_callback_is_reported(file: tl.File, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Any] = []
    passed = threading.Event()
    monkeypatch.setattr(sys, "unraisablehook", lambda report: reported.append(report.exc_value))

    def fail(_: tl.Future) -> None:
        raise RuntimeError("in a callback")

    future = file.async_pread(bytearray(100))
    future.add_done_callback(fail)
    future.add_done_callback(lambda _: passed.set())
    assert passed.wait(60)
    assert [str(error) for error in reported] == ["in a callback"]


def test_callbacks_may_submit(file: tl.File) -> None:
    target = bytearray(5)
    second: list[tl.Future] = []
    finished = threading.Event()

    def chain(_: tl.Future) -> None:
        second.append(file.async_pread(target, 1))
        second[0].add_done_callback(lambda _: finished.set())

    file.async_pread(bytearray(5)).add_done_callback(chain)
    assert finished.wait(60)
    assert second[0].result() == 5
    assert target == bytes([1, 2, 3, 4, 5])


def test_dropping_a_future_does_not_cancel(file: tl.File, faults: tl.Faults) -> None:
    faults.hold("write", faults.commands("write"))
    file.async_pwrite(b"kept")
    faults.release()
    target = bytearray(4)
    file.sync()
    file.pread(target)
    assert target == b"kept"


def test_waiting_leaves_the_gil_to_others(file: tl.File, faults: tl.Faults) -> None:
    future = held(file, faults, bytearray(100))
    waiting = threading.Event()
    results: list[int] = []

    def wait() -> None:
        waiting.set()
        results.append(future.result())

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait(60)
    # This thread runs while the other waits; did the wait keep the GIL, release() would never be reached.
    assert sum(range(100_000)) == 4999950000
    faults.release()
    thread.join()
    assert results == [100]


def test_blocking_reads_leave_the_gil_to_others(file: tl.File, faults: tl.Faults) -> None:
    for count in (100, 60_000):
        faults.hold("read", faults.commands("read"))
        sent = faults.commands("read")
        results: list[int] = []
        thread = threading.Thread(
            target=lambda size=count, out=results: out.append(file.pread(bytearray(size)))
        )
        thread.start()
        while faults.commands("read") == sent:
            thread.join(0.001)
        faults.release()
        thread.join()
        assert results == [count]
