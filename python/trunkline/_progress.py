"""A progress line on the terminal for operations that take longer than two seconds, or lines of a log."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

_DELAY_SECONDS = 2.0
_INTERVAL_SECONDS = 0.2
_LOG_SECONDS = 10.0  # between two lines of a log


class Log(Protocol):
    """What lines are logged by."""

    def info(self, text: str, *arguments: object) -> None:
        """Log a line."""


class Progress:
    """Shows how much of `total` is done on standard error, where that is a terminal. Used from one thread."""

    def __init__(
        self,
        what: str,
        total: int,
        unit: Literal["bytes", "files", "steps", "checkpoints", "queries"] = "bytes",
        log: Log | None = None,
    ) -> None:
        """`what`: the operation, as in "packing model". `log`: gets lines if stderr is not a terminal."""
        self._what = what
        self._total = total
        self._unit = unit
        self._done = 0
        self._start = self._shown = time.monotonic()
        self._visible = False
        self._terminal = is_on_terminal()
        self._log = log

    def add(self, count: int, note: str = "") -> None:
        """Count what is done; show `note` after the rest."""
        self._done += count
        now = time.monotonic()
        if self._terminal:
            if now - self._start < _DELAY_SECONDS or now - self._shown < _INTERVAL_SECONDS:
                return
            self._shown = now
            self._visible = True
            text = self._text(now, note)
            print(f"\r{text}\033[K", end="", file=sys.stderr, flush=True)
        elif self._log is not None and now - self._shown >= _LOG_SECONDS:
            self._shown = now
            self._log.info("%s", self._text(now, note))

    def _text(self, now: float, note: str) -> str:
        rate = self._done / (now - self._start) if now > self._start else 0.0
        left = (self._total - self._done) / rate if rate else 0.0
        share = self._done / self._total if self._total else 1.0
        if self._unit == "bytes":
            of = f"{self._total / 1e9:.1f} GB, {rate / 1e9:.2f} GB/s"
        else:
            of = f"{self._total} {self._unit}, {rate:.0f} per second"
        return f"{self._what}: {share:4.0%} of {of}, {left:.0f} s left{'; ' if note else ''}{note}"

    def close(self) -> None:
        """Remove the line."""
        if self._visible:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


@contextmanager
def progress_to(what: str) -> Iterator[Callable[[int, int], None]]:
    """Give a function that shows how many bytes are done, of how many; it is called with both."""
    shown: list[Progress] = []
    done = 0

    def show(so_far: int, total: int) -> None:
        nonlocal done
        if not shown:
            shown.append(Progress(what, total))
        shown[0].add(so_far - done)
        done = so_far

    try:
        yield show
    finally:
        for each in shown:
            each.close()


def is_on_terminal() -> bool:
    """Whether standard error is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


def announce(text: str, log: Log) -> None:
    """Say what begins: on the terminal or, where standard error is none, in the log."""
    if is_on_terminal():
        print(text, file=sys.stderr, flush=True)
    else:
        log.info("%s", text)
