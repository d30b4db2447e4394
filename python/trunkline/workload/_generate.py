"""Generates data sets."""

import errno
import math
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from trunkline._errors import Error, Unsupported, exception_of, system_error
from trunkline._flock import DirectoryLock
from trunkline._processors import available_processors
from trunkline._progress import Progress
from trunkline.workload._content import Content
from trunkline.workload._data_files import (
    DataFile,
    check_no_files,
    check_size,
    data_files,
    directories_of,
    files_in,
)
from trunkline.workload._descriptor import missing_descriptors, write_descriptor
from trunkline.workload._inference_model import write_model
from trunkline.workload._require_torch import require_torch
from trunkline.workload._room import require_room
from trunkline.workload._spec import Dataset, Workload, check_workload
from trunkline.workload._writers import Source, write_file

if TYPE_CHECKING:
    from trunkline._types import Path as AnyPath

_FILE_OVERHEAD_BYTES = 8192  # headers, indexes, and the rest of a block
_PARTIAL = ".partial"


class _Stopped(Exception):
    """Another thread failed, or the user interrupted."""


@dataclass
class _Work:
    source: Source
    missing: list[DataFile]
    kept: int
    file_bytes: int  # on average, for the progress

    def missing_in(self, directories: Sequence[Path]) -> list[int]:
        """Return how many files are missing in each directory."""
        counts = [0] * len(directories)
        for file in self.missing:
            counts[file.number % len(directories)] += 1
        return counts


def generate(
    workload: Workload, directories: "Iterable[AnyPath]", workers: int | None = None
) -> dict[str, Any]:
    """Write the data set of a workload into the directories, which are made if they do not exist.

    For an inference, also the model that it loads, into the first directory.

    Files that an earlier call finished are kept; what it left unfinished is written again. Every file depends
    on the workload and its seed alone. `workers`: files that are written at once.

    Raises FileExistsError if there are files that were not generated, OSError if there is not enough room or
    writing fails. Ctrl-C leaves finished files, for the next call. Returns the number of files made and kept,
    and the bytes made.
    """
    check_workload(workload)
    if not workload.has_dataset:
        raise ValueError(f"{workload.name} has no data set: `trunkline workload run` makes its checkpoints")
    _require_format(workload)
    model_bytes = workload.inference.model_bytes if workload.inference is not None else 0
    if model_bytes:
        require_torch("models that are loaded")
    places = directories_of(directories)
    check_no_files(places)
    for place in places:
        _make_directory(place)
    stop = threading.Event()
    with ExitStack() as held:
        for place in places:
            _lock(held.enter_context(DirectoryLock(place)))
        undescribed = missing_descriptors(workload, places)
        if len(undescribed) == len(places):  # nothing is there yet: listing millions of files takes long
            _check_room(workload, files_in(workload.dataset, len(places)), places)
        work = _work(workload, places, stop)
        _check_room(workload, work.missing_in(places), places)
        for place, descriptor in undescribed:
            write_descriptor(place, descriptor)
        written = _run(work, workers or _default_workers(workload), stop, workload.name)
        if model_bytes:
            write_model(places[0], model_bytes, workload.seed)
    return {
        "workload": workload.name,
        "directories": [str(place) for place in places],
        "files_made": len(work.missing),
        "files_kept": work.kept,
        "bytes_made": written,
        "model_bytes": model_bytes,
        "seed": workload.seed,
    }


def _require_format(workload: Workload) -> None:
    if workload.dataset.format != "parquet":
        return
    try:
        import pyarrow.parquet  # noqa: F401
    except ModuleNotFoundError as error:
        raise Unsupported(
            errno.EOPNOTSUPP, "Parquet files require the package pyarrow: pip install pyarrow"
        ) from error


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise system_error(error, f"create the directory {path}", str(path)) from None


def _lock(lock: DirectoryLock) -> None:
    if not lock.try_lock():
        raise exception_of(
            "system",
            errno.EAGAIN,
            f"another process is generating a data set in {lock.directory}; wait until it has ended",
            str(lock.directory),
        )


def _work(workload: Workload, directories: Sequence[Path], stop: threading.Event) -> _Work:
    def check() -> None:
        if stop.is_set():
            raise _Stopped

    dataset = workload.dataset
    missing, kept = [], 0
    for file in data_files(dataset, directories):
        if file.path.exists():
            check_size(dataset, file.path, file.path.stat().st_size)
            kept += 1
        else:
            missing.append(file)
    source = Source(dataset, workload.seed, Content(workload.seed), check)
    return _Work(source, missing, kept, _file_bytes(dataset))


def _file_bytes(dataset: Dataset) -> int:
    return round(dataset.samples_per_file * dataset.record_bytes.mean)


def _check_room(workload: Workload, missing: Sequence[int], directories: Sequence[Path]) -> None:
    """Raise OSError if a file system has less room than the missing files of its directories need."""
    counts: dict[int, int] = {}
    place: dict[int, Path] = {}
    for directory, count in zip(directories, missing, strict=True):
        device = directory.stat().st_dev
        place.setdefault(device, directory)
        counts[device] = counts.get(device, 0) + count
    dataset = workload.dataset
    spread = dataset.record_bytes.stdev * math.sqrt(dataset.samples_per_file)
    for device, count in counts.items():
        if not count:
            continue
        # Four standard deviations of the sum: less would be too little once in 30,000 times.
        needed = round(count * (_file_bytes(dataset) + _FILE_OVERHEAD_BYTES) + 4 * spread * math.sqrt(count))
        todo = "choose another directory, or a smaller data set (scale_bytes=)"
        require_room(place[device], needed, f"{workload.name} needs", todo)


def _default_workers(workload: Workload) -> int:
    workers = max(2, min(16, 2 * available_processors()))
    if workload.dataset.format == "parquet":  # each holds a row group in memory, twice
        group = workload.dataset.rows_per_group * workload.dataset.record_bytes.mean
        memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        workers = max(1, min(workers, int(memory / 4 / (2 * group))))
    return workers


def _run(work: _Work, workers: int, stop: threading.Event, name: str) -> int:
    written = 0
    progress = Progress(f"generating {name}", work.file_bytes * len(work.missing))
    pending: set[Future[int]] = set()
    files = iter(work.missing)
    with ThreadPoolExecutor(workers, "trunkline-generate") as pool:
        try:
            for file in files:
                pending.add(pool.submit(_make, work.source, file))
                if len(pending) < 2 * workers:
                    continue
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                written += _collect(done, progress, work.file_bytes)
            written += _collect(wait(pending).done, progress, work.file_bytes)
        except BaseException:
            stop.set()
            for each in pending:
                each.cancel()
            raise
        finally:
            progress.close()
    return written


def _collect(done: set[Future[int]], progress: Progress, file_bytes: int) -> int:
    written = 0
    for each in done:
        written += each.result()
        progress.add(file_bytes)
    return written


def _make(source: Source, file: DataFile) -> int:
    """Write a file under another name, and rename it once it is durable."""
    try:
        return _write_durably(source, file)
    except Error:
        raise
    except OSError as error:
        raise system_error(error, f"write {file.path}", str(file.path)) from error


def _write_durably(source: Source, file: DataFile) -> int:
    _make_directory(file.path.parent)
    opened: list[tuple[Path, IO[bytes]]] = []

    def create(suffix: str) -> IO[bytes]:
        path = file.path.with_name(file.path.name + suffix)
        opened.append((path, _create(path, held)))
        return opened[-1][1]

    with ExitStack() as held:
        out = create("")
        write_file(source, file, out, create)
        for _, each in opened:
            each.flush()
            os.fdatasync(each.fileno())
        written = out.tell()
        for path, _ in reversed(opened):  # the data file comes last: it says that all are there
            _publish(path, is_index=path != file.path)
    return written


def _create(path: Path, held: ExitStack) -> IO[bytes]:
    temporary = _temporary(path)
    temporary.unlink(missing_ok=True)  # of a run that was ended
    out = temporary.open("xb")
    held.callback(temporary.unlink, missing_ok=True)
    held.callback(out.close)
    return out


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}{_PARTIAL}")


def _publish(path: Path, is_index: bool) -> None:
    """Give the file its name, unless another one has it."""
    try:
        os.link(_temporary(path), path)  # fails where a rename would replace
    except FileExistsError:
        if is_index and path.stat().st_size == _temporary(path).stat().st_size:
            return  # of a run that ended before the data file had its name
        raise exception_of(
            "system", errno.EEXIST, f"{path} appeared meanwhile, and is not replaced", str(path)
        ) from None
    except OSError:  # no hard links here
        if path.exists():
            raise
        _temporary(path).rename(path)
