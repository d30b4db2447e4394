#!/usr/bin/env python3
"""The main job, on real input: a Llama-shaped model is loaded into torch tensors and saved again, as
safetensors and as torch.save does, through Trunkline and through what people use otherwise, each result
checked bit for bit, each timed beside fio on the same disk. Samples at random places of its files are read as
a training reads them. Then another model generates within half the memory that its weights take.

    make demo                                    about 1 GB in ./demo-output, less where there is little room
    make demo ARGS="--size 4GB --dir /mnt/nvme"  another size, another disk
    make demo ARGS=--json                        the numbers as JSON on standard output
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors.torch import load_file

import trunkline as tl

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import demo_report  # noqa: E402
import demo_samples  # noqa: E402
import demo_workload  # noqa: E402
import fio_peer  # noqa: E402
import larger_than_memory  # noqa: E402
import llama_shaped  # noqa: E402
import ways  # noqa: E402
from demo_report import Measured, wrapped  # noqa: E402
from sizes import parse_size  # noqa: E402

BLOCK_BYTES = 1 << 20
DEPTH = 32
FEWEST_RUNS = 3
GENERATING_BYTES = 600_000_000  # of the model that is larger than its memory


class Progress:
    """One line on a terminal that is written over; a line a step elsewhere."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._start = time.monotonic()

    def show(self, text: str) -> None:
        stamp = f"[{time.monotonic() - self._start:5.1f} s] {text}"
        sys.stderr.write(f"\r\x1b[2K{stamp}" if self._live else f"{stamp}\n")
        sys.stderr.flush()

    def end(self) -> None:
        if self._live:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()


def room_for(directory: Path) -> int:
    """1 GB, or what leaves disk and memory with room for it: the model lies on disk up to four times at
    once.
    """
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(10**9, shutil.disk_usage(directory).free // 6, pages // 6)


def forget(files: list[Path]) -> None:
    """Drops the files from the page cache, so that the next reader has to go to the disk."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def touch(tensors: ways.Tensors) -> None:
    """Reads one byte of each page: a loader that only maps its files has not loaded anything yet."""
    for tensor in tensors.values():
        tensor.view(torch.uint8).view(-1)[::4096].sum()


def check_equal(tensors: ways.Tensors, files: list[Path]) -> None:
    names = set(tensors)
    for path in files:
        for name, expected in load_file(path).items():
            names.discard(name)
            if not torch.equal(tensors[name].view(torch.uint8), expected.view(torch.uint8)):
                raise SystemExit(f"demo: {name} of {path} differs from what the safetensors library reads")
    if names:
        raise SystemExit(f"demo: tensors that no file has: {', '.join(sorted(names))}")


def check_same(got: ways.Tensors, expected: ways.Tensors, path: Path) -> None:
    for name, tensor in expected.items():
        if not torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8)):
            raise SystemExit(f"demo: {name} of {path} differs from what was saved")


@contextmanager
def timed(row: Measured, bytes_moved: int) -> Iterator[None]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    yield
    seconds = time.perf_counter() - start
    now = resource.getrusage(resource.RUSAGE_SELF)
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    row.gb_s.append(bytes_moved / seconds / 1e9)
    row.cpu_s_per_gb.append(cpu / bytes_moved * 1e9)


Step: TypeAlias = tuple[str, Callable[[], None]]  # what it is called, and to do it


def rotated(ways_to_go: list[Step], number: int) -> list[Step]:
    """Another one first each round: storage has caches that nothing here can drop; who comes last gains."""
    start = number % len(ways_to_go)
    return ways_to_go[start:] + ways_to_go[:start]


class Demo:
    def __init__(self, directory: Path, size_bytes: int, progress: Progress) -> None:
        self.progress = progress
        self.output = directory / "saved"
        self.output.mkdir(parents=True)
        self.files, self.about = llama_shaped.write(
            directory / "model",
            size_bytes,
            shards=4,
            progress=lambda share: progress.show(
                f"writing the model with the safetensors library: {share:.0%}"
            ),
        )
        self.bytes = sum(path.stat().st_size for path in self.files)
        try:
            self.fio_engine: str | None = fio_peer.best_engine()
        except fio_peer.FioError as error:
            self.fio_engine = None
            print(f"demo: {error}; going on without it", file=sys.stderr)
        self.images = ways.load_images(self.files)
        self.folder = directory / "model"
        self.pt = directory / "model.pt"
        progress.show("writing the model with torch.save")
        ways.save_torch(ways.load_safetensors(self.files), self.pt)
        self.checkpointer = tl.Checkpointer(directory / "steps", keep=1)
        shards, pt = self.files, [self.pt]
        self.loaders: list[tuple[Measured, list[Path], Callable[[], ways.Tensors]]] = [
            (
                Measured("load", "Trunkline: tl.load of the safetensors", "trunkline"),
                *(shards, lambda: ways.load_folder(self.folder)),
            ),
            (
                Measured("load", "safetensors.torch.load_file", "other"),
                *(shards, lambda: ways.load_safetensors(self.files)),
            ),
            (
                Measured("load", "Trunkline: tl.load of the .pt, verified", "trunkline"),
                *(pt, lambda: ways.load_pt(self.pt)),
            ),
            (Measured("load", "torch.load", "other"), pt, lambda: ways.load_torch(self.pt)),
            (
                Measured("load", "Trunkline: safetensors read again in place", "trunkline"),
                *(shards, lambda: ways.reload(self.images, self.files)),
            ),
            (
                Measured("load", "plain Python: readinto", "other"),
                *(shards, lambda: ways.load_python(self.files)),
            ),
        ]
        self.saves = [
            Measured("save", "Trunkline: tl.save to .safetensors", "trunkline"),
            Measured("save", "safetensors.torch.save_file + fsync", "other"),
            Measured("save", "Trunkline: tl.save to .pt", "trunkline"),
            Measured("save", "torch.save + fsync", "other"),
            Measured("save", "Trunkline: Checkpointer.save", "trunkline"),
            Measured("save", "plain Python: write + fsync", "other"),
        ]
        settings = f"1 MiB blocks, depth {DEPTH}"  # facts() has the rest
        self.fio_load = Measured("load", f"fio read: {settings}", "fio")
        self.fio_save = Measured("save", f"fio write: {settings}, fsync", "fio")

    def rows(self) -> list[Measured]:
        return [*(row for row, _, _ in self.loaders), self.fio_load, *self.saves, self.fio_save]

    def load_round(self, number: int) -> None:
        if number == 1:  # the round whose results are checked: loading again must have something to show
            for image in self.images:
                image.memory.zero_()
        ways_to_load: list[Step] = [
            (row.name, partial(self.load_once, row, files, load, number)) for row, files, load in self.loaders
        ]
        if self.fio_engine:
            ways_to_load.append(("fio", partial(self.add_fio, self.fio_load, self.files, "read", None)))
        for name, once in rotated(ways_to_load, number):
            self.progress.show(f"round {number}: load, {name}")
            once()

    def load_once(
        self, row: Measured, files: list[Path], load: Callable[[], ways.Tensors], number: int
    ) -> None:
        forget(files)
        with timed(row, self.bytes):
            tensors = load()
            touch(tensors)
        if number == 1:
            check_equal(tensors, self.files)

    def save_round(self, number: int) -> None:
        images = self.images  # as the last reload left them
        tensors = {entry.name: ways.view(i.memory, entry).clone() for i in images for entry in i.entries}
        pt, safetensors = self.output / "saved.pt", self.output / "saved.safetensors"
        savers: list[Callable[[], None]] = [
            lambda: ways.save(tensors, safetensors),
            lambda: ways.save_safetensors(tensors, safetensors),
            lambda: ways.save(tensors, pt),
            lambda: ways.save_torch(tensors, pt),
            lambda: ways.save_checkpoint(tensors, self.checkpointer, number),
            lambda: ways.save_python(images, self.output),
        ]

        def save_once(row: Measured, save: Callable[[], None]) -> None:
            with timed(row, self.bytes):
                save()
            if number == 1:
                self.check_saved(tensors)

        written = [self.output / path.name for path in self.files]
        each = max(self.bytes // len(self.files) // BLOCK_BYTES, 1) * BLOCK_BYTES
        ways_to_save: list[Step] = [
            (row.name, partial(save_once, row, save)) for row, save in zip(self.saves, savers, strict=True)
        ]
        if self.fio_engine:
            ways_to_save.append(("fio", partial(self.add_fio, self.fio_save, written, "write", each)))
        for name, once in rotated(ways_to_save, number):
            self.progress.show(f"round {number}: save, {name}")
            self.clear_output()
            once()
        self.clear_output()

    def check_saved(self, tensors: ways.Tensors) -> None:
        """What lies there now, read by the stock libraries; the checkpoint by its own reader."""
        for path in self.output.iterdir():
            got = ways.load_torch(path) if path.suffix == ".pt" else load_file(path)
            check_same(got, {name: tensors[name] for name in got}, path)
        saved = [path for path in self.output.iterdir() if path.suffix in (".pt", ".safetensors")]
        if not saved:
            check_same(self.checkpointer.load(), tensors, self.checkpointer.directory)

    def add_fio(self, row: Measured, files: list[Path], rw: str, file_bytes: int | None) -> None:
        assert self.fio_engine
        run = fio_peer.run(
            *(files, rw),
            block_bytes=BLOCK_BYTES,
            depth=DEPTH,
            engine=self.fio_engine,
            file_bytes=file_bytes,
            file_service_type="sequential",
        )
        row.gb_s.append(run.bytes_per_second / 1e9)
        row.cpu_s_per_gb.append(run.cpu_seconds_per_gb)

    def clear_output(self) -> None:
        """New files each time, and what the last ones left to write is written before the next are timed."""
        for path in self.output.iterdir():
            path.unlink()
        os.sync()

    def facts(self, runs: int) -> dict[str, str]:
        way = tl.default_engine().explain(self.files[0])
        direct = "direct" if way["direct"] else "buffered"
        return {
            "Disk": f"{way['device']} ({way['filesystem']})" if "filesystem" in way else str(way["device"]),
            "Trunkline": f"backend {way['backend']}, {direct} I/O: {way['why']}",
            "Loads": "Cold: fsync and posix_fadvise(DONTNEED) on every file before each; all of a loader's "
            "work counts, parsing and (but in place) new memory too; one byte of every page is touched.",
            "Saves": "New files, each made durable with fsync within the time.",
            "Runs": f"{runs} rounds, in each every way once, another first each time; medians. "
            f"fio {self.fio_engine}, {BLOCK_BYTES >> 20} MiB blocks, depth {DEPTH}, direct; "
            "it allocates no model-sized memory.",
            "Machine": f"{os.cpu_count()} CPUs, Linux {platform.release()}, torch {torch.__version__}",
        }


def measure(demo: Demo, runs: int, seconds: float) -> int:
    """Rounds done: as many as `runs`, fewer (but FEWEST_RUNS) once `seconds` are over."""
    start = time.monotonic()
    for number in range(1, runs + 1):
        demo.load_round(number)
        demo.save_round(number)
        spent = time.monotonic() - start
        if number >= FEWEST_RUNS and spent + spent / number > seconds:
            return number
    return runs


NEXT = """next:
  .venv/bin/trunkline doctor {directory}
      what this disk and this machine can do, and what to change
  .venv/bin/trunkline bench {directory} --compare fio
      the disk itself, beside fio
  make demo ARGS="--size 4GB --dir /mnt/your-nvme"
      this demo on another disk
  docs/getting-started.md, docs/models.md
      the same in your own code"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Load and save a Llama-shaped model, checked and timed.")
    parser.add_argument(
        "--size", type=parse_size, help="bytes of weights (default: 1GB, less where there is no room)"
    )
    parser.add_argument(
        "--dir", type=Path, default=Path("demo-output"), help="where (default: ./demo-output)"
    )
    parser.add_argument("--runs", type=int, default=5, help="rounds (default: 5)")
    parser.add_argument(
        "--seconds", type=float, default=60, help="begin no further round after this (but do 3)"
    )
    parser.add_argument("--keep", action="store_true", help="leave the model files")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()
    if options.runs < 1:
        parser.error("--runs must be at least 1")
    return options


def main() -> int:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was written is removed
    options.dir.mkdir(parents=True, exist_ok=True)
    scratch = options.dir / f"run-{os.getpid()}"
    progress = Progress()
    try:
        demo = Demo(scratch, options.size or room_for(options.dir), progress)
        rounds = measure(demo, options.runs, options.seconds)
        progress.show("samples at random places")
        samples = demo_samples.measure(demo.files, forget)
        generation = larger_than_memory.measure(
            scratch, min(demo.bytes, GENERATING_BYTES), lambda text: progress.show(f"generate: {text}")
        )
        progress.show("emulated training job")
        job = demo_workload.measure(scratch / "workload", options.dir / "workload.html", forget)
        progress.end()
        report = options.dir / "report.html"
        facts = demo.facts(rounds)
        demo_report.write_page(
            *(report, demo.rows(), demo.about, facts), larger_than_memory.table(generation)
        )
        if options.json:
            everything = {
                "model": demo.about,
                "facts": facts,
                "results": demo_report.as_json(demo.rows()),
                "samples": samples,
                "generation": generation,
                "workload": job,
                "report": str(report),
            }
            print(json.dumps(everything, indent=1))
            return 0
        print("\n" + wrapped(f"{demo.about}\n{facts['Disk']}; {facts['Trunkline']}"))
        print(f"\n{demo_report.table(demo.rows())}\n")
        print("checked: all tensors bit for bit against the safetensors library and torch, both ways")
        print("loads are cold (page cache dropped for the files), saves are durable (fsync)\n")
        print(wrapped(f"{demo_samples.line(samples)}\n"))
        print(wrapped(f"{larger_than_memory.table(generation)}\n"))
        print(wrapped(f"{demo_workload.line(job)}\n"))
        reports = ", ".join(filter(None, [str(report), job.get("report")]))
        print(f"{wrapped(f'reports: {reports}')}\n\n{NEXT.format(directory=options.dir)}")
        return 0
    except KeyboardInterrupt:
        progress.end()
        print("demo: interrupted", file=sys.stderr)
        return 130
    finally:
        if not options.keep:
            shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
