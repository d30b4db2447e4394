"""Reads and overwrites without a limit on one disk, beside the best of several fio configurations."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from measurement import Comparison, interleave
from workbench import MIB, Workbench

import trunkline as tl

PASSES = 4  # over the file, so that a run takes a good part of a second at several GB/s
FIO: dict[str, dict[str, str | int]] = {
    "fio io_uring": {"engine": "io_uring"},
    "fio io_uring fixed": {"engine": "io_uring", "fixedbufs": 1, "registerfiles": 1},
    "fio io_uring fixed, 2 jobs": {
        "engine": "io_uring",
        "fixedbufs": 1,
        "registerfiles": 1,
        "jobs": 2,
        "depth": 16,
    },
    "fio libaio, 2 jobs": {"engine": "libaio", "jobs": 2, "depth": 16},
}


def measure(bench: Workbench) -> list[Comparison]:
    path = bench.first / "unthrottled"
    fio_file = bench.first / "fio"
    limit, bench.limit_mb_s = bench.limit_mb_s, 0
    bench.disks.limit(0)
    bench.fill(lambda mode: tl.open(path, mode))
    rows = []
    for rw in ("read", "overwrite"):

        def ours(rw: str = rw) -> float:
            return bench.transfer(rw, lambda mode: tl.open(path, mode), bench.pinned, PASSES)[0]

        def fio(settings: dict[str, str | int], rw: str = rw) -> Callable[[], float]:
            options: dict[str, str | int] = {"loops": PASSES}
            if jobs := settings.get("jobs"):  # each its own part of the file
                part = bench.bytes // int(jobs) // MIB * MIB
                options |= {"size": part, "offset_increment": part}
            return lambda: bench.fio([fio_file], rw, **(settings | options))[0]

        ways: dict[str, Callable[[], float]] = {"page-aligned memory": ours}
        ways |= {
            name: fio(settings)
            for name, settings in FIO.items()
            if bench.fio_engine in ("io_uring", settings["engine"])
        }
        got = interleave(bench.rounds, ways, f"unthrottled, {rw}")
        mine = got.pop("page-aligned memory")
        best = max(got, key=lambda name: median(got[name]))
        rows.append(
            Comparison(
                "unthrottled",
                f"{rw}, page-aligned memory",
                "GB/s",
                f"best: {best}",
                mine,
                got[best],
                at_least=0.9,
            )
        )
    path.unlink()
    fio_file.unlink()
    bench.limit_mb_s = limit
    return rows
