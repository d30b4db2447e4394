"""A progress line on the terminal for operations that take longer than two seconds."""

import sys
import time
from typing import Literal

_DELAY_SECONDS = 2.0
_INTERVAL_SECONDS = 0.2


class Progress:
    """Shows how much of `total` is done on standard error, where that is a terminal. Used from one thread."""

    def __init__(
        self,
        what: str,
        total: int,
        unit: Literal["bytes", "files", "steps", "checkpoints", "queries"] = "bytes",
    ) -> None:
        """`what`: the operation, as in "packing model"."""
        self._what = what
        self._total = total
        self._unit = unit
        self._done = 0
        self._start = self._shown = time.monotonic()
        self._visible = False
        self._terminal = sys.stderr is not None and sys.stderr.isatty()

    def add(self, count: int, note: str = "") -> None:
        """Count what is done; show `note` after the rest."""
        self._done += count
        now = time.monotonic()
        if not self._terminal or now - self._start < _DELAY_SECONDS or now - self._shown < _INTERVAL_SECONDS:
            return
        self._shown = now
        self._visible = True
        rate = self._done / (now - self._start)
        left = (self._total - self._done) / rate if rate else 0.0
        share = self._done / self._total if self._total else 1.0
        if self._unit == "bytes":
            of = f"{self._total / 1e9:.1f} GB, {rate / 1e9:.2f} GB/s"
        else:
            of = f"{self._total} {self._unit}, {rate:.0f} per second"
        print(
            f"\r{self._what}: {share:4.0%} of {of}, {left:.0f} s left{'; ' if note else ''}{note}\033[K",
            end="",
            file=sys.stderr,
            flush=True,
        )

    def close(self) -> None:
        """Remove the line."""
        if self._visible:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
