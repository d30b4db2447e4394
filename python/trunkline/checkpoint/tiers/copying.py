"""Copies one step to another directory of checkpoints, and verifies the copy before it becomes a checkpoint.

1. The tier's directory is locked, and that of the step made (CheckpointStore.begin).
2. Every shard is copied under a name that no manifest knows. What is read is compared with the checksums of
   its chunks.
3. Every copy is made durable, read back, and compared with the same checksums.
4. The manifest is committed, with the number of the commit that it has in the directory of the run; then
   older copies are removed.

A copy that is cut off leaves files that no manifest names. The next process that copies to the tier removes
them, and so does one that opens the tier.
"""

import mmap
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from trunkline import _core
from trunkline._core import CheckpointManifest, CheckpointSave, CheckpointStore, Engine, File, Future
from trunkline._errors import Cancelled, Corrupt
from trunkline._tensor_io.flag import Flag
from trunkline.checkpoint.lock_wait import retry_while_locked
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


class _Shard(NamedTuple):
    """A shard to copy."""

    number: int
    path: str
    copy: str
    nbytes: int
    checksums: Sequence[int]


def _mode_of(path: str) -> int:
    """Return who may use what is at the path; nobody but the owner if it is gone."""
    try:
        return stat.S_IMODE(os.stat(path).st_mode) & 0o777  # noqa: PTH116
    except FileNotFoundError:
        return 0o700


class StepCopy:
    """One copy of one step, which run() makes once."""

    def __init__(
        self,
        manifest: CheckpointManifest,
        tier: CheckpointStore,
        *,
        run_directory: str,
        bytes_per_second: int | None,
        engine: Engine | None,
        stop: Flag,
        is_saving: Callable[[], bool],
    ) -> None:
        """`manifest`: of the step; `run_directory`: that has it.

        stop: once it is set, run() raises Cancelled soon.
        is_saving: whether a save is being written, which goes first.
        """
        self._manifest = manifest
        self._tier = tier
        self._run_directory = run_directory
        self._engine = engine
        self._stop = stop
        self._is_saving = is_saving
        self._limit = RateLimit(bytes_per_second, stop.wait)
        chunk = manifest.chunk_bytes
        window = _WINDOW_BYTES
        if bytes_per_second is not None:
            window = min(window, bytes_per_second // _WINDOWS_PER_SECOND)
        self._window = max(chunk, window // chunk * chunk)
        self._replaced = ""  # a file of the copy that this one replaces
        self._done = 0
        self._total = 2 * sum(manifest.shard_bytes())

    def progress(self) -> tuple[int, int]:
        """Return the bytes written to the tier, or read back from it, and how many these will be."""
        return self._done, self._total

    def run(self, before_commit: Callable[[], None], keep: int | None) -> list[OSError]:
        """Make the copy, and remove all but the last `keep` copies; return what could not be removed.

        before_commit: called once the tier's directory has its descriptor.

        Raises DamagedOriginalError, also if the step was removed meanwhile; Cancelled; the errors of the
        tier.
        """
        save = retry_while_locked(self._begin)
        try:
            before_commit()
            shards = self._shards(save)
            self._limit.start()
            memory = [memoryview(mmap.mmap(-1, self._window)) for _ in range(2)]
            for shard in shards:
                self._copy(shard, memory)
            for shard in shards:
                self._verify(shard, memory)
            save.commit_copy(self._manifest)
        except BaseException:
            with suppress(OSError):
                save.abandon()
            raise
        try:
            problems: list[OSError] = save.retain(keep)["problems"]
        except OSError as error:
            problems = [error]
        finally:
            save.release()
        return problems

    def _begin(self) -> CheckpointSave:
        volumes = max(1, len(self._tier.volumes))
        shards = len(self._manifest.shard_bytes())
        directory = Path(self._tier.directory)
        is_new = not directory.exists()
        save: CheckpointSave = self._tier.begin(
            self._manifest.step, [len(range(volume, shards, volumes)) for volume in range(volumes)]
        )
        if is_new:  # it has no copies yet; nobody may list them who may not list the originals
            mode = stat.S_IMODE(directory.stat().st_mode)
            private = mode & ~(0o777 & ~_mode_of(self._run_directory))  # setgid stays
            if private != mode:
                directory.chmod(private)
        return save

    def _shards(self, save: CheckpointSave) -> list[_Shard]:
        manifest = self._manifest
        copies = [each["path"] for each in save.placement["shards"]]
        self._replaced = next((path for path in save.placement["replaced"] if os.path.exists(path)), "")  # noqa: PTH110
        return [
            _Shard(index, path, copies[index], nbytes, manifest.shard_checksums(index))
            for index, (path, nbytes) in enumerate(
                zip(manifest.shard_paths(), manifest.shard_bytes(), strict=True)
            )
        ]

    def _copy(self, shard: _Shard, memory: Sequence[memoryview]) -> None:
        with self._open(shard) as source:
            self._create(shard)
            self._copy_from(source, shard, memory)

    def _create(self, shard: _Shard) -> None:
        """Create the copy: no more readable than the original, and the copy that it replaces."""
        mode = _mode_of(shard.path)
        if self._replaced:
            mode &= _mode_of(self._replaced)
        os.close(os.open(shard.copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))

    def _copy_from(self, source: File, shard: _Shard, memory: Sequence[memoryview]) -> None:
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

    def _open(self, shard: _Shard) -> File:
        try:
            return _core.open(shard.path, engine=self._engine, direct="unless_cached")
        except FileNotFoundError:
            raise DamagedOriginalError(
                Corrupt(
                    None,
                    f"{shard.path} is missing; mount its disk if it is not mounted. Step "
                    f"{self._manifest.step} was not copied to {self._tier.directory}",
                    shard.path,
                )
            ) from None

    def _verify(self, shard: _Shard, memory: Sequence[memoryview]) -> None:
        with _core.open(shard.copy, engine=self._engine) as copy:
            for begin, window in self._read(copy, shard, memory):
                began = time.monotonic()
                self._compare(shard, shard.copy, begin, window)
                self._end_window(len(window), time.monotonic() - began)

    def _read(
        self, file: File, shard: _Shard, memory: Sequence[memoryview]
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
        self._done += nbytes
        self._limit.pace(nbytes)
        if self._is_saving():
            self._stop.wait(min(_PAUSES_FOR_SAVES * seconds, _LONGEST_PAUSE_SECONDS))
        if self._stop.is_set():
            raise Cancelled(None, f"copying step {self._manifest.step} to {self._tier.directory} was stopped")

    def _compare(self, shard: _Shard, path: str, begin: int, window: memoryview) -> None:
        chunk_bytes = self._manifest.chunk_bytes
        for at in range(0, len(window), chunk_bytes):
            chunk = (begin + at) // chunk_bytes
            if _core.crc32c(window[at : at + chunk_bytes]) != shard.checksums[chunk]:
                raise self._wrong_chunk(shard, path, chunk)

    def _wrong_size(self, shard: _Shard, nbytes: int) -> Corrupt:
        return Corrupt(
            None,
            f"{shard.path} is corrupt: it has {nbytes} bytes, and {shard.nbytes} were saved; step "
            f"{self._manifest.step} cannot be copied to {self._tier.directory}",
            shard.path,
        )

    def _wrong_chunk(self, shard: _Shard, path: str, chunk: int) -> Corrupt:
        begin = chunk * self._manifest.chunk_bytes
        end = min(begin + self._manifest.chunk_bytes, shard.nbytes)
        names = self._manifest.tensors_in(shard.number, begin, end)
        of = f", of the tensor {names[0]!r}" if names else ""
        error = Corrupt(
            None,
            f"{path} is corrupt: chunk {chunk} (bytes {begin} to {end}){of}, does not match the checksum it "
            f"was written with; step {self._manifest.step} was not copied to {self._tier.directory}",
            path,
        )
        error.tensor, error.chunk = next(iter(names), None), chunk
        return error
