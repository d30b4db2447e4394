"""A model's weights loaded, verified: from cold .pt, .safetensors and a directory of checkpoints, beside
fio's read of as many bytes, and beside torch.load (with and without mmap, every page touched) and
safetensors; then from files that the page cache holds. What was loaded is compared each time.

Before each load as much new memory as it needs is touched and given back, for all ways alike (see
guest_memory). How much processor time that takes is shown as well: all loads need it but those into=...
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import model_state
import safetensors.torch
import torch
from guest_memory import touch_new_memory
from measurement import Comparison, interleave, spent
from page_cache import make_cold, make_warm
from timed import Timed
from workbench import Workbench

import trunkline as tl

Load: TypeAlias = Callable[[], dict[str, torch.Tensor]]
LoadInto: TypeAlias = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
MOST_CPU = 0.15  # seconds per GB, verification included
MOST_OF_TORCH = 0.31  # the same where torch.load takes 0.48, as it did on the machine of that number
INTO = "Checkpointer, into=..."
OURS = (".pt", ".safetensors", "Checkpointer", INTO)


def measure(bench: Workbench) -> list[Comparison]:
    bench.free_transfer_memory()
    rows = one_disk(bench) + cached(bench)
    if len(bench.disks.directories) > 1:
        rows += several_disks(bench)
    return rows


class Loads:
    """Makes the measurements of loads."""

    def __init__(self, bench: Workbench, prepare: Callable[[list[Path]], None] = make_cold) -> None:
        """`prepare` is what happens to files before each load."""
        self.timed = Timed(bench)
        self._prepare = prepare
        self._state = bench.state
        self._bytes = model_state.total_bytes(bench.state)

    def __call__(self, name: str, load: Load, files: list[Path]) -> Callable[[], float]:
        def before() -> None:
            touch_new_memory(self._bytes)
            self._prepare(files)

        def check(loaded: dict[str, torch.Tensor]) -> None:
            if not model_state.same(loaded, self._state):
                raise SystemExit(f"bench: what {name} loaded differs from the state")

        return self.timed(name, load, before=before, after=check)

    def into(self, name: str, load: LoadInto, files: list[Path]) -> Callable[[], float]:
        """A load into tensors that are there already, as of a model that was just made."""
        target = {key: torch.empty_like(tensor) for key, tensor in self._state.items()}

        def zeroed_target() -> None:
            for tensor in target.values():
                tensor.zero_()

        run = self(name, lambda: load(target), files)

        def cleared_and_run() -> float:
            zeroed_target()
            return run()

        return cleared_and_run


def touched(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A mapped file is read when its pages are touched."""
    for tensor in state.values():
        tensor.view(torch.uint8).reshape(-1)[::4096].sum()
    return state


def one_disk(bench: Workbench) -> list[Comparison]:
    directory, loads = bench.first, Loads(bench)
    pt, st = directory / "m.pt", directory / "m.safetensors"
    checkpointer = tl.Checkpointer(directory / "steps", keep=1)
    with bench.without_limit():
        tl.save(bench.state, pt)
        tl.save(bench.state, st)
        checkpointer.save(1, bench.state, block=True)
    shards = list((directory / "steps").rglob("*.safetensors"))
    new_memory: list[float] = []

    def touch() -> float:
        with spent() as time:
            touch_new_memory(bench.bytes)
        new_memory.append(time.cpu_seconds / bench.bytes * 1e9)
        return bench.bytes / time.seconds / 1e9

    ways = {
        ".pt": loads(".pt", lambda: tl.load(pt), [pt]),
        "torch.load": loads("torch.load", lambda: torch.load(pt, weights_only=True), [pt]),
        "torch.load, mmap": loads(
            "torch.load, mmap", lambda: touched(torch.load(pt, weights_only=True, mmap=True)), [pt]
        ),
        ".safetensors": loads(".safetensors", lambda: tl.load(st), [st]),
        "safetensors": loads("safetensors", lambda: touched(safetensors.torch.load_file(st)), [st]),
        "Checkpointer": loads("Checkpointer", checkpointer.load, shards),
        INTO: loads.into(INTO, lambda target: checkpointer.load(into=target), shards),
        "new memory": touch,
        "fio": lambda: bench.fio([directory / "fio"], "read")[0],
    }
    got = interleave(bench.rounds, ways, "loading, one disk")
    for path in (pt, st, directory / "fio"):
        path.unlink()
    shutil.rmtree(directory / "steps")
    stock = {".pt": ["torch.load", "torch.load, mmap"], ".safetensors": ["safetensors"]}
    rows = [
        Comparison(
            *("loading", f"one disk, {ours}", "GB/s", peer, got[ours], got[peer]),
            at_least=0.97 if peer == "fio" else None,
        )
        for ours in OURS
        for peer in ("fio", *stock.get(ours, ()))
    ]
    rows += [
        Comparison(
            *("loading: processor time", f"one disk, {ours}", "CPU s/GB", peer),
            *(loads.timed.cpu_of(ours), loads.timed.cpu_of(peer)),
            compared="ours",
            at_most=MOST_CPU,
        )
        for ours in OURS
        for peer in [stock.get(ours, ["torch.load"])[0]]
    ]
    rows += [
        Comparison(
            *("loading: processor time beside torch.load", f"one disk, {ours}", "CPU s/GB", "torch.load"),
            *(loads.timed.cpu_of(ours), loads.timed.cpu_of("torch.load")),
            at_most=MOST_OF_TORCH,
        )
        for ours in OURS
    ]
    rows.append(
        Comparison(
            *("loading: processor time", "as much new memory, touched", "CPU s/GB", "torch.load"),
            *(new_memory[1:], loads.timed.cpu_of("torch.load")),
            compared="ours",
        )
    )
    return rows


def copied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that own their memory, as all but mapped ones do."""
    return {name: tensor.clone() for name, tensor in state.items()}


def cached(bench: Workbench) -> list[Comparison]:
    directory, loads = bench.first, Loads(bench, make_warm)
    pt, st = directory / "m.pt", directory / "m.safetensors"
    with bench.without_limit():
        tl.save(bench.state, pt)
        tl.save(bench.state, st)
    ways = {
        ".pt": loads(".pt", lambda: tl.load(pt), [pt]),
        "torch.load": loads("torch.load", lambda: torch.load(pt, weights_only=True), [pt]),
        ".safetensors": loads(".safetensors", lambda: tl.load(st), [st]),
        "safetensors, copied": loads(
            "safetensors, copied", lambda: copied(safetensors.torch.load_file(st)), [st]
        ),
    }
    before = tl.default_engine().stats()["bytes"]["buffered"]
    got = interleave(bench.rounds, ways, "loading, from the page cache")
    buffered = tl.default_engine().stats()["bytes"]["buffered"] - before
    for path in (pt, st):
        path.unlink()
    if buffered < 2 * bench.rounds * bench.bytes:
        print("bench: this kernel does not report what the page cache holds; rows left out", file=sys.stderr)
        return []
    return [
        Comparison("loading", f"from the page cache, {ours}", "GB/s", peer, got[ours], got[peer])
        for ours, peer in ((".pt", "torch.load"), (".safetensors", "safetensors, copied"))
    ]


def several_disks(bench: Workbench) -> list[Comparison]:
    directories, loads = bench.disks.directories, Loads(bench)
    volumes = [directory / "steps" for directory in directories]
    for volume in volumes:
        volume.mkdir()
    checkpointer = tl.Checkpointer(directories[0] / "run", keep=1, volumes=volumes)
    with bench.without_limit():
        checkpointer.save(1, bench.state, block=True)
    shards = [shard for volume in volumes for shard in volume.rglob("*.safetensors")]
    files = [directory / "fio" for directory in directories]
    ways = {
        "Checkpointer": loads("Checkpointer", checkpointer.load, shards),
        INTO: loads.into(INTO, lambda target: checkpointer.load(into=target), shards),
        "fio": lambda: bench.fio(files, "read")[0],
    }
    got = interleave(bench.rounds, ways, f"loading, {len(files)} disks")
    for path in (*files, directories[0] / "run", *volumes):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return [
        Comparison("loading", f"{len(files)} disks, {ours}", "GB/s", peer, got[ours], theirs, at_least=goal)
        for ours in ("Checkpointer", INTO)
        for peer, theirs, goal in bench.peers_of(len(files), got["fio"], 0.95)
    ]
