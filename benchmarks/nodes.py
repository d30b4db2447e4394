"""Checkpoints on the disks of several nodes: one rank for each disk, which it alone uses, as with local=True.

A state that is the same on all ranks is saved by all of them together, once and with copies=2, and loaded,
beside the limit of all disks, fio on as many files, and torch.distributed.checkpoint to a directory that all
ranks share, on one disk. Loading also sends every rank what the others have read: "send" is the process
group's own speed for that. What was loaded is compared.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import model_state
from measurement import Comparison, interleave
from workbench import Workbench

LIMIT_MB_S = 500  # of each disk: all ranks share the processors of this machine


class Ranks:
    """Processes of node_rank.py, one for each directory."""

    def __init__(self, directories: Sequence[Path], nbytes: int) -> None:
        size = len(directories)
        self._store = tempfile.TemporaryDirectory()
        program = Path(__file__).with_name("node_rank.py")
        store = f"{self._store.name}/store"
        shared = directories[0] / "shared"
        self._ranks = [
            subprocess.Popen(
                list(
                    map(str, (sys.executable, program, rank, size, store, directory / "node", shared, nbytes))
                ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, directory in enumerate(directories)
        ]

    def do(self, way: str) -> tuple[float, list[str]]:
        """Let all ranks do one of the ways; return the seconds of the slowest, and what each returned."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{way}\n")
            rank.stdin.flush()
        seconds, results = [], []
        for number, rank in enumerate(self._ranks):
            assert rank.stdout is not None
            line = rank.stdout.readline().split()
            if not line:
                raise SystemExit(f"bench: rank {number} has failed to {way}")
            seconds.append(float(line[0]))
            results.append(line[1])
        return max(seconds), results

    def end(self) -> None:
        if any(rank.poll() is not None for rank in self._ranks):  # the others would wait for it
            for rank in self._ranks:
                rank.kill()
        for rank in self._ranks:
            rank.communicate()
        self._store.cleanup()


@contextmanager
def limited_to(bench: Workbench, mb_s: int) -> Iterator[None]:
    before = bench.limit_mb_s
    bench.limit_mb_s = min(before, mb_s)
    bench.disks.limit(bench.limit_mb_s)
    try:
        yield
    finally:
        bench.limit_mb_s = before
        bench.disks.limit(before)


def measure(bench: Workbench) -> list[Comparison]:
    bench.free_transfer_memory()
    nbytes = bench.bytes // 2  # each rank has the state three times
    total = model_state.total_bytes(model_state.make(nbytes))
    directories = bench.disks.directories
    count = len(directories)
    files = [directory / "fio" for directory in directories]
    ranks = Ranks(directories, nbytes)

    def timed(way: str) -> float:
        bench.disks.rest()
        return total / ranks.do(way)[0] / 1e9

    def dcp() -> float:
        speed = timed("DCP")
        ranks.do("remove")
        return speed

    ways = {
        "save": lambda: timed("save"),
        "save, copies=2": lambda: timed("save, copies=2"),
        "load": lambda: timed("load"),
        "send": lambda: timed("send"),
        "DCP": dcp,
        "fio": lambda: bench.fio(files, "write")[0],
    }
    try:
        with limited_to(bench, LIMIT_MB_S):
            got = interleave(bench.rounds, ways, f"checkpoints, {count} nodes")
            limit = [bench.limit_mb_s * count / 1e3] * bench.rounds
        if ranks.do("check")[1] != ["True"] * count:
            raise SystemExit("bench: what the nodes have loaded differs from the state")
    finally:
        ranks.end()
        for path in (*files, *(directory / "node" for directory in directories)):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def row(way: str, peer: str, theirs: list[float], goal: float | None) -> Comparison:
        return Comparison("nodes", f"{count} nodes, {way}", "GB/s", peer, got[way], theirs, at_least=goal)

    half = [speed / 2 for speed in limit]
    rows = [row("save", "fio", got["fio"], None), row("save", "DCP, shared directory", got["DCP"], None)]
    if limit[0]:
        rows += [
            row("save", "the limit", limit, 0.95),
            row("save, copies=2", "half of the limit", half, 0.95),
            row("load", "the limit", limit, 0.9),
        ]
    return [*rows, row("load", "send", got["send"], None)]
