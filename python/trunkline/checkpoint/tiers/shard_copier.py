"""Copies shards of a step to a tier: what is read is compared with checksums, and copies are read back."""

import mmap
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from trunkline import _core
from trunkline._core import CheckpointManifest, Engine, File, Future
from trunkline._errors import Cancelled, Corrupt
from trunkline._tensor_io.flag import Flag
from trunkline.checkpoint.tiers.rate import RateLimit

_WINDOW_BYTES = 8 << 20  # read and written at a time; there are two
_WINDOWS_PER_SECOND = 20  # at least so many, where the rate is limited
# While a save is being written, a copy leaves the disks to it for so many times as long as it uses them.
_PAUSES_FOR_SAVES = 3
_LONGEST_PAUSE_SECONDS = 1.0


class DamagedOriginalError(Exception):
    """The step that is copied does not match its checksums: no copy of it will succeed."""

    def __init__(self, error: Corrupt) -> None:
        """`error`: names the file."""
        super().__init__(str(error))
        self.error = error


class Shard(NamedTuple):
    """A shard to copy: its number in the manifest, its path, and that of the copy."""

    number: int
    path: str
    copy: str
    nbytes: int
    checksums: Sequence[int]


def mode_of(path: str) -> int:
    """Return who may use what is at the path; nobody but the owner if it is gone."""
    try:
        return stat.S_IMODE(os.stat(path).st_mode) & 0o777  # noqa: PTH116
    except FileNotFoundError:
        return 0o700


class ShardCopier:
    """Copies shards of one manifest."""

    def __init__(
        self,
        manifest: CheckpointManifest,
        step: int,
        tier: str,
        *,
        bytes_per_second: int | None,
        engine: Engine | None,
        stop: Flag,
        is_saving: Callable[[], bool],
    ) -> None:
        """`step`, tier: what is copied, and to which directory, for messages.

        stop: once it is set, copy() raises Cancelled soon.
        is_saving: whether a save is being written, which goes first.
        """
        self._manifest = manifest
        self._step = step
        self._tier = tier
        self._engine = engine
        self._stop = stop
        self._is_saving = is_saving
        self._limit = RateLimit(bytes_per_second, stop.wait)
        chunk = manifest.chunk_bytes
        window = _WINDOW_BYTES
        if bytes_per_second is not None:
            window = min(window, bytes_per_second // _WINDOWS_PER_SECOND)
        self._window = max(chunk, window // chunk * chunk)
        self.done = 0  # bytes that were written to the tier, or read back from it

    def copy(self, shards: Sequence[Shard], replaced: str = "") -> None:
        """Copy all shards durably, then read all copies back. replaced: a file that is not more readable.

        Raises DamagedOriginalError, also if the step was removed meanwhile; Cancelled; the errors of the
        tier.
        """
        self._limit.start()
        memory = [memoryview(mmap.mmap(-1, self._window)) for _ in range(2)]
        for shard in shards:
            with self._open(shard) as source:
                _create(shard, replaced)
                self._copy_from(source, shard, memory)
        for shard in shards:
            self._verify(shard, memory)

    def _copy_from(self, source: File, shard: Shard, memory: Sequence[memoryview]) -> None:
        with _core.open(shard.copy, "r+", engine=self._engine) as copy:
            if source.size != shard.nbytes:
                raise DamagedOriginalError(self._wrong_size(shard, source.size))
            for begin, window in self._read(source, shard, memory):
                began = time.monotonic()
                try:
                    self._compare(shard, shard.path, begin, window)
                except Corrupt as error:
                    raise DamagedOriginalError(error) from None
                copy.pwrite(window, begin)
                self._end_window(len(window), time.monotonic() - began)
            copy.sync()

    def _open(self, shard: Shard) -> File:
        try:
            return _core.open(shard.path, engine=self._engine, direct="unless_cached")
        except FileNotFoundError:
            raise DamagedOriginalError(
                Corrupt(
                    None,
                    f"{shard.path} is missing; mount its disk if it is not mounted. Step {self._step} was "
                    f"not copied to {self._tier}",
                    shard.path,
                )
            ) from None

    def _verify(self, shard: Shard, memory: Sequence[memoryview]) -> None:
        with _core.open(shard.copy, engine=self._engine) as copy:
            for begin, window in self._read(copy, shard, memory):
                began = time.monotonic()
                self._compare(shard, shard.copy, begin, window)
                self._end_window(len(window), time.monotonic() - began)

    def _read(
        self, file: File, shard: Shard, memory: Sequence[memoryview]
    ) -> Iterator[tuple[int, memoryview]]:
        """Yield the windows of a file and where they begin, each while the next one is being read."""
        begins = range(0, shard.nbytes, self._window)
        ahead: Future | None = None
        try:
            for number, begin in enumerate(begins):
                window = memory[number % 2][: min(self._window, shard.nbytes - begin)]
                reading = ahead if ahead is not None else file.async_pread(window, begin)
                reading.result()
                ahead = None
                after = begin + self._window
                if after < shard.nbytes:
                    ahead = file.async_pread(
                        memory[(number + 1) % 2][: min(self._window, shard.nbytes - after)], after
                    )
                yield begin, window
        finally:
            if ahead is not None:  # it fills memory that the caller uses again
                with suppress(OSError):
                    ahead.result()

    def _end_window(self, nbytes: int, seconds: float) -> None:
        self.done += nbytes
        self._limit.pace(nbytes)
        if self._is_saving():
            self._stop.wait(min(_PAUSES_FOR_SAVES * seconds, _LONGEST_PAUSE_SECONDS))
        if self._stop.is_set():
            raise Cancelled(None, f"copying step {self._step} to {self._tier} was stopped")

    def _compare(self, shard: Shard, path: str, begin: int, window: memoryview) -> None:
        chunk_bytes = self._manifest.chunk_bytes
        for at in range(0, len(window), chunk_bytes):
            chunk = (begin + at) // chunk_bytes
            if _core.crc32c(window[at : at + chunk_bytes]) != shard.checksums[chunk]:
                raise self._wrong_chunk(shard, path, chunk)

    def _wrong_size(self, shard: Shard, nbytes: int) -> Corrupt:
        return Corrupt(
            None,
            f"{shard.path} is corrupt: it has {nbytes} bytes, and {shard.nbytes} were saved; step "
            f"{self._step} cannot be copied to {self._tier}",
            shard.path,
        )

    def _wrong_chunk(self, shard: Shard, path: str, chunk: int) -> Corrupt:
        begin = chunk * self._manifest.chunk_bytes
        end = min(begin + self._manifest.chunk_bytes, shard.nbytes)
        names = self._manifest.tensors_in(shard.number, begin, end)
        of = f", of the tensor {names[0]!r}" if names else ""
        error = Corrupt(
            None,
            f"{path} is corrupt: chunk {chunk} (bytes {begin} to {end}){of}, does not match the checksum it "
            f"was written with; step {self._step} was not copied to {self._tier}",
            path,
        )
        error.tensor, error.chunk = next(iter(names), None), chunk
        return error


def _create(shard: Shard, replaced: str) -> None:
    """Create the copy: no more readable than the original, and the copy that it replaces."""
    mode = mode_of(shard.path)
    if replaced:
        mode &= mode_of(replaced)
    os.close(os.open(shard.copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))
