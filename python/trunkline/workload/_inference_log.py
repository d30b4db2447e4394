"""The log of an inference: records that are appended to a file, and when they are made durable."""

import os
import time
from pathlib import Path
from typing import Any

import numpy

from trunkline._core import DurationHistogram
from trunkline.workload._pattern import Pattern
from trunkline.workload._spec import Logging

_PATTERN_BYTES = 1 << 20


class InferenceLog:
    """Appends records to a new file. Of one thread."""

    def __init__(self, logging: Logging, path: Path, seed: int) -> None:
        """Make the file. Raises FileExistsError if there is one."""
        self._logging = logging
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)
        contents = numpy.empty(_PATTERN_BYTES + logging.record_bytes, dtype=numpy.uint8)
        Pattern(seed).fill(contents, 0)
        self._contents = contents.tobytes()
        self._records = self._unsynced = self._syncs = self._appended = 0
        self._synced_at = time.monotonic()
        self._sync_times = DurationHistogram()

    def append(self, records: int) -> None:
        """Append so many records, and make them durable if it is time for that."""
        nbytes = self._logging.record_bytes
        for _ in range(records):
            begin = self._records * nbytes % _PATTERN_BYTES
            self._write(memoryview(self._contents)[begin : begin + nbytes])
            self._records += 1
            self._unsynced += 1
            if self._logging.sync == "each" or (
                self._logging.sync == "group" and self._unsynced >= self._logging.group
            ):
                self._sync()
        self.tick()

    def tick(self) -> None:
        """Make records durable if the interval is over. To be called now and then."""
        if self._logging.sync != "interval" or not self._unsynced:
            return
        if time.monotonic() - self._synced_at >= self._logging.interval_seconds:
            self._sync()

    def finish(self) -> dict[str, Any]:
        """Make the rest durable unless that is off, and return what was counted."""
        if self._unsynced and self._logging.sync != "off":
            self._sync()
        return {
            "records": self._records,
            "bytes": self._appended,
            "syncs": self._syncs,
            "sync_times": self._sync_times.counts(),
        }

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _write(self, record: memoryview) -> None:
        while record:
            written = os.write(self._fd, record)
            self._appended += written
            record = record[written:]

    def _sync(self) -> None:
        begin = time.monotonic_ns()
        os.fdatasync(self._fd)
        self._sync_times.add_ns(time.monotonic_ns() - begin)
        self._syncs += 1
        self._unsynced = 0
        self._synced_at = time.monotonic()
