"""Batches of samples at random places (tl.data.Loader): images of 114,660 bytes, 400 in a batch, on one disk
and on a Volume of several, and windows of 4 KiB of a file of tokens; beside fio randread, and beside what
training scripts use: torch's DataLoader, numpy.memmap, and webdataset and mosaicml-streaming where they are
installed.

All are measured from their begin, without the start of worker processes. Of every batch the first and the
last sample are compared with what was written.
"""

from __future__ import annotations

import importlib.util
import io
import shutil
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import fio_peer
import numpy as np
import torch
from measurement import Comparison, interleave, spent
from page_cache import make_cold
from torch.utils.data import DataLoader, Dataset
from workbench import Workbench

import trunkline as tl

IMAGE_BYTES = 114_660
FIO_IMAGE_BYTES = 112 << 10  # direct I/O of fio requires whole blocks
IMAGES = 400  # in a batch
IMAGE_BATCHES = 40
TOKEN_BYTES = 4096
WINDOWS = 1024  # in a batch
WINDOW_BATCHES = 100
PREFETCH = 4
DEPTH = 32
WORKERS = (0, 2, 4)

Rates: TypeAlias = "dict[str, list[float]]"


class Records(Dataset[torch.Tensor]):
    """As trainings read records: a file that is mapped, or pread."""

    def __init__(self, path: Path, record_bytes: int, *, mapped: bool) -> None:
        self.path = path
        self.record_bytes = record_bytes
        self.mapped = mapped
        self.opened: Any = None

    def __len__(self) -> int:
        return self.path.stat().st_size // self.record_bytes

    def __getitem__(self, sample: int) -> torch.Tensor:
        at = sample * self.record_bytes
        if self.opened is None:
            self.opened = np.memmap(self.path, np.uint8, "r") if self.mapped else self.path.open("rb", 0)
        if self.mapped:
            return torch.from_numpy(np.array(self.opened[at : at + self.record_bytes]))
        self.opened.seek(at)
        data = bytearray(self.record_bytes)
        self.opened.readinto(data)
        return torch.frombuffer(data, dtype=torch.uint8)


def measure(bench: Workbench) -> list[Comparison]:
    rows = images(bench)
    with bench.without_limit():
        rows += images_without_limit(bench)
        rows += tokens(bench)
    return rows


def _write(bench: Workbench, path: Path) -> None:
    with bench.without_limit(), tl.open(path, "w") as file:
        file.pwrite(bench.source)
        file.sync()


def _rate(
    batches: Iterator[Any], count: int, samples: int, check: Callable[[Any], None]
) -> tuple[float, float]:
    """Samples a second, and processor time for each, of `count` batches of `samples`."""
    with spent() as time:
        for _ in range(count):
            check(next(batches))
    return samples * count / time.seconds, time.cpu_seconds / samples / count


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def _ours(
    bench: Workbench, index: tl.data.Index, record_bytes: int, samples: int, batches: int
) -> tuple[float, float]:
    source = bench.source.numpy()

    def check(batch: tl.data.Batch) -> None:
        for place in (0, -1):
            at = int(batch.indices[place]) * record_bytes
            offset = int(batch.offsets[place])
            if not np.array_equal(
                batch.memory[offset : offset + record_bytes], source[at : at + record_bytes]
            ):
                raise SystemExit("samples: a batch has other bytes than were written")

    with tl.data.Loader(index, samples, prefetch=PREFETCH, drop_last=True) as loader:
        bench.disks.rest()
        return _rate(_endless(loader), batches, samples, check)


def _fio(bench: Workbench, files: list[Path], block_bytes: int, depth: int, total: int) -> fio_peer.FioRun:
    bench.disks.rest()
    return fio_peer.run(
        *(files, "randread"),
        block_bytes=block_bytes,
        depth=depth,
        engine=bench.fio_engine,
        total_bytes=total,
        randrepeat=0,
        norandommap=1,
    )


def _images_of(path: Path) -> tl.data.Index:
    return tl.data.index(path, format="records", record_bytes=IMAGE_BYTES, stride_bytes=IMAGE_BYTES)


def images(bench: Workbench) -> list[Comparison]:
    """Under the limit: one disk, then a Volume of all of them."""
    rows = []
    total = IMAGE_BYTES * IMAGES * IMAGE_BATCHES
    path = bench.first / "samples"
    _write(bench, path)
    got = interleave(
        bench.rounds,
        {
            "ours": lambda: (
                _ours(bench, _images_of(path), IMAGE_BYTES, IMAGES, IMAGE_BATCHES)[0] * IMAGE_BYTES / 1e9
            ),
            "fio": lambda: _fio(bench, [path], FIO_IMAGE_BYTES, IMAGES, total).bytes_per_second / 1e9,
        },
        "samples, one disk",
    )
    case = f"{IMAGES} x 114,660 bytes, one disk"
    rows.append(
        Comparison(
            "samples", case, "GB/s", f"fio randread, depth {IMAGES}", got["ours"], got["fio"], at_least=0.97
        )
    )
    path.unlink()
    directories = bench.disks.directories
    if len(directories) == 1:
        return rows
    volume = tl.Volume(directories)
    with bench.without_limit(), volume.open("samples", "w") as file:
        file.pwrite(bench.source)
        file.sync()
    files = [directory / "fio" for directory in directories]
    with bench.without_limit():
        bench.fio(files, "write")
    index = tl.data.index(
        "samples", volume=volume, format="records", record_bytes=IMAGE_BYTES, stride_bytes=IMAGE_BYTES
    )
    got = interleave(
        bench.rounds,
        {
            "ours": lambda: _ours(bench, index, IMAGE_BYTES, IMAGES, IMAGE_BATCHES)[0] * IMAGE_BYTES / 1e9,
            "fio": lambda: _fio(bench, files, FIO_IMAGE_BYTES, IMAGES, total).bytes_per_second / 1e9,
        },
        f"samples, {len(directories)} disks",
    )
    case = f"{IMAGES} x 114,660 bytes, Volume of {len(directories)}"
    peer = f"fio randread on {len(directories)} files, depth {IMAGES}"
    rows.append(Comparison("samples", case, "GB/s", peer, got["ours"], got["fio"], at_least=0.97))
    volume.remove("samples")
    for file_of_fio in files:
        file_of_fio.unlink()
    return rows


def images_without_limit(bench: Workbench) -> list[Comparison]:
    path = bench.first / "samples"
    _write(bench, path)
    archive = bench.first / "samples.tar"
    shards = bench.first / "samples.mds"
    has_webdataset = importlib.util.find_spec("webdataset") is not None
    has_streaming = importlib.util.find_spec("streaming") is not None
    if has_webdataset:
        _write_archive(bench, archive)
    if has_streaming:
        _write_shards(bench, shards)
    total = IMAGE_BYTES * IMAGES * IMAGE_BATCHES
    cpu: Rates = {"ours": [], "fio": []}

    def ours() -> float:
        rate, seconds = _ours(bench, _images_of(path), IMAGE_BYTES, IMAGES, IMAGE_BATCHES)
        cpu["ours"].append(seconds / IMAGE_BYTES * 1e9)
        return rate * IMAGE_BYTES / 1e9

    def fio(depth: int) -> float:
        run = _fio(bench, [path], FIO_IMAGE_BYTES, depth, total)
        if depth == IMAGES:
            cpu["fio"].append(run.cpu_seconds_per_gb)
        return run.bytes_per_second / 1e9

    ways: dict[str, Callable[[], float]] = {"ours": ours, "fio": lambda: fio(IMAGES)}
    for workers in WORKERS:
        ways[f"torch {workers}"] = lambda workers=workers: _torch(  # type: ignore[misc]
            bench, Records(path, IMAGE_BYTES, mapped=False), IMAGES, IMAGE_BATCHES, workers
        )
    if has_webdataset:
        ways["webdataset"] = lambda: _webdataset(archive)
    for workers in WORKERS if has_streaming else ():
        ways[f"streaming {workers}"] = lambda workers=workers: _streaming(shards, workers)  # type: ignore[misc]
    got = interleave(bench.rounds, ways, "samples, no limit")
    for each in (path, archive):
        each.unlink(missing_ok=True)
    shutil.rmtree(shards, ignore_errors=True)
    best = _best(got, "torch")
    case = f"{IMAGES} x 114,660 bytes, no limit"
    rows = [
        Comparison(
            "samples", case, "GB/s", f"fio randread, depth {IMAGES}", got["ours"], got["fio"], at_least=0.95
        ),
        Comparison(
            "samples",
            case,
            "GB/s",
            f"torch DataLoader, {best} workers, the best of 0, 2, 4",
            got["ours"],
            got[f"torch {best}"],
            at_least=1,
        ),
    ]
    if has_streaming:
        best = _best(got, "streaming")
        peer = f"mosaicml-streaming in a DataLoader, {best} workers, the best of 0, 2, 4"
        rows.append(
            Comparison("samples", case, "GB/s", peer, got["ours"], got[f"streaming {best}"], at_least=1)
        )
    if has_webdataset:
        rows.append(
            Comparison(
                "samples",
                case,
                "GB/s",
                "webdataset, shuffle buffer of 1000",
                got["ours"],
                got["webdataset"],
                at_least=1,
            )
        )
    # Without the round that warms up.
    rows.append(
        Comparison(
            "samples",
            f"{case}, CPU s/GB",
            "CPU s/GB",
            f"fio randread, depth {IMAGES}",
            cpu["ours"][1:],
            cpu["fio"][1:],
            at_most=1.3,
        )
    )
    return rows


def tokens(bench: Workbench) -> list[Comparison]:
    path = bench.first / "tokens"
    _write(bench, path)
    index = tl.data.index(path, format="records", record_bytes=TOKEN_BYTES, stride_bytes=TOKEN_BYTES)
    total = TOKEN_BYTES * WINDOWS * WINDOW_BATCHES

    def fio(depth: int) -> Callable[[], float]:
        return lambda: _fio(bench, [path], TOKEN_BYTES, depth, total).bytes_per_second / TOKEN_BYTES / 1e3

    ways: dict[str, Callable[[], float]] = {
        "ours": lambda: _ours(bench, index, TOKEN_BYTES, WINDOWS, WINDOW_BATCHES)[0] / 1e3,
        "fio": fio(DEPTH),
        "fio deep": fio(WINDOWS),
        "memmap": lambda: _memmap(bench, path),
    }
    for workers in WORKERS:
        ways[f"torch {workers}"] = lambda workers=workers: (
            _torch(  # type: ignore[misc]
                bench, Records(path, TOKEN_BYTES, mapped=True), WINDOWS, WINDOW_BATCHES, workers
            )
            * 1e9
            / TOKEN_BYTES
            / 1e3
        )
    got = interleave(bench.rounds, ways, "samples, tokens")
    path.unlink()
    best = _best(got, "torch")
    case = f"{WINDOWS} windows of 4 KiB, no limit, 1000/s"

    def row(peer: str, name: str, at_least: float | None) -> Comparison:
        return Comparison("samples", case, "1000/s", peer, got["ours"], got[name], at_least=at_least)

    return [
        row(f"fio randread, depth {DEPTH}", "fio", 0.95),
        row(f"fio randread, depth {WINDOWS}", "fio deep", None),
        row("numpy.memmap, nothing cached", "memmap", 1),
        row(f"torch DataLoader, {best} workers, nothing cached, the best of 0, 2, 4", f"torch {best}", 20),
    ]


def _best(got: Rates, peer: str) -> int:
    """Return the number of workers with which a peer was fastest, by the median."""
    return max(WORKERS, key=lambda workers: median(got[f"{peer} {workers}"]))


def _torch(bench: Workbench, data: Records, samples: int, batches: int, workers: int) -> float:
    """GB/s of DataLoader, from files that are not cached."""
    loader = DataLoader(
        data, samples, shuffle=True, num_workers=workers, drop_last=True, persistent_workers=workers > 0
    )
    next(iter(loader))  # starts its workers
    make_cold([data.path])
    rate, _ = _rate(_endless(loader), batches, samples, lambda batch: None)
    return rate * data.record_bytes / 1e9


def _memmap(bench: Workbench, path: Path) -> float:
    """1000 windows a second: the loop of many language models, nothing cached."""
    make_cold([path])
    source = bench.source.numpy()
    data = np.memmap(path, np.uint16, "r")
    items = TOKEN_BYTES // data.itemsize
    random = np.random.default_rng(5)

    def batches() -> Iterator[Any]:
        while True:
            starts = random.integers(0, len(data) // items, WINDOWS) * items
            yield starts, np.stack([data[start : start + items] for start in starts])

    def check(batch: Any) -> None:
        starts, windows = batch
        at = int(starts[0]) * data.itemsize
        if not np.array_equal(windows[0].view(np.uint8), source[at : at + TOKEN_BYTES]):
            raise SystemExit("samples: numpy.memmap has other bytes than were written")

    return _rate(batches(), WINDOW_BATCHES, WINDOWS, check)[0] / 1e3


def _write_archive(bench: Workbench, path: Path) -> None:
    source = bench.source.numpy()
    with bench.without_limit(), tarfile.open(path, "w") as archive:
        for sample in range(bench.bytes // IMAGE_BYTES):
            member = tarfile.TarInfo(f"{sample:08d}.img")
            member.size = IMAGE_BYTES
            archive.addfile(
                member, io.BytesIO(source[sample * IMAGE_BYTES : (sample + 1) * IMAGE_BYTES].tobytes())
            )


def _webdataset(archive: Path) -> float:
    """GB/s of its usual pipeline, which reads in sequence and shuffles in a buffer, nothing cached."""
    import webdataset

    make_cold([archive])
    data = webdataset.WebDataset(str(archive), shardshuffle=False).shuffle(1000).batched(IMAGES)
    rate, _ = _rate(_endless(data), IMAGE_BATCHES, IMAGES, lambda batch: None)
    return rate * IMAGE_BYTES / 1e9


def _write_shards(bench: Workbench, directory: Path) -> None:
    from streaming import MDSWriter

    source = bench.source.numpy()
    with bench.without_limit(), MDSWriter(out=str(directory), columns={"image": "bytes"}, hashes=[]) as out:
        for at in range(0, bench.bytes // IMAGE_BYTES * IMAGE_BYTES, IMAGE_BYTES):
            out.write({"image": source[at : at + IMAGE_BYTES].tobytes()})


def _streaming(directory: Path, workers: int) -> float:
    """GB/s of its shuffled reading of local shards, which are not cached at first."""
    from streaming import StreamingDataset

    data = StreamingDataset(local=str(directory), shuffle=True, batch_size=IMAGES)
    loader = DataLoader(
        data, IMAGES, num_workers=workers, drop_last=True, persistent_workers=workers > 0, collate_fn=list
    )
    next(iter(loader))  # starts its workers
    make_cold([directory])
    rate, _ = _rate(_endless(loader), IMAGE_BATCHES, IMAGES, lambda batch: None)
    return rate * IMAGE_BYTES / 1e9
