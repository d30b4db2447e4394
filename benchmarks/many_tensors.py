#!/usr/bin/env python3
"""States of very many small tensors, saved and loaded beside safetensors (one file) and torch.save.

    python benchmarks/many_tensors.py 1000000 [--rounds 3] [--only step_save,step_load]

Each measurement is a process of its own; every way is taken once a round. Shown are the least wall-clock and
processor time of all rounds, and by how much the memory grew at most beside the state. What was loaded is
compared. Tensors have 16 elements of float32, in one dict by name.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from measurement import Comparison, progress, spent

if TYPE_CHECKING:  # it imports torch, which what is measured must not find imported
    from workbench import Workbench

State: TypeAlias = dict[str, Any]
ELEMENTS = 16
MANY = 1_000_000
# Each way and its peer.
WAYS = {
    "safetensors_save": None,
    "safetensors_load": None,
    "torch_save": None,
    "torch_load": None,
    "file_save": "safetensors_save",
    "file_load": "safetensors_load",
    "pt_save": "torch_save",
    "pt_load": "torch_load",
    "step_save": "safetensors_save",
    "step_background": "safetensors_save",
    "step_load": "safetensors_load",
    "step_into": "safetensors_load",
    "step_open": None,
}
# Of these the section of bench.py consists: what its rows are called, and beside whom; "": a peer alone.
SECTION = {
    "safetensors_save": ("", ""),
    "safetensors_load": ("", ""),
    "file_save": (".safetensors, save", "safetensors"),
    "file_load": (".safetensors, load", "safetensors"),
    "step_save": ("Checkpointer, save", "safetensors, one file"),
    "step_background": ("Checkpointer, save in the background", "safetensors, one file"),
    "step_load": ("Checkpointer, load", "safetensors, one file"),
    "step_into": ("Checkpointer, load into=...", "safetensors, one file"),
    "step_open": ("Checkpointer, opening and latest()", "the goal"),
}
NEED_STATE = ("_save", "_background", "_into")


def make_state(count: int) -> State:
    import torch

    first = torch.arange(ELEMENTS, dtype=torch.float32)
    return {name: first + index for index, name in enumerate(make_names(count))}


def check(loaded: State, count: int) -> None:
    import torch

    names = make_names(count)
    found = torch.stack([loaded[name] for name in names])
    expected = torch.arange(count, dtype=torch.float32)[:, None] + torch.arange(ELEMENTS)
    if len(loaded) != count or not torch.equal(found, expected):
        raise SystemExit("many_tensors: what was loaded differs from the state")


def make_names(count: int) -> list[str]:
    return [f"layers.{index:07d}.w" for index in range(count)]


def memory(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"many_tensors: /proc/self/status has no {key}")


def way_of(name: str, directory: Path, state: State) -> Callable[[], Any]:
    """What is measured; nothing is imported within it."""
    import safetensors.torch
    import torch

    import trunkline as tl

    steps = tl.Checkpointer(directory / "steps")
    background = tl.Checkpointer(directory / "background")
    ways: dict[str, Callable[[], Any]] = {
        "safetensors_save": lambda: safetensors.torch.save_file(state, directory / "theirs.safetensors"),
        "safetensors_load": lambda: safetensors.torch.load_file(directory / "theirs.safetensors"),
        "torch_save": lambda: torch.save(state, directory / "theirs.pt"),
        "torch_load": lambda: torch.load(directory / "theirs.pt"),
        "file_save": lambda: tl.save(state, directory / "ours.safetensors"),
        "file_load": lambda: tl.load(directory / "ours.safetensors"),
        "pt_save": lambda: tl.save(state, directory / "ours.pt"),
        "pt_load": lambda: tl.load(directory / "ours.pt"),
        "step_save": lambda: steps.save(1, state, block=True),
        "step_background": lambda: background.save(1, state).wait(),
        "step_load": steps.load,
        "step_into": lambda: steps.load(into=state),
        "step_open": lambda: tl.Checkpointer(directory / "steps").latest(),
    }
    return ways[name]


def measure(name: str, count: int, directory: Path) -> None:
    """In a process of its own: prints what was measured."""
    import torch

    torch.set_num_threads(1)
    if name in ("step_save", "step_background"):
        shutil.rmtree(directory / ("steps" if name == "step_save" else "background"), ignore_errors=True)
    state = make_state(count) if name.endswith(NEED_STATE) else {}
    way = way_of(name, directory, state)
    if name == "step_into":
        for tensor in state.values():
            tensor.zero_()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = memory("VmRSS")
    with spent() as time:
        result = way()
    peak = memory("VmHWM") - before
    if name.endswith(("_load", "_into")):
        check(result, count)
    print(json.dumps({"wall": time.seconds, "cpu": time.cpu_seconds, "peak": peak}))


def run_all(count: int, rounds: int, only: list[str], directory: Path) -> dict[str, list[dict[str, float]]]:
    """Wall-clock seconds, processor seconds and bytes of memory by way and round."""
    results: dict[str, list[dict[str, float]]] = {name: [] for name in only}
    for number in range(1, rounds + 1):
        for name in only:
            progress(f"many_tensors: round {number} of {rounds}: {name}")
            command = [sys.executable, __file__, str(count), "--measure", name, "--dir", str(directory)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            results[name].append(json.loads(done.stdout))
    return results


def compare(bench: Workbench) -> list[Comparison]:
    """The section of bench.py: a million tensors, the least of two rounds."""
    with tempfile.TemporaryDirectory(prefix="trunkline-many-", dir=bench.first) as directory:
        results = run_all(MANY, 2, list(SECTION), Path(directory))

    def least(name: str) -> list[float]:
        return [min(each["wall"] for each in results[name])]

    rows = []
    for name, (case, peer) in SECTION.items():
        if not peer:
            continue
        theirs = [0.2] if peer == "the goal" else least(WAYS[name] or "")
        at_most = {"the goal": 1.0, "safetensors, one file": 1.5}.get(peer)
        rows.append(
            Comparison(
                *("a million tensors of 64 bytes", case, "s", peer, least(name), theirs), at_most=at_most
            )
        )
    return rows


def print_all(results: dict[str, list[dict[str, float]]], count: int, rounds: int) -> None:
    def best(name: str, key: str) -> float:
        return min(each[key] for each in results[name])

    print(f"{count} tensors, best of {rounds}")
    for name in results:
        row = f"{name:17} {best(name, 'wall'):8.3f} s, cpu {best(name, 'cpu'):8.3f} s"
        row += f", memory + {best(name, 'peak') / 1e6:6.0f} MB"
        peer = WAYS[name]
        if peer in results:
            ratios = [best(name, key) / best(peer, key) for key in ("wall", "cpu", "peak")]
            row += f" | {' / '.join(f'{ratio:.2f}' for ratio in ratios)} of {peer}"
        print(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("count", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(WAYS))
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--dir", type=Path, help="for the files, which are removed at the end")
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.count, options.dir)
        return
    with tempfile.TemporaryDirectory(prefix="trunkline-many-", dir=options.dir) as directory:
        results = run_all(options.count, options.rounds, options.only.split(","), Path(directory))
    print_all(results, options.count, options.rounds)


if __name__ == "__main__":
    main()
