"""Recording what the library does, as a file that ui.perfetto.dev opens (docs/tracing.md)."""

import os
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

from trunkline import _core
from trunkline._types import Path
from trunkline._warnings import caller, warn_without_failing


class Trace:
    """A trace that is recorded while its `with` block runs: what `trunkline.trace` returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.events = 0
        """How many events the file has; once the block has ended."""
        self.dropped_events = 0
        """How many are missing: the oldest of threads with more than 65536."""
        self._process = 0

    def __enter__(self) -> "Trace":
        _core.start_trace(self._path)
        self._process = os.getpid()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if os.getpid() != self._process:  # a forked child, which is not recorded
            return
        try:
            summary = _core.stop_trace()
        except OSError as failure:
            if error is None:
                raise
            # The error of the block is what the program has to see.
            warn_without_failing(f"the trace is lost: {failure}", caller())
            return
        self.events = summary["events"]
        self.dropped_events = summary["dropped_events"]


def trace(path: Path) -> Trace:
    """Record a trace while a `with` block runs: `with trunkline.trace("trace.json"): ...`.

    Every operation, transfer, wait, copy and checksum of the process, with path, range, bytes, I/O path and
    result, in the Trace Event Format: open the file in https://ui.perfetto.dev. It is written when the block
    ends, whatever ends it, under a temporary name first; a relative path is of the working directory when the
    block begins. Each thread keeps its last 65536 events (4 MiB); `dropped_events` counts those before.

    Only one trace is recorded at a time: a second raises ValueError that names the file of the first.
    `trunkline.Error` is raised where no file can be made at `path`, when the block begins, and where writing
    it fails. A forked child is not recorded.
    """
    return Trace(path)


def span(category: str, name: str, of: str = "") -> AbstractContextManager[object]:
    """Return a context that a trace shows as a slice of this thread, if one is being recorded.

    `category`: "checkpoint", "stream" or "wait". `name`: one of few, which are kept as long as the process.
    `of`: a path, or whatever else the slice is about.
    """
    if not _core.is_tracing():
        return nullcontext()
    return _core.TraceSpan(category, name, of.encode(errors="backslashreplace"))
