"""Files of other libraries loaded into new memory, without a limit on the disk. What is slower then, the disk
or the kernel that provides the memory, depends on the machine. So loads are beside the lower of both in each
round: fio's read of as many bytes, and how fast all processors together make as much new memory resident, in
huge pages or in small ones, whichever is faster. Where the "disk" is memory, its copies and the new pages are
made by the same processors; then no load can be faster than one after the other, which is the second peer.

The files begin at odd places, as the safetensors library and torch.save write them. What was loaded is
compared each time. No memory is prepared before a load: see guest_memory for what that means on virtual
machines.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import model_state
import safetensors.torch
import torch
from guest_memory import populate
from measurement import Comparison, interleave, spent
from page_cache import make_cold
from timed import Timed
from workbench import Workbench

import trunkline as tl

LOWER = "the lower of fio and populating"
BOTH = "fio, and then populating"


def measure(bench: Workbench) -> list[Comparison]:
    bench.free_transfer_memory()
    directory, timed = bench.first, Timed(bench)
    files = {name: directory / f"new-memory{name}" for name in (".safetensors", ".pt")}

    def load(name: str, path: Path) -> Callable[[], float]:
        def check(loaded: dict[str, torch.Tensor]) -> None:
            if not model_state.same(loaded, bench.state):
                raise SystemExit(f"bench: what was loaded from {path.name} differs from the state")

        return timed(name, lambda: tl.load(path), before=lambda: make_cold([path]), after=check)

    def populated(advice: int) -> Callable[[], float]:
        def run() -> float:
            with spent() as time:
                populate(bench.bytes, advice)
            return bench.bytes / time.seconds / 1e9

        return run

    with bench.without_limit():
        safetensors.torch.save_file(bench.state, files[".safetensors"])
        torch.save(bench.state, files[".pt"])
        ways: dict[str, Callable[[], float]] = {name: load(name, path) for name, path in files.items()}
        ways["huge pages"] = populated(mmap.MADV_HUGEPAGE)
        ways["small pages"] = populated(mmap.MADV_NOHUGEPAGE)
        ways["fio"] = lambda: bench.fio([directory / "fio"], "read")[0]
        got = interleave(bench.rounds, ways, "loading into new memory")
    for path in (*files.values(), directory / "fio"):
        path.unlink()
    populating = [max(pair) for pair in zip(got["huge pages"], got["small pages"], strict=True)]
    lower = [min(pair) for pair in zip(got["fio"], populating, strict=True)]
    both = [1 / (1 / fio + 1 / each) for fio, each in zip(got["fio"], populating, strict=True)]
    section = "loading into new memory"
    rows = [
        Comparison(section, f"no limit, {name}", "GB/s", peer, got[name], theirs, at_least=0.9)
        for name in files
        for peer, theirs in ((LOWER, lower), (BOTH, both))
    ]
    rows.append(Comparison(section, "populating, all processors", "GB/s", "fio", populating, got["fio"]))
    return rows + [
        Comparison(
            *("loading into new memory: processor time", f"no limit, {name}", "CPU s/GB", LOWER),
            *(timed.cpu_of(name), lower),
            compared="ours",
        )
        for name in files
    ]
