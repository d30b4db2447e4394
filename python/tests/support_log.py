"""What the package logs, for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from trunkline import _core, _waits
from trunkline._logging import Log

LONG = 60.0


@contextmanager
def logged(caplog: pytest.LogCaptureFixture, level: str = "INFO") -> Iterator[list[str]]:
    """Collect the records of the block, as "LEVEL component: message"."""
    found: list[str] = []
    caplog.clear()
    with caplog.at_level(level, logger="trunkline"):
        _core.deliver_log()
        caplog.clear()
        yield found
        _core.deliver_log()
        found += [
            f"{record.levelname} {record.name.partition('.')[2]}: {record.getMessage()}"
            for record in caplog.records
        ]
    _core.deliver_log()


@pytest.fixture
def every_wait_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_waits, "LONG_SECONDS", 0.0)


@pytest.fixture
def when_logged(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], threading.Event]:
    """Make events that are set when a record at `info` has a text in it."""
    events: dict[str, threading.Event] = {}
    info = Log.info

    def noticed(log: Log, text: str, *arguments: object) -> None:
        info(log, text, *arguments)
        message = text % arguments if arguments else text
        for wanted, event in list(events.items()):
            if wanted in message:
                event.set()

    monkeypatch.setattr(Log, "info", noticed)
    return lambda text: events.setdefault(text, threading.Event())


def in_threads(*calls: Callable[[], object]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
