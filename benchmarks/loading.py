"""A model's weights loaded from cold files, verified: from .pt, .safetensors and a directory of checkpoints,
beside fio's read of as many bytes, and beside torch.load (with and without mmap, every page touched) and
safetensors. What was loaded is compared each time.

A virtual machine whose hypervisor takes free memory back pays up to 2.5 s/GB for memory that it uses again,
and when that happens is chance. So before each measurement as much as a load needs is touched and given back,
for all ways alike.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import model_state
import safetensors.torch
import torch
from measurement import Comparison, interleave, spent
from workbench import Workbench, rates

import trunkline as tl

Load = Callable[[], dict[str, torch.Tensor]]
MOST_CPU = 0.15  # seconds per GB, verification included


def measure(bench: Workbench) -> list[Comparison]:
    bench.free_transfer_memory()
    rows = one_disk(bench)
    if len(bench.disks.directories) > 1:
        rows += several_disks(bench)
    return rows


def forget(files: list[Path]) -> None:
    """Drop the files from the page cache."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def warm_memory(nbytes: int) -> None:
    with mmap.mmap(-1, nbytes) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(23)  # MADV_POPULATE_WRITE


class Timed:
    """Ways to load, each timed for speed (its result) and processor time (cpu, by name), and checked."""

    def __init__(self, bench: Workbench) -> None:
        self.bench = bench
        self.bytes = model_state.total_bytes(bench.state)
        self.cpu: dict[str, list[float]] = {}

    def __call__(self, name: str, load: Load, files: list[Path]) -> Callable[[], float]:
        def run() -> float:
            forget(files)
            self.bench.disks.rest()
            warm_memory(self.bytes * 5 // 4)
            with spent() as time:
                loaded = load()
            gb_s, cpu = rates(self.bytes, time.seconds, time.cpu_seconds)
            self.cpu.setdefault(name, []).append(cpu)
            if not model_state.same(loaded, self.bench.state):
                raise SystemExit(f"bench: what {name} loaded differs from the state")
            return gb_s

        return run

    def cpu_of(self, name: str) -> list[float]:
        return self.cpu[name][1:]  # the first was the warming up


def touched(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A mapped file is read when its pages are touched."""
    for tensor in state.values():
        tensor.view(torch.uint8).reshape(-1)[::4096].sum()
    return state


def one_disk(bench: Workbench) -> list[Comparison]:
    directory, timed = bench.first, Timed(bench)
    pt, st = directory / "m.pt", directory / "m.safetensors"
    checkpointer = tl.Checkpointer(directory / "steps", keep=1)
    with bench.without_limit():
        tl.save(bench.state, pt)
        tl.save(bench.state, st)
        checkpointer.save(1, bench.state, block=True)
    shards = list((directory / "steps").rglob("*.safetensors"))

    def fio() -> float:
        return bench.fio([directory / "fio"], "read")[0]

    ways = {
        ".pt": timed(".pt", lambda: tl.load(pt), [pt]),
        "torch.load": timed("torch.load", lambda: torch.load(pt, weights_only=True), [pt]),
        "torch.load, mmap": timed(
            "torch.load, mmap", lambda: touched(torch.load(pt, weights_only=True, mmap=True)), [pt]
        ),
        ".safetensors": timed(".safetensors", lambda: tl.load(st), [st]),
        "safetensors": timed("safetensors", lambda: touched(safetensors.torch.load_file(st)), [st]),
        "Checkpointer": timed("Checkpointer", checkpointer.load, shards),
        "fio": fio,
    }
    got = interleave(bench.rounds, ways, "loading, one disk")
    for path in (pt, st, directory / "fio"):
        path.unlink()
    shutil.rmtree(directory / "steps")
    pairs = {
        ".pt": ("fio", "torch.load", "torch.load, mmap"),
        ".safetensors": ("fio", "safetensors"),
        "Checkpointer": ("fio",),
    }
    rows = [
        Comparison(
            *("loading", f"one disk, {ours}", "GB/s", peer, got[ours], got[peer]),
            at_least=0.97 if peer == "fio" else None,
        )
        for ours, peers in pairs.items()
        for peer in peers
    ]
    rows += [
        Comparison(
            *("loading: processor time", f"one disk, {ours}", "CPU s/GB", peers[1]),
            *(timed.cpu_of(ours), timed.cpu_of(peers[1])),
            compared="ours",
            at_most=MOST_CPU,
        )
        for ours, peers in {**pairs, "Checkpointer": ("fio", "torch.load")}.items()
    ]
    return rows


def several_disks(bench: Workbench) -> list[Comparison]:
    directories, timed = bench.disks.directories, Timed(bench)
    volumes = [directory / "steps" for directory in directories]
    for volume in volumes:
        volume.mkdir()
    checkpointer = tl.Checkpointer(directories[0] / "run", keep=1, volumes=volumes)
    with bench.without_limit():
        checkpointer.save(1, bench.state, block=True)
    shards = [shard for volume in volumes for shard in volume.rglob("*.safetensors")]
    files = [directory / "fio" for directory in directories]
    ways = {
        "Checkpointer": timed("Checkpointer", checkpointer.load, shards),
        "fio": lambda: bench.fio(files, "read")[0],
    }
    got = interleave(bench.rounds, ways, f"loading, {len(files)} disks")
    for path in (*files, directories[0] / "run", *volumes):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    peer = f"fio on {len(files)} files"
    return [
        Comparison(
            *("loading", f"{len(files)} disks, Checkpointer", "GB/s", peer, got["Checkpointer"], got["fio"]),
            at_least=0.95,
        )
    ]
