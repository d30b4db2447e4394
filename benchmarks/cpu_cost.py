"""Processor time per GB at 1 MiB blocks and queue depth 32 on one disk: page-aligned and ordinary memory,
beside fio's io_uring with the same options and DeepSpeed's aio handle where that is installed.
"""

from __future__ import annotations

from collections.abc import Callable

from deepspeed_peer import DeepSpeedAio, why_not_deepspeed
from measurement import Comparison, interleave
from workbench import DEPTH, MIB, Mode, Workbench

import trunkline as tl


def measure(bench: Workbench) -> list[Comparison]:
    # io_uring by name: the comparison is one of the same kernel interface.
    try:
        engine = tl.Engine(backend="io_uring", lanes=1, queue_depth=DEPTH, block_bytes=MIB)
    except tl.Unsupported as error:
        return [Comparison("cpu", "io_uring", "CPU s/GB", "fio io_uring", [], [], why_not=str(error))]
    path = bench.first / "cpu"
    fio_file = bench.first / "fio"
    why_not = why_not_deepspeed()
    deepspeed = None if why_not else DeepSpeedAio(bench, bench.first / "deepspeed")
    rows = []
    with engine:
        bench.fill(lambda mode: tl.open(path, mode, engine=engine))
        for rw in ("read", "overwrite", "write"):

            def ours(memory: str, rw: str = rw) -> Callable[[], float]:
                tensor = bench.pinned if memory == "pinned" else bench.ordinary

                def open_file(mode: Mode) -> tl.File:
                    return tl.open(path, mode, engine=engine)

                return lambda: bench.transfer(rw, open_file, tensor)[1]

            ways: dict[str, Callable[[], float]] = {
                "page-aligned": ours("pinned"),
                "ordinary": ours("ordinary"),
                "fio": lambda rw=rw: bench.fio([fio_file], rw, engine="io_uring")[1],  # type: ignore[misc]
            }
            if deepspeed and rw != "overwrite":
                ways["DeepSpeed"] = deepspeed.read if rw == "read" else deepspeed.write
            got = interleave(bench.rounds, ways, f"cpu, {rw}")
            rows += compare(rw, got, why_not)
    for file in (path, fio_file):
        file.unlink()
    if deepspeed:
        deepspeed.remove()
    return rows


def compare(rw: str, got: dict[str, list[float]], why_not: str) -> list[Comparison]:
    aligned, ordinary = got["page-aligned"], got["ordinary"]
    # fio counts its own thread alone. New blocks are written by worker threads that the kernel makes for a
    # ring (io-wq), which count as ours but not as fio's: there the numbers mean different things.
    whole = rw != "write"
    fio = Comparison(
        *("cpu", f"{rw}, page-aligned memory", "CPU s/GB"),
        *("fio io_uring" if whole else "fio io_uring, less its kernel workers", aligned, got["fio"]),
        at_most=1.0 if whole else None,
    )
    deepspeed = Comparison(
        *(
            "cpu",
            f"{rw}, page-aligned memory",
            "CPU s/GB",
            "DeepSpeed aio",
            aligned,
            got.get("DeepSpeed", []),
        ),
        at_most=0.75,
        why_not=why_not,
    )
    more = Comparison(
        *("cpu", f"{rw}, ordinary torch memory", "CPU s/GB", "page-aligned memory", ordinary, aligned),
        compared="difference",
        at_most=0.10,
    )
    return [fio, more] if rw == "overwrite" else [fio, deepspeed, more]
