"""The event that saves end with."""

import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from trunkline._tensor_io.flag import Flag


class Interrupt(BaseException):  # as KeyboardInterrupt
    """What the signal handler raises."""


@contextmanager
def interrupts_after(seconds: float) -> Iterator[None]:
    armed = True

    def on_signal(number: int, frame: FrameType | None) -> None:
        if armed:
            raise Interrupt

    old = signal.signal(signal.SIGALRM, on_signal)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def test_it_is_set_once_and_for_all() -> None:
    flag = Flag()
    assert not flag.is_set()
    assert not flag.wait(0)
    assert not flag.wait(-1)
    assert not flag.wait(0.001)
    flag.set()
    flag.set()
    assert flag.is_set()
    assert flag.wait()
    assert flag.wait(0)


@pytest.mark.parametrize("timeout", [None, 60, 1e300])
def test_all_who_wait_are_woken(timeout: float | None) -> None:
    for _ in range(50):
        flag = Flag()
        woken: list[bool] = []
        threads = [threading.Thread(target=lambda: woken.append(flag.wait(timeout))) for _ in range(4)]  # noqa: B023
        for thread in threads:
            thread.start()
        flag.set()
        for thread in threads:
            thread.join(60)
        assert woken == [True] * 4


def test_interrupted_waits_leave_it_usable() -> None:
    rng = random.Random(3)
    interruptions = 0
    for _ in range(300):
        flag = Flag()
        try:
            with interrupts_after(rng.uniform(1e-6, 3e-4)):
                while True:
                    flag.wait(1e-5)
        except Interrupt:
            interruptions += 1
        thread = threading.Thread(target=flag.set)
        thread.start()
        assert flag.wait(60)
        thread.join(60)
        assert not thread.is_alive()
    assert interruptions == 300
