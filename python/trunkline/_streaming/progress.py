"""A progress line on the terminal for operations that take longer than two seconds."""

import sys
import time

_DELAY_SECONDS = 2.0
_INTERVAL_SECONDS = 0.2


class Progress:
    """Shows bytes done of `total` on standard error, where that is a terminal. Used from one thread."""

    def __init__(self, what: str, total: int) -> None:
        """`what`: the operation, as in "packing model"."""
        self._what = what
        self._total = total
        self._done = 0
        self._start = self._shown = time.monotonic()
        self._visible = False
        self._terminal = sys.stderr is not None and sys.stderr.isatty()

    def add(self, nbytes: int) -> None:
        """Count bytes that are done."""
        self._done += nbytes
        now = time.monotonic()
        if not self._terminal or now - self._start < _DELAY_SECONDS or now - self._shown < _INTERVAL_SECONDS:
            return
        self._shown = now
        self._visible = True
        rate = self._done / (now - self._start)
        left = (self._total - self._done) / rate if rate else 0.0
        share = self._done / self._total if self._total else 1.0
        print(
            f"\r{self._what}: {share:4.0%} of {self._total / 1e9:.1f} GB, {rate / 1e9:.2f} GB/s, "
            f"{left:.0f} s left\033[K",
            end="",
            file=sys.stderr,
            flush=True,
        )

    def close(self) -> None:
        """Remove the line."""
        if self._visible:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
